"""Measure what ELECTRA and Electric learn in a few CPU minutes: held-out medquad passages, small models, one thread.

Every 20th passage is held out. The start is the first layers of the installed MiniLM, with the word pieces that are the
most frequent in the other passages and without dropout; ELECTRA starts from it, and Electric from ELECTRA's
discriminator. Each training is one command of `condenser` with its folder in --work, and goes on there if stopped.
Each result is a JSON file in --output with the commands, the processor time, the figures and some lines of the log;
results that are there are passed over:

- ``electra.json``: how often the generator's draws are the text's own tokens at masked held-out places, and the AUC
  with which the discriminator tells replaced tokens from others, beside that of the tokens' frequency alone;
- ``electric.json``: in how many of 1,000 pairs a held-out sentence scores above itself with 15 % of its words drawn
  anew from the words' frequencies, and above itself with two words swapped, by Electric and by other scorers:
  ``noise_model`` (Electric's, log q), ``discriminator`` and ``generator`` (ELECTRA's; the latter masks a token at a
  time) and ``unigram`` (frequencies of the word pieces). A tie counts half.

    python scripts/objectives_study.py --work /tmp/objectives --output docs/results/objectives --bfloat16
    python scripts/objectives_study.py --work /tmp/toy --output /tmp/toy-results --quick    # shows that it runs

Sentences are of 8 to 32 words and stand nowhere in the training passages. The last line is JSON: the figures alone.
The MiniLM, all-MiniLM-L6-v2, was trained on MS MARCO and Natural Questions among others, not on medquad.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import orjson
import torch

from condenser.corpus.batches import PretrainBatch
from condenser.corpus.corruption import IGNORED
from condenser.corpus.tokens import TokenStore, load_tokenizer
from condenser.errors import UserError
from condenser.files import read_json, read_lines, write_json
from condenser.models.backbone import load_backbone
from condenser.models.discriminator import load_discriminator
from condenser.models.electra import GENERATOR_FOLDER, ElectraPair, draw_tokens
from condenser.models.electric import ElectricModel
from condenser.models.rows import batches_by_length, padded_rows
from condenser.models.unpadded import row_of_texts
from condenser.options import PretrainOptions, SpansOptions
from condenser.pretrain import OBJECTIVES, build_batches
from condenser.scorer import Scorer
from condenser.talk import say
from retrieval.stages import Stage, command_line, run_stages
from scripts.held_out import hold_out
from scripts.objectives_data import Pair, cut_start, make_pairs, texts_of

SCORERS = ("electric", "unigram", "noise_model", "discriminator", "generator")


class Settings(NamedTuple):
    """Sizes and lengths of the study."""

    vocabulary: int = 6000
    layers: int = 3
    span: int = 48
    batch_size: int = 16
    electra_steps: int = 800
    electra_rate: float = 5e-4
    masked: float = 0.25
    electric_from: str = "electra"
    electric_steps: int = 1000
    electric_rate: float = 5e-4
    noise_size: float = 0.25
    judged_spans: int = 2000
    pairs: int = 1000
    bfloat16: bool = False


TOY = Settings(
    vocabulary=200, layers=1, span=24, batch_size=4, electra_steps=3, electric_steps=3, judged_spans=8, pairs=8
)


def stages(settings: Settings, work: Path, train: Path, held_out: Path) -> dict[str, Stage]:
    """Return the commands by name; they begin with what `cut_start` wrote."""
    start = str(work / "start")
    cut = SpansOptions(input=[str(train)], tokenizer=start, max_length=settings.span, output=str(work / "spans"))
    learnt = PretrainOptions(
        objective="electra",
        data=cut.output,
        init=start,
        init_generator=start,
        mlm_probability=settings.masked,
        batch_size=settings.batch_size,
        max_steps=settings.electra_steps,
        learning_rate=settings.electra_rate,
        mixed_precision="bf16" if settings.bfloat16 else "no",
        log_every=10,
        save_every=100,
        output=str(work / "electra"),
    )
    return {
        "spans": Stage("spans", cut),
        "held_out": Stage("spans", replace(cut, input=[str(held_out)], output=str(work / "held-out"))),
        "electra": Stage("pretrain", learnt),
        "electric": Stage(
            "pretrain",
            replace(
                learnt,
                objective="electric",
                init=str(work / settings.electric_from),
                init_generator=None,
                generator_size=settings.noise_size,
                mlm_probability=0.15,
                max_steps=settings.electric_steps,
                learning_rate=settings.electric_rate,
                output=str(work / "electric"),
            ),
        ),
    }


def trained(stage: Stage, work: Path) -> float:
    """Run a training, and return its CPU seconds, those before it was stopped included."""
    file = work / f"{stage.made.name}.cpu.json"
    before = read_json(file)["cpu_s"] if file.is_file() else 0.0
    if stage.made.exists():
        return float(before)
    began = time.process_time()
    try:
        run_stages([stage])
    finally:
        write_json(file, {"cpu_s": before + time.process_time() - began})
    return float(read_json(file)["cpu_s"])


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return how often a positive scores above a negative, a tie being half; half where there are no such pairs."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones * zeros:
        return 0.5
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


@torch.inference_mode()
def judge(pair: ElectraPair, batch: PretrainBatch) -> dict[str, np.ndarray]:
    """Return for each token but CLS and SEP: verdict, token, whether it was asked for, and whether replaced."""
    row = row_of_texts(pair.discriminator.config, batch.input_ids, batch.attention_mask)
    wanted = row.unpadded(batch.labels)
    asked = wanted != IGNORED
    places = (batch.labels != IGNORED).sum(dim=1).tolist()
    drawn = draw_tokens(pair.generator_logits(row, asked).float(), places, batch.seeds)
    filled = row.ids[0].masked_scatter(asked, drawn)
    verdicts = pair.discriminator_logits(replace(row, ids=filled[None]))
    inside = torch.ones_like(asked)
    inside[row.starts] = inside[row.starts - 1] = False
    found = {"verdict": verdicts, "token": filled, "asked": asked, "replaced": asked & (filled != wanted)}
    return {name: values[inside].numpy() for name, values in found.items()}


def electra_figures(settings: Settings, made: dict[str, Stage]) -> dict[str, float]:
    """Measure a generator and its discriminator on held-out spans, with 15 % of the tokens masked."""
    folder = made["electra"].made
    discriminator, _ = load_discriminator(folder)
    pair = ElectraPair(discriminator, load_backbone(folder / GENERATOR_FOLDER)[0], sharing="none").eval()
    store = TokenStore(made["held_out"].made)
    tokenizer = load_tokenizer(store.tokenizer_folder)
    rows = min(settings.batch_size, store.span_count)
    options = replace(made["electra"].options, data=str(store.folder), mlm_probability=0.15, batch_size=rows)
    batches = build_batches(options, OBJECTIVES["electra"], store, tokenizer, discriminator.config)
    steps = min(batches.steps_per_epoch, -(-settings.judged_spans // rows))
    parts = [judge(pair, batch) for step in range(steps) for batch in batches(step)]
    verdict, token, asked, replaced = (np.concatenate([part[name] for part in parts]) for name in parts[0])
    rarity = -np.log1p(TokenStore(made["spans"].made).unigram_counts(len(tokenizer)))[token]
    by_frequency = auc(rarity, replaced)
    return {
        "tokens": len(token),
        "masked": int(asked.sum()),
        "generator_accuracy": float(1 - replaced.sum() / asked.sum()),
        "replaced": float(replaced.mean()),
        "discriminator_auc": auc(verdict, replaced),
        "frequency_auc": max(by_frequency, 1 - by_frequency),
        "discriminator_auc_of_masked": auc(verdict[asked], replaced[asked]),
        "replaced_found": float((verdict > 0)[replaced].mean()),
        "called_replaced_wrongly": float((verdict > 0)[~replaced].mean()),
    }


def preferred(score: Any, pairs: list[Pair]) -> dict[str, float]:
    """Return in which share of the pairs the sentence scores above each counterpart; ``score`` takes texts."""
    own, redrawn, swapped = (np.asarray(score([pair[kind] for pair in pairs])) for kind in range(3))
    return {
        name: float(np.mean((own > other) + 0.5 * (own == other)))
        for name, other in (("redrawn", redrawn), ("swapped", swapped))
    }


class OtherScorers:
    """What Electric is set beside, on the same word pieces in the same frame."""

    def __init__(self, electric: Scorer, folder: Path, counts: np.ndarray, electra: Path) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._electra = electra
        self._electric = electric
        self._log_share = np.log((counts + 1) / (counts.sum() + len(counts)))

    def unigram(self, texts: list[str]) -> list[float]:
        """Sum log frequencies."""
        return [round(float(self._log_share[ids[1:-1]].sum()), 6) for ids in self._tokenizer(texts).input_ids]

    @torch.inference_mode()
    def noise_model(self, texts: list[str]) -> list[float]:
        """Sum log q of Electric's own noise model."""
        model = self._electric.model
        assert isinstance(model, ElectricModel)
        scores = []
        for text in texts:
            ids = torch.tensor([self._tokenizer(text).input_ids])
            scores.append(float(model.noise.log_likelihood(model.noise(ids, None)[0, 1:-1], ids[0, 1:-1]).sum()))
        return scores

    def generator(self, texts: list[str]) -> list[float]:
        """Sum log p of ELECTRA's generator, a token masked at a time."""
        return [one.pll for one in Scorer.load(self._electra / GENERATOR_FOLDER, method="masked_lm").score(texts)]

    @torch.inference_mode()
    def discriminator(self, texts: list[str]) -> list[float]:
        """Sum the log-probabilities that a token is the text's own."""
        model: Any = load_discriminator(self._electra)[0].eval()
        rows = self._tokenizer(texts).input_ids
        scores = [0.0] * len(rows)
        for batch in batches_by_length([len(row) for row in rows], 3072):
            ids, mask = padded_rows([rows[number] for number in batch], 0, torch.device("cpu"))
            verdicts = model(input_ids=ids, attention_mask=mask).logits
            for number, verdict in zip(batch, torch.nn.functional.logsigmoid(-verdicts), strict=True):
                scores[number] = float(verdict[1 : len(rows[number]) - 1].sum())
        return scores


def electric_figures(scorers: list[str], made: dict[str, Stage], pairs: list[Pair]) -> dict[str, Any]:
    """Measure in how many pairs scorers prefer the sentence, and how far exp(-E) is from a probability."""
    folder = made["electric"].made
    scorer = Scorer.load(folder)
    store = TokenStore(made["spans"].made)
    others = OtherScorers(scorer, folder, store.unigram_counts(len(load_tokenizer(folder))), made["electra"].made)
    by_name = {
        "electric": lambda texts: [one.pll for one in scorer.score(texts)],
        "unigram": others.unigram,
        "noise_model": others.noise_model,
        "discriminator": others.discriminator,
        "generator": others.generator,
    }
    shares = {name: preferred(by_name[name], pairs) for name in scorers}
    log_z = scorer.log_z([pair.sentence for pair in pairs[:100]], draws=64)
    return {"pairs": len(pairs), "preferred": shares, "log_z": log_z._asdict()}


def curve(folder: Path, rows: int = 12) -> list[dict[str, float]]:
    """Return some lines of a training's log, the last among them."""
    lines = [orjson.loads(line) for _, line in read_lines(folder / "log.jsonl")]
    kept = sorted({round(place) for place in np.linspace(0, len(lines) - 1, rows)})
    return [{name: round(value, 4) for name, value in lines[place].items() if name != "lr"} for place in kept]


def study(given: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Make the results that are missing, and return the figures of all."""
    given.work.mkdir(parents=True, exist_ok=True)
    train, held_out = hold_out(given.collection, given.work)
    made = stages(settings, given.work, train, held_out)
    figures = {}
    for name in given.parts:
        file = given.output / f"{name}.json"
        if file.is_file():
            say(f"{file}: up to date")
            result = read_json(file)
            if result["settings"] != settings._asdict() or result["collection"] != given.collection:
                raise UserError("was made with other settings", file, "choose another --output")
            figures[name] = result["figures"]
            continue
        cut_start(given.work / "start", texts_of(train), settings.vocabulary, settings.layers)
        run_stages([made["spans"], made["held_out"]])
        needed = ["electra"] if name == "electra" or settings.electric_from == "electra" else []
        needed += ["electric"] if name == "electric" else []
        spent = {one: round(trained(made[one], given.work), 1) for one in needed}
        if name == "electra":
            figures[name] = electra_figures(settings, made)
        else:
            pairs = make_pairs(texts_of(train), texts_of(held_out), settings.pairs)
            figures[name] = electric_figures(given.scorers, made, pairs)
        lines = [command_line(made[one]).replace(str(given.work), "WORK") for one in ("spans", "held_out", *needed)]
        result = {
            "collection": given.collection,
            "settings": settings._asdict(),
            "commands": lines,
            "train_cpu_s": spent,
            "figures": figures[name],
            "log": curve(made[name].made),
        }
        write_json(file, result)
    return figures


def main() -> int:
    """Read the options and run the study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of artifacts")
    parser.add_argument("--output", type=Path, required=True, help="folder of results, one JSON each")
    parser.add_argument("--collection", default="medquad")
    parser.add_argument("--parts", nargs="+", default=["electra", "electric"], choices=["electra", "electric"])
    parser.add_argument("--scorers", nargs="+", default=list(SCORERS), choices=SCORERS)
    parser.add_argument("--quick", action="store_true", help="a toy length: shows that it runs, measures nothing")
    whole = parser.add_argument_group("sizes and lengths")
    for name, default in Settings()._asdict().items():
        if isinstance(default, bool):
            whole.add_argument(f"--{name}", action="store_true", help="train in it: faster on CPUs with AMX")
        else:
            whole.add_argument(f"--{name}", type=type(default), default=default)
    given = parser.parse_args()
    settings = TOY if given.quick else Settings(*(getattr(given, name) for name in Settings._fields))
    torch.set_num_threads(1)
    try:
        figures = study(given, settings)
    except UserError as error:
        print(f"objectives_study: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
