"""Electric's energies, noise, losses and scores against numbers from an independent implementation."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, ElectraConfig, ElectraForPreTraining

from condenser.errors import UserError
from condenser.models.cloze import TwoTowerCloze, tower_config, tower_of
from condenser.models.electric import (
    RELEASED_LOG_RATIO,
    ElectricModel,
    candidate_positions,
    energies,
    load_noise,
    nce_losses,
    noise_log_ratio,
)
from tests.reference_numbers import golden_folder, golden_json

EXPECTED = golden_json("electra_lm/electric/expected.json")
TENSORS = load_file(golden_folder() / "electra_lm/electric/tensors.safetensors")
IDS, MASK = TENSORS["input_ids"], TENSORS["attention_mask"]
ATTENDED, CANDIDATES, REPLACED = (TENSORS[name].bool() for name in ("attention_mask", "candidates", "replaced"))
NOISED = TENSORS["noised_ids"]
ORDINARY = range(5, 14)
SEEDS = [11, 12]


def exactly(value: float) -> object:
    return pytest.approx(value, rel=1e-10, abs=1e-12)


def assert_equal(ours: Tensor, reference: Tensor) -> None:
    torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)


def electric(**settings: str) -> ElectricModel:
    """Build the golden model; its names are the energy model's own, and ltr.*, rtl.*, cloze.* of the noise model."""
    config = ElectraConfig(
        vocab_size=14, embedding_size=8, hidden_size=12, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    energy = ElectraForPreTraining(config)
    tower = tower_of(config, hidden_size=6, num_attention_heads=1, intermediate_size=24)
    model = ElectricModel(energy, TwoTowerCloze(tower, energy.electra.embeddings), **settings).double()
    weights = load_file(golden_folder() / "electra_lm/electric/weights.safetensors")
    towers = ("ltr.", "rtl.", "cloze.")
    state = {f"{'noise' if name.startswith(towers) else 'energy'}.{name}": value for name, value in weights.items()}
    report = model.load_state_dict(state, strict=False)
    assert not report.unexpected_keys
    assert all(".ltr.embeddings." in name or ".rtl.embeddings." in name for name in report.missing_keys)
    return model


def golden_draws(model: ElectricModel, rows: slice = slice(None)) -> None:
    """Let the noise model draw what the reference drew."""
    drawn = NOISED[rows][REPLACED[rows]]
    model.noise.sample = lambda context, *rows: (drawn, model.noise.log_likelihood(context, drawn).detach())


def pseudo_log_likelihood(model: ElectricModel, ids: Tensor) -> Tensor:
    return -(energies(model.energy, ids, None)[:, 1:-1]).sum(dim=1)


def test_energies_and_noise_equal_the_reference() -> None:
    model = electric()
    assert torch.equal(candidate_positions(IDS, MASK), CANDIDATES)
    for ids, name in ((IDS, "energy_clean"), (NOISED, "energy_noised")):
        assert_equal(energies(model.energy, ids, MASK)[ATTENDED], TENSORS[name][ATTENDED])
    log_q = model.noise.logits(model.noise(IDS, MASK)).log_softmax(-1)
    assert_equal(log_q[ATTENDED], TENSORS["log_q_full"][ATTENDED])


@pytest.mark.parametrize(
    ("over", "nce"),
    [
        ("attended", EXPECTED["nce_google_code_mean_over_attention_mask"]),
        ("candidates", EXPECTED["nce_google_code_mean_over_candidates_only"]),
    ],
)
def test_losses_with_the_released_ratio_equal_the_reference(over: str, nce: float) -> None:
    model = electric(ratio="released", over=over)
    golden_draws(model)
    out = model(IDS, MASK, REPLACED, SEEDS)
    assert torch.equal(out.noised_ids, NOISED)
    found = TENSORS["nce_logits_google"][REPLACED] > 0
    assert {name: int(value) for name, value in out.figures.items()} == {"noise_hits": 1, "noise_found": found.sum()}
    counts = {"nce": {"attended": 16, "candidates": 12}[over], "noise_mle": 12}
    means = {name: getattr(out, name).item() / count for name, count in counts.items()}
    assert means == {"nce": exactly(nce), "noise_mle": exactly(EXPECTED["generator_mle_loss_mean_over_candidates"])}
    if over == "attended":
        assert 50 * means["nce"] + means["noise_mle"] == exactly(EXPECTED["total_google_code_lambda50"])


@pytest.mark.parametrize("row", [0, 1])
def test_losses_with_true_counts_equal_algorithm_2(row: int) -> None:
    """The second row alone, without its padding, and the sum of both from the padded batch."""
    rows = slice(row, row + 1)
    case = EXPECTED["paper_algorithm2_per_sequence"][row]
    assert (int(CANDIDATES[row].sum()), int(REPLACED[row].sum())) == (case["n"], case["k"])
    model = electric()
    golden_draws(model, rows)
    length = int(MASK[row].sum())
    alone = model(IDS[rows, :length], None, REPLACED[rows, :length], SEEDS[:1]).nce
    assert alone.item() == exactly(case["loss_sum"])
    golden_draws(model)
    both = model(IDS, MASK, REPLACED, SEEDS).nce
    assert both.item() == exactly(sum(one["loss_sum"] for one in EXPECTED["paper_algorithm2_per_sequence"]))


def test_naive_algorithm_1_through_the_same_loss() -> None:
    """All n tokens as data in one pass, and each noise token alone in a pass of its own, at odds of k / n."""
    model = electric()
    places, noise = REPLACED[0].nonzero()[:, 0], NOISED[0]
    n, k = int(CANDIDATES[0].sum()), len(places)
    prior = math.log(k / n)
    log_q = TENSORS["log_q_full"][0]
    at = torch.arange(10)

    data = nce_losses(energies(model.energy, IDS[:1], None)[0], log_q[at, IDS[0]], torch.zeros(10), prior)
    loss = data[CANDIDATES[0]].sum()
    for place in places:
        one = IDS[:1].clone()
        one[0, place] = noise[place]
        energy = energies(model.energy, one, None)[0, place]
        loss = loss + nce_losses(energy, log_q[place, noise[place]], torch.tensor(1.0), prior)
    assert loss.item() == exactly(EXPECTED["paper_algorithm1_sequence0"])


def test_a_draw_that_hits_the_token_itself_is_noise() -> None:
    assert NOISED[0, 6] == IDS[0, 6] and REPLACED[0, 6]
    per_token = nce_losses(TENSORS["energy_noised"], TENSORS["log_q_at_noised"], REPLACED, RELEASED_LOG_RATIO)
    assert_equal(per_token[ATTENDED], TENSORS["nce_per_token_google"][ATTENDED])
    as_data = nce_losses(TENSORS["energy_noised"], TENSORS["log_q_at_noised"], NOISED != IDS, RELEASED_LOG_RATIO)
    assert not torch.isclose(as_data[0, 6], per_token[0, 6])


def test_the_minimum_is_where_energies_are_minus_log_p() -> None:
    """The expected loss over a vocabulary, brought to its minimum by Newton's method from zero."""
    case = EXPECTED["tabular_nce"]
    p, q = (torch.tensor(case[name], dtype=torch.float64) for name in ("p_data", "q"))
    share = case["noise_fraction"]
    prior = math.log(share / (1 - share))

    def expected_loss(energy: Tensor) -> Tensor:
        data = nce_losses(energy, q.log(), torch.zeros(6), prior)
        noise = nce_losses(energy, q.log(), torch.ones(6), prior)
        return (1 - share) * (p * data).sum() + share * (q * noise).sum()

    energy = torch.zeros(6, dtype=torch.float64)
    for _ in range(50):
        slope = torch.func.grad(expected_loss)(energy)
        energy = energy - torch.linalg.solve(torch.func.hessian(expected_loss)(energy), slope).clamp(-0.5, 0.5)
    assert energy.tolist() == pytest.approx(case["minimiser_energy"], rel=1e-10)
    assert (-energy).exp().sum().item() == pytest.approx(1, rel=1e-10)


def energy_table(model: ElectricModel, ids: Tensor, position: int) -> Tensor:
    """Return the energy (batch, vocabulary) of each token of the vocabulary at one position of texts."""
    variants = ids[:, None, :].repeat(1, 14, 1)
    variants[:, :, position] = torch.arange(14)
    return energies(model.energy, variants.flatten(0, 1), None)[:, position].unflatten(0, (-1, 14))


@torch.no_grad()
def test_scores_and_probabilities_by_brute_force() -> None:
    model = electric()
    for row, length in enumerate(MASK.sum(dim=1).tolist()):
        ids = IDS[row : row + 1, :length]
        score = pseudo_log_likelihood(model, ids).item()
        assert score == exactly(EXPECTED["pll_sum"][row])
        assert score / (length - 2) == exactly(EXPECTED["pll_mean"][row])
        true = 0.0
        for place in range(1, length - 1):
            table = energy_table(model, ids, place)[0]
            log_z = (-table).logsumexp(0)
            assert_equal(table, TENSORS["energy_table"][row, place])
            assert log_z.item() == exactly(TENSORS["log_Z"][row, place].item())
            log_p = -table - log_z
            assert_equal(log_p, TENSORS["log_p_table"][row, place])
            # in one context the order of the energies is that of the probabilities, upside down
            assert torch.equal(table.argsort(), log_p.argsort(descending=True))
            assert int(log_p.argmax()) == EXPECTED["argmax_token_by_p_theta"][row][place]
            true += log_p[ids[0, place]].item()
        assert true == exactly(EXPECTED["true_log_p_sum"][row])
    low, high = EXPECTED["logZ_range_at_candidates"]
    log_z = TENSORS["log_Z"][CANDIDATES]
    assert (low, high) == (exactly(log_z.min().item()), exactly(log_z.max().item()))


@torch.no_grad()
def test_scores_of_all_texts_of_three_tokens() -> None:
    model, case = electric(), EXPECTED["three_token_texts"]
    texts = torch.tensor([[2, *words, 3] for words in itertools.product(ORDINARY, repeat=3)])
    scores = pseudo_log_likelihood(model, texts)
    true = torch.zeros(len(texts), dtype=torch.float64)
    for place in (1, 2, 3):
        log_p = (-energy_table(model, texts, place)).log_softmax(1)
        true += log_p.gather(1, texts[:, place, None])[:, 0]
    assert len(texts) == case["n"]
    assert scores[:5].tolist() == [exactly(value) for value in case["pll_first5"]]
    assert true[:5].tolist() == [exactly(value) for value in case["true_first5"]]
    assert texts[scores.argmax()].tolist() == case["top1_pll"]
    assert texts[true.argmax()].tolist() == case["top1_true"]
    ranks = [values.argsort().argsort().double() for values in (scores, true)]
    assert np.corrcoef(ranks)[0, 1] == exactly(case["spearman_pll_vs_true_logp"])


def test_noise_never_sees_the_word_it_tells() -> None:
    noise = electric().noise
    log_q = noise.logits(noise(IDS, MASK))
    for place in range(1, 9):
        other = IDS.clone()
        other[:, place] = 13
        assert_equal(noise.logits(noise(other, MASK))[0, place], log_q[0, place])
        assert not torch.allclose(noise.logits(noise(other, MASK))[0, place % 8 + 1], log_q[0, place % 8 + 1])


@pytest.mark.parametrize("chunk_logits", [1, 14 * 5, 14 * 100])
def test_likelihood_in_chunks_is_the_likelihood(chunk_logits: int) -> None:
    gradients = []
    for chunked in (True, False):
        noise = electric().noise
        context, tokens = noise(IDS, MASK)[CANDIDATES], IDS[CANDIDATES]
        if chunked:
            log_q = noise.log_likelihood(context, tokens, chunk_logits)
        else:
            log_q = noise.logits(context).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        (log_q * torch.arange(12)).sum().backward()
        gradients.append({"log_q": log_q.detach()} | {name: p.grad for name, p in noise.named_parameters()})
    for name, ours in gradients[0].items():
        if ours is not None:
            assert_equal(ours, gradients[1][name])
    assert gradients[0]["cloze.output_bias"].abs().max() > 0


def test_draws_follow_the_noise_model() -> None:
    noise = electric().noise
    context = noise(IDS, MASK)[0, 3].detach()
    log_p = noise.logits(context).log_softmax(-1).detach()
    counts, seeds = [10_000] * 5, range(5)
    tokens, log_q = noise.sample(context.expand(50_000, -1), counts, seeds)
    assert_equal(log_q, log_p[tokens])
    shares = tokens.bincount(minlength=14) / len(tokens)
    spread = (log_p.exp() * (1 - log_p.exp()) / len(tokens)).sqrt()
    assert ((shares - log_p.exp()).abs() < 5 * spread).all()
    few_logits = noise.sample(context.expand(50_000, -1), counts, seeds, chunk_logits=14 * 20_001)
    assert torch.equal(few_logits[0], tokens) and torch.equal(few_logits[1], log_q)
    assert torch.equal(noise.sample(context.expand(10_000, -1), [10_000], [3])[0], tokens[30_000:40_000])


def test_nothing_of_the_energy_loss_reaches_the_noise_model_but_through_the_embeddings() -> None:
    model = electric()
    shared = {id(parameter) for parameter in model.energy.electra.embeddings.parameters()}
    model(IDS, MASK, REPLACED, SEEDS).nce.backward()
    assert all(tensor.grad is None for tensor in model.noise.own_parameters().values())
    assert all(tensor.grad is not None for tensor in model.energy.parameters())
    model.zero_grad()
    model(IDS, MASK, REPLACED, SEEDS).noise_mle.backward()
    assert all(tensor.grad is not None for tensor in model.noise.own_parameters().values())
    assert {id(tensor) for tensor in model.energy.parameters() if tensor.grad is not None} <= shared


def test_rows_without_a_choice_cost_nothing() -> None:
    """One token cannot be noise and data; a row of none has nothing to learn from."""
    ids = torch.tensor([[2, 7, 8, 3], [2, 7, 3, 0], [2, 3, 0, 0]])
    mask = (ids != 0).long()
    replaced = torch.zeros(3, 4, dtype=torch.bool)
    replaced[0, 1] = replaced[1, 1] = True
    assert noise_log_ratio(replaced, candidate_positions(ids, mask))[:2, 0].tolist() == [0.0, math.inf]
    model = electric()
    out = model(ids, mask, replaced, [1, 2, 3])
    alone = model(ids[:1], None, replaced[:1], [1])
    assert out.nce.item() == exactly(alone.nce.item())
    (out.nce + out.noise_mle).backward()
    assert all(tensor.grad is None or tensor.grad.isfinite().all() for tensor in model.parameters())


def test_a_saved_model_opens_everywhere_and_comes_back(tmp_path: Path) -> None:
    model = electric().float()
    model.save(tmp_path)
    assert (tmp_path / "noise_model.safetensors").stat().st_size < (tmp_path / "model.safetensors").stat().st_size
    energy, report = ElectraForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    AutoModel.from_pretrained(tmp_path)
    again = ElectricModel(energy.eval(), load_noise(tmp_path, energy).eval())
    assert torch.equal(energies(again.energy, IDS, MASK), energies(model.energy, IDS, MASK))
    assert torch.equal(again.noise(IDS, MASK), model.noise(IDS, MASK))

    settings = tmp_path / "electric.json"
    settings.write_text(settings.read_text().replace('"hidden_size": 6', '"hidden_size": 8'))
    with pytest.raises(UserError, match=r"noise model has 'cloze.dense.weight' of shape \(8, 12\), .* \(8, 16\)"):
        load_noise(tmp_path, energy)
    settings.write_text('{"noise_model": {"hidden_size": 6}}')
    with pytest.raises(UserError, match=r"electric\.json: noise_model is .* expected whole numbers for hidden_size"):
        load_noise(tmp_path, energy)


@pytest.mark.parametrize(
    ("hidden", "heads", "ratio", "expected"),
    [(768, 12, 0.25, (192, 3)), (256, 4, 0.25, (64, 1)), (128, 2, 0.25, (32, 1)), (100, 5, 0.5, (50, 2))],
)
def test_towers_are_a_share_of_the_energy_models_width(
    hidden: int, heads: int, ratio: float, expected: tuple[int, int]
) -> None:
    config = ElectraConfig(hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=3, embedding_size=32)
    tower = tower_config(config, ratio)
    assert (tower.hidden_size, tower.num_attention_heads) == expected
    assert (tower.num_hidden_layers, tower.embedding_size, tower.intermediate_size) == (3, 32, 4 * expected[0])
