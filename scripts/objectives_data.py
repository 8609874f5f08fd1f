"""What the study of ELECTRA and Electric reads: held-out passages, a start cut from MiniLM, pairs of sentences."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
from transformers import AutoModel, BertTokenizerFast, ElectraConfig, ElectraModel

from condenser.corpus.tokens import bare_tokenizer, load_tokenizer
from condenser.files import read_lines
from condenser.hub import quiet_transformers
from retrieval.quickstart import default_weights

WORD = re.compile(r"\w+")
SENTENCE = re.compile(r"(?<=[.!?])\s+")
REDRAWN = 0.15
FEWEST_WORDS, MOST_WORDS = 8, 32
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ALWAYS = "abcdefghijklmnopqrstuvwxyz0123456789"


class Pair(NamedTuple):
    """A sentence and what it is set against."""

    sentence: str
    redrawn: str
    swapped: str


def texts_of(file: Path) -> list[str]:
    """Return the passages' texts."""
    return [orjson.loads(line)["text"] for _, line in read_lines(file)]


def cut_start(folder: Path, texts: list[str], size: int, layers: int) -> None:
    """Write MiniLM's first layers as an encoder of ELECTRA's, with its most frequent word pieces in some texts.

    Special tokens, letters and digits stay. Dropout is off: less than an epoch is read.
    """
    if folder.is_dir():
        return
    source = Path(default_weights())
    engine = bare_tokenizer(load_tokenizer(source))
    counts: Counter[int] = Counter()
    for first in range(0, len(texts), 500):
        for encoding in engine.encode_batch_fast(texts[first : first + 500], add_special_tokens=False):
            counts.update(encoding.ids)
    vocabulary = [line for _, line in read_lines(source / "vocab.txt")]
    ranked = [token for token, _ in counts.most_common()]
    letters = [token for token, word in enumerate(vocabulary)
               if len(letter := word.removeprefix("##")) == 1 and (counts[token] or letter in ALWAYS)]  # fmt: skip
    special = [vocabulary.index(word) for word in SPECIAL]
    kept = list(dict.fromkeys([*special, *letters, *ranked]))[:size]
    with quiet_transformers():
        encoder = AutoModel.from_pretrained(source, add_pooling_layer=False)
    known = encoder.config
    config = ElectraConfig(
        vocab_size=len(kept),
        embedding_size=known.hidden_size,
        hidden_size=known.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=known.num_attention_heads,
        intermediate_size=known.intermediate_size,
        layer_norm_eps=known.layer_norm_eps,
        max_position_embeddings=known.max_position_embeddings,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    cut = ElectraModel(config)
    weights = encoder.state_dict()
    weights["embeddings.word_embeddings.weight"] = weights["embeddings.word_embeddings.weight"][kept]
    cut.load_state_dict({name: weights[name] for name in cut.state_dict()})
    draft = folder.with_suffix(".draft")
    draft.mkdir(exist_ok=True)
    (draft / "vocab.txt").write_text("".join(f"{vocabulary[token]}\n" for token in kept))
    with quiet_transformers():
        BertTokenizerFast(vocab=str(draft / "vocab.txt"), do_lower_case=True).save_pretrained(draft)
        cut.save_pretrained(draft)
    draft.rename(folder)


def make_pairs(train: list[str], held_out: list[str], count: int) -> list[Pair]:
    """Draw held-out sentences that stand in no training passage, each with its two counterparts.

    A word is a run of letters and digits. What is drawn comes in lower case, and is not the word that it replaces.
    """
    counts = Counter(word for text in train for word in WORD.findall(text.lower()))
    words, shares = list(counts), np.array(list(counts.values())) / counts.total()
    known = {sentence for text in train for sentence in SENTENCE.split(text)}
    found = {sentence: None for text in held_out for sentence in SENTENCE.split(text) if sentence not in known}
    fitting = [one for one in found if FEWEST_WORDS <= len(WORD.findall(one)) <= MOST_WORDS]
    rng = np.random.default_rng(7)
    pairs = []
    for number in rng.permutation(len(fitting))[:count]:
        sentence = fitting[number]
        spans = [match.span() for match in WORD.finditer(sentence)]
        own = [sentence[start:stop].lower() for start, stop in spans]
        chosen = rng.permutation(len(spans))[: max(1, round(REDRAWN * len(spans)))]
        redrawn = {}
        for place in sorted(map(int, chosen)):
            while (word := words[rng.choice(len(words), p=shares)]) == own[place]:
                pass
            redrawn[place] = word
        one = int(rng.integers(len(spans)))
        others = [place for place, word in enumerate(own) if word != own[one]]
        if not others:
            continue
        other = int(rng.choice(others))
        pairs.append(
            Pair(sentence, put(sentence, spans, redrawn), put(sentence, spans, {one: own[other], other: own[one]}))
        )
    return pairs


def put(sentence: str, spans: list[tuple[int, int]], words: dict[int, str]) -> str:
    """Return a sentence with other words in some places."""
    parts, end = [], 0
    for place, (start, stop) in enumerate(spans):
        parts += [sentence[end:start], words.get(place, sentence[start:stop])]
        end = stop
    return "".join([*parts, sentence[end:]])
