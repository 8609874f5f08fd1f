"""What the objectives cost on one CPU thread beside masked-LM training, and what scoring costs by either method.

    python scripts/bench_objectives.py [--quick]
    python scripts/bench_objectives.py --memory

CPU seconds of the process, variants interleaved, medians of 5 rounds (quick: 3), on medquad's passages in BERT's
vocabulary of 30,522 and models of the size ``mini`` (4 layers of 256) with random weights. The last line is JSON:

- ``electra_over_mlm``: the time of a step of ``--objective electra``, its generator a quarter as wide as the
  discriminator, over one of ``--objective mlm``, forward, backward and optimiser, on the same spans of 128 tokens;
- ``electric_over_mlm``: the same of ``--objective electric``;
- ``score_vs_masked``: the time of the masked-LM scorer over Electric's, on the same texts of 20 tokens each.

``--memory`` measures in a process of its own what a step of Electric at the size ``tiny`` adds to the process's memory
at most, over 128 texts of 128 tokens: ``peak_above_mb``, with the step's CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from condenser.corpus.tokens import TokenStore, load_tokenizer
from condenser.models.backbone import new_backbone
from condenser.models.cloze import TwoTowerCloze, tower_config
from condenser.models.discriminator import new_discriminator
from condenser.models.electric import ElectricModel
from condenser.options import PretrainOptions, SpansOptions
from condenser.pretrain import OBJECTIVES, build_batches, loop_settings
from condenser.scorer import Scorer
from condenser.training.loop import start_accelerator
from retrieval.collections import open_collection
from retrieval.quickstart import default_weights
from retrieval.spans import build_spans_of

VOCABULARY = 30_522
TOKENS = 20


def main() -> None:
    """Measure, print each time and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds, small batches: half a minute of one core")
    parser.add_argument("--memory", action="store_true", help="measure memory alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        print(json.dumps(memory_of_a_step()))
        return
    rounds, spans, texts = (3, 8, 64) if arguments.quick else (5, 32, 512)
    with tempfile.TemporaryDirectory() as folder:
        steps = {name: step_of(name, store_in(Path(folder)), spans) for name in ("mlm", "electra", "electric")}
        times = medians(steps, rounds)
    scores = medians(scorers(texts), rounds)
    result = {
        "spans": spans,
        "mlm_step_s": times["mlm"],
        "electra_over_mlm": times["electra"] / times["mlm"],
        "electric_over_mlm": times["electric"] / times["mlm"],
        "texts": texts,
        "score_vs_masked": scores["masked_lm"] / scores["electric"],
        "texts_per_cpu_s": texts / scores["electric"],
    }
    print(json.dumps(result))


def medians(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Run the variants in turn, once without the clock, and return the median CPU seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            began = time.process_time()
            run()
            taken = time.process_time() - began
            if number:
                times[name].append(taken)
                print(f"round {number} {name:10} {taken:7.2f} s", flush=True)
    return {name: statistics.median(values) for name, values in times.items()}


def store_in(folder: Path) -> Path:
    """Cut medquad into spans of 128 tokens, once."""
    output = folder / "spans"
    options = SpansOptions(collection="medquad", tokenizer=default_weights(), max_length=128, output=str(output))
    return output if output.is_dir() else Path(build_spans_of(options))


def step_of(objective: str, data: Path, spans: int) -> Callable[[], object]:
    """Return one optimiser step after another of an objective, at the options' defaults."""
    options = PretrainOptions(
        objective=objective,  # type: ignore[arg-type]
        data=str(data),
        model_size="mini",
        output="",
        max_steps=1_000,
        batch_size=spans,
        device="cpu",
    )
    row, store = OBJECTIVES[objective], TokenStore(data)
    tokenizer = load_tokenizer(store.tokenizer_folder)
    torch.manual_seed(0)
    start = row.start(options, store, tokenizer)
    batches = build_batches(options, row, store, tokenizer, start.config)
    run_step = row.step(options, store, tokenizer)
    accelerator = start_accelerator(loop_settings(options))
    model = start.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    made = iter(range(options.max_steps or 0))

    def run() -> None:
        micro_batches = batches(next(made))
        run_step(model, micro_batches, accelerator)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def scorers(count: int) -> dict[str, Callable[[], object]]:
    """Return both methods over the same texts, which have 20 tokens each."""
    torch.manual_seed(0)
    folder = Path(default_weights())
    energy = new_discriminator("mini", VOCABULARY, 512, 0)
    model = ElectricModel(energy, TwoTowerCloze(tower_config(energy.config, 0.25), energy.electra.embeddings))
    electric = Scorer(model, folder)
    masked = Scorer(new_backbone("mini", VOCABULARY, 512, 0), folder)
    tokenizer = load_tokenizer(folder)
    texts: list[str] = []
    for passage in open_collection("medquad").passages():
        ids = tokenizer(passage.text, add_special_tokens=False, truncation=True, max_length=TOKENS).input_ids
        text = tokenizer.decode(ids)
        if len(ids) == TOKENS == len(tokenizer(text, add_special_tokens=False).input_ids):
            texts.append(text)
        if len(texts) == count:
            break
    return {"electric": lambda: electric.score(texts), "masked_lm": lambda: masked.score(texts)}


def memory_of_a_step() -> dict[str, float]:
    """Return what a step over 128 texts of 128 tokens adds to this process."""
    torch.manual_seed(0)
    energy = new_discriminator("tiny", VOCABULARY, 128, 0)
    model = ElectricModel(energy, TwoTowerCloze(tower_config(energy.config, 0.25), energy.electra.embeddings)).train()
    ids = torch.randint(1_000, VOCABULARY, (128, 128))
    replaced = torch.zeros(128, 128, dtype=torch.bool)
    replaced[:, 1:20] = True
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    out = model(ids, None, replaced, range(128))
    (50 * out.nce + out.noise_mle).backward()
    above = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"peak_above_mb": above / 1024, "cpu_s": time.process_time() - began}


if __name__ == "__main__":
    main()
