"""Scores of texts and pairs: against the golden numbers, naive loops, and brute force over the vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, BertTokenizer, ElectraConfig, ElectraForPreTraining

from condenser.errors import UserError
from condenser.models.backbone import load_backbone
from condenser.scorer import Scorer
from tests.condenser.models.test_electric import EXPECTED, TENSORS, electric
from tests.condenser.reference import TOLERANCE

TEXTS = ["the cat sing to the bird", "fever", "", "a king of war and peace, a new city of one river", "what is money"]


@pytest.fixture(scope="module")
def golden_scorer(tmp_path_factory: pytest.TempPathFactory) -> Scorer:
    """The golden model, its ordinary tokens written as letters: 5 is a, 13 is i."""
    folder = tmp_path_factory.mktemp("letters")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghi"]) + "\n")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return Scorer(electric(), folder, batch_tokens=64)


def test_scores_equal_the_reference(golden_scorer: Scorer) -> None:
    scores = golden_scorer.score(["a b c d e f g h", "i h a e"])
    for row, score in enumerate(scores):
        assert score.pll == pytest.approx(EXPECTED["pll_sum"][row], rel=TOLERANCE["float32"])
        assert score.per_token == pytest.approx(EXPECTED["pll_mean"][row], rel=TOLERANCE["float32"])
        energy = TENSORS["energy_clean"][row][TENSORS["candidates"][row].bool()]
        np.testing.assert_allclose(score.values, -energy, rtol=1e-5, atol=1e-7)
    assert golden_scorer.tokens(scores[1].token_ids) == ["i", "h", "a", "e"]


def test_log_z_is_near_the_sum_over_the_vocabulary(golden_scorer: Scorer) -> None:
    """One position each of many copies of a text: the mean over them nears the mean over its positions."""
    for row, text in enumerate(["a b c d e f g h", "i h a e"]):
        candidates = TENSORS["candidates"][row].bool()
        exact = TENSORS["log_Z"][row][candidates]
        found = golden_scorer.log_z([text] * 60, draws=800, seed=1)
        assert found.positions == 60
        assert exact.min() - 0.05 < found.mean < exact.max() + 0.05
        assert found.mean == pytest.approx(exact.mean().item(), abs=0.05)
        assert golden_scorer.log_z([text] * 60, draws=800, seed=1) == found
    one_word = "a"
    table = []
    for token in range(14):
        ids = torch.tensor([[2, token, 3]])
        table.append(golden_scorer.model.energy(ids).logits[0, 1].item())
    exact = torch.tensor(table).neg().logsumexp(0).item()
    assert golden_scorer.log_z([one_word], draws=20_000).mean == pytest.approx(exact, abs=0.03)
    assert golden_scorer.log_z(["", " "]).positions == 0


@pytest.mark.parametrize("batch_tokens", [1, 30, 1000])
def test_electric_scores_are_those_of_each_text_alone(electric_folder: Path, batch_tokens: int) -> None:
    scorer = Scorer.load(electric_folder, batch_tokens=batch_tokens)
    assert scorer.method == "electric"
    energy = ElectraForPreTraining.from_pretrained(electric_folder).eval()
    tokenizer = BertTokenizer.from_pretrained(electric_folder)
    for text, score in zip(TEXTS, scorer.score(TEXTS), strict=True):
        with torch.no_grad():
            alone = -energy(**tokenizer(text, return_tensors="pt")).logits[0, 1:-1]
        np.testing.assert_allclose(score.values, alone, rtol=1e-4, atol=1e-6)
        assert score.pll == pytest.approx(alone.sum().item(), rel=1e-4, abs=1e-6)
    assert scorer.score([]) == []
    assert scorer.score([""])[0].per_token is None


@pytest.mark.parametrize("batch_tokens", [1, 50, 5000])
def test_masked_scores_take_one_pass_for_each_token(tiny_bert: Path, batch_tokens: int) -> None:
    scorer = Scorer.load(tiny_bert, batch_tokens=batch_tokens)
    assert scorer.method == "masked_lm"
    model = AutoModelForMaskedLM.from_pretrained(tiny_bert).eval()
    tokenizer = BertTokenizer.from_pretrained(tiny_bert)
    for text, score in zip(TEXTS, scorer.score(TEXTS), strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        naive = []
        for place in range(1, ids.shape[1] - 1):
            masked = ids.clone()
            masked[0, place] = tokenizer.mask_token_id
            with torch.no_grad():
                naive.append(model(masked).logits[0, place].log_softmax(-1)[ids[0, place]].item())
        np.testing.assert_allclose(score.values, naive, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="log Z is asked of a masked language model"):
        scorer.log_z(TEXTS)


@pytest.mark.parametrize("kind", ["electric", "masked_lm"])
def test_gain_counts_the_query_alone(electric_folder: Path, tiny_bert: Path, kind: str) -> None:
    scorer = Scorer.load(electric_folder if kind == "electric" else tiny_bert)
    passages, queries = ["the cat sing", "", "a king of war"], ["what is a cat", "who is king", "fever"]
    gains = scorer.gain(passages, queries)
    tokenizer = BertTokenizer.from_pretrained(tiny_bert)
    for passage, query, gain, alone in zip(passages, queries, gains, scorer.score(queries), strict=True):
        told, asked = (tokenizer(text, add_special_tokens=False).input_ids for text in (passage, query))
        assert gain.given.token_ids == asked == gain.alone.token_ids
        ids = torch.tensor([[2, *asked, 3, *told, 3]])
        with torch.no_grad():
            if kind == "electric":
                naive = -scorer.model.energy(ids).logits[0, 1 : len(asked) + 1]
            else:
                rows = ids.repeat(len(asked), 1)
                places = torch.arange(len(asked)) + 1
                rows[torch.arange(len(asked)), places] = tokenizer.mask_token_id
                log_p = scorer.model.lm(rows).logits[torch.arange(len(asked)), places].log_softmax(-1)
                naive = log_p[torch.arange(len(asked)), torch.tensor(asked)]
        np.testing.assert_allclose(gain.given.values, naive, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(gain.alone.values, alone.values, rtol=1e-4, atol=1e-5)
        assert gain.gain == pytest.approx(naive.sum().item() - alone.pll, rel=1e-4, abs=1e-4)


def test_what_is_too_long_loses_its_end_and_a_pair_its_passages(electric_folder: Path) -> None:
    scorer = Scorer.load(electric_folder, max_length=8)
    whole = Scorer.load(electric_folder)
    long = "one two three one two three one two"
    score = scorer.score([long, "one"])
    assert [one.cut for one in score] == [True, False]
    assert score[0].token_ids == whole.score(["one two three one two three"])[0].token_ids
    gain = scorer.gain([long], ["cat dog"])[0]
    assert gain.given.cut and not gain.alone.cut
    expected = whole.gain(["one two three"], ["cat dog"])[0]
    np.testing.assert_allclose(gain.given.values, expected.given.values, rtol=1e-5)
    short = whole.gain([long], ["cat dog"], passage_max_length=3)[0]
    assert short.given.cut
    np.testing.assert_allclose(short.given.values, expected.given.values, rtol=1e-5)
    over = scorer.gain(["a passage"], [long])[0]  # nothing of the passage is left
    assert over.given.cut and over.alone.cut and len(over.given.values) == len(over.alone.values) == 5
    assert over.given.token_ids == over.alone.token_ids
    with pytest.raises(UserError, match="max_length is 3, expected 4 or more"):
        Scorer.load(electric_folder, max_length=3).gain(["cat"], ["dog"])


def test_what_cannot_score_is_refused(electric_folder: Path, tiny_bert: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="beyond the model's 24 positions"):
        Scorer.load(electric_folder, max_length=25)
    with pytest.raises(UserError, match=r"electric\.json: no such file"):
        ElectraForPreTraining(
            ElectraConfig(vocab_size=60, embedding_size=8, hidden_size=8, num_attention_heads=1, intermediate_size=8)
        ).save_pretrained(tmp_path / "a")
        Scorer.load(tmp_path / "a", method="electric")
    with pytest.raises(UserError, match="no head that gives energies"):
        Scorer.load(tiny_bert, method="electric")
    with pytest.raises(UserError, match="no masked-LM head, and no noise model"):
        Scorer.load(tmp_path / "a")
    scorer = Scorer.load(electric_folder)
    with pytest.raises(UserError, match="2 passages and 1 queries"):
        scorer.gain(["a", "b"], ["c"])
    with pytest.raises(UserError, match="expected a list of texts"):
        scorer.score("a text")
    assert load_backbone(tiny_bert)[1] is False
