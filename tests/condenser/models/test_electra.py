"""ELECTRA's losses and gradients against numbers from the reference, and the rules that they rest on."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from condenser.errors import UserError
from condenser.models.backbone import Backbone
from condenser.models.electra import ElectraOutput, ElectraPair, Sharing, draw, draw_tokens
from condenser.models.unpadded import TextRow, row_of_texts
from tests.condenser.reference import TOLERANCE
from tests.reference_numbers import golden_folder, golden_json

EXPECTED = golden_json("electra_lm/electra/expected.json")
CONFIGS = golden_json("electra_lm/electra/configs.json")
BATCH = load_file(golden_folder() / "electra_lm/electra/tensors.safetensors")
WEIGHTS = load_file(golden_folder() / "electra_lm/electra/weights.safetensors")
DRAWN = BATCH["corrupted_ids"][BATCH["mlm_labels"] != -100]
SLOTS, TOKENS = EXPECTED["n_selected"], EXPECTED["n_active"]
WEIGHT = 50


def pair_of(dtype: str = "float64", sharing: Sharing = "all", special_tokens: bool = True) -> ElectraPair:
    """Build the golden pair; in a pair that shares less, the generator begins with copies of the same embeddings."""
    discriminator = ElectraForPreTraining(ElectraConfig(**CONFIGS["discriminator"]))
    generator = ElectraForMaskedLM(ElectraConfig(**CONFIGS["generator"]))
    tensors = {name.removeprefix("disc."): value for name, value in WEIGHTS.items() if name.startswith("disc.")}
    discriminator.to(getattr(torch, dtype)).load_state_dict(tensors)
    own = {name.removeprefix("gen."): value for name, value in WEIGHTS.items() if name.startswith("gen.")}
    embeddings = {name: value for name, value in tensors.items() if name.startswith("electra.embeddings.")}
    table = {"generator_lm_head.weight": embeddings["electra.embeddings.word_embeddings.weight"]}
    generator.to(getattr(torch, dtype)).load_state_dict(own | embeddings | table)
    return ElectraPair(discriminator, Backbone(generator), sharing=sharing, special_tokens=special_tokens).train()


@pytest.fixture(autouse=True)
def golden_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the generator draw what stands in the golden file."""
    monkeypatch.setattr("condenser.models.electra.draw_tokens", lambda *_: DRAWN)


def run(pair: ElectraPair, ids: str = "masked_ids") -> ElectraOutput:
    output: ElectraOutput = pair(BATCH[ids], BATCH["attention_mask"], BATCH["mlm_labels"], [0, 1])
    return output


def row_of(pair: ElectraPair, ids: str) -> TextRow:
    return row_of_texts(pair.discriminator.config, BATCH[ids], BATCH["attention_mask"])


def total(output: ElectraOutput, tokens: int = TOKENS) -> Tensor:
    return output.slots["generator"] / SLOTS + WEIGHT * output.tokens["discriminator"] / tokens


def gradients(pair: ElectraPair) -> dict[str, Tensor | None]:
    """Return gradients by the golden file's names."""
    names = {"discriminator.": "disc.", "generator.lm.": "gen."}
    found = {}
    for name, parameter in pair.named_parameters():
        prefix = next(prefix for prefix in names if name.startswith(prefix))
        found[names[prefix] + name.removeprefix(prefix)] = parameter.grad
    return found


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("case", "ids"), [("all_mask", "masked_ids"), ("keep_variant", "masked_ids_keep_variant")])
def test_losses_equal_the_reference(case: str, ids: str, dtype: str) -> None:
    output = run(pair_of(dtype), ids)
    expected, tolerance = EXPECTED[case], TOLERANCE[dtype]
    assert output.slots["generator"].item() / SLOTS == pytest.approx(expected["gen_loss"], rel=tolerance)
    assert output.tokens["discriminator"].item() / TOKENS == pytest.approx(expected["disc_loss"], rel=tolerance)
    assert total(output).item() == pytest.approx(expected["total"], rel=tolerance)
    assert output.tokens["replaced"] == EXPECTED["n_fake"] and output.slots["generator_accuracy"] == SLOTS - 3


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gradients_equal_the_reference(dtype: str) -> None:
    pair, tolerance = pair_of(dtype), TOLERANCE[dtype]
    total(run(pair)).backward()
    found = gradients(pair)
    expected = load_file(golden_folder() / "electra_lm/electra/grads_total.safetensors")
    assert found.keys() == expected.keys() == EXPECTED["grad_l2"].keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        scale = largest if name.endswith("key.bias") else gradient.abs().max().item()  # these are 0 but for rounding
        torch.testing.assert_close(found[name].double(), gradient, rtol=tolerance, atol=tolerance * scale, msg=name)
        norm = EXPECTED["grad_l2"][name]
        assert found[name].norm().item() == pytest.approx(norm, rel=tolerance, abs=tolerance * scale)


def test_logits_and_draws_equal_the_reference() -> None:
    pair, mask = pair_of(), BATCH["attention_mask"].bool()
    asked = (BATCH["mlm_labels"] != -100)[mask]
    logits = pair.generator_logits(row_of(pair, "masked_ids"), asked)
    torch.testing.assert_close(logits, BATCH["gen_logits_at_selected"], rtol=1e-10, atol=1e-10)
    drawn = draw(logits.float(), BATCH["gumbel_uniforms"].float()).tolist()
    assert drawn == EXPECTED["gumbel_sampled_ids_in_row_major_selected_order"]
    assert logits.argmax(dim=-1).tolist() == EXPECTED["generator_argmax_ids"] != drawn
    verdicts = pair.discriminator_logits(row_of(pair, "corrupted_ids"))
    torch.testing.assert_close(verdicts, BATCH["disc_logits"][mask], rtol=1e-10, atol=1e-10)


def test_special_tokens_may_be_left_out() -> None:
    output = run(pair_of(special_tokens=False))
    inside = TOKENS - 2 * len(BATCH["input_ids"])
    wanted = EXPECTED["disc_loss_excluding_special_tokens"]
    assert output.tokens["discriminator"].item() / inside == pytest.approx(wanted, rel=1e-10)


def test_other_rules_give_other_numbers() -> None:
    """A right draw is the text's own token, and the loss is over all tokens, not over the chosen ones."""
    pair, mask = pair_of(), BATCH["attention_mask"].bool()
    verdicts = pair.discriminator_logits(row_of(pair, "corrupted_ids"))
    chosen = (BATCH["mlm_labels"] != -100)[mask]
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    wrong = bce(verdicts, chosen.double()).item()
    assert wrong == pytest.approx(EXPECTED["disc_loss_if_label_ignores_correct_samples"], rel=1e-10)
    chosen_only = bce(verdicts[chosen], BATCH["rtd_labels"][mask][chosen].double()).item()
    assert chosen_only == pytest.approx(EXPECTED["disc_loss_only_selected_positions_ELECTRA15"], rel=1e-10)
    ours = run(pair).tokens["discriminator"].item() / TOKENS
    assert min(abs(ours - wrong), abs(ours - chosen_only)) > 0.05


def test_both_losses_are_trained_and_the_draw_cuts_the_gradient() -> None:
    """Case B17."""
    alone: dict[str, dict[str, Tensor | None]] = {}
    rows = {}
    for part in ("generator", "discriminator"):
        pair = pair_of()
        output = run(pair)
        (output.slots | output.tokens)[part].backward()
        alone[part] = gradients(pair)
        rows[part] = alone[part]["disc.electra.embeddings.word_embeddings.weight"].abs().sum(dim=1).nonzero()[:, 0]
    for name in alone["generator"]:
        shared = name.startswith("disc.electra.embeddings.")
        of_generator, of_discriminator = (alone[part][name] for part in ("generator", "discriminator"))
        assert (of_generator is not None) == (name.startswith("gen.") or shared), name
        assert (of_discriminator is not None) == (name.startswith("disc.")), name
        if name.endswith("weight"):
            for gradient in (of_generator, of_discriminator):
                assert gradient is None or gradient.abs().max() > 0, name
    counted = EXPECTED["rows_of_word_table_with_nonzero_grad"]
    assert rows["discriminator"].tolist() == counted["rtd_term"] and len(rows["generator"]) == counted["mlm_term"]


def test_a_generator_that_shares_nothing_learns_as_from_masked_lm_training_alone() -> None:
    pair = pair_of(sharing="none")
    total(run(pair)).backward()
    alone = copy.deepcopy(pair.generator.lm).requires_grad_()
    alone.zero_grad()
    alone(BATCH["masked_ids"], BATCH["attention_mask"], labels=BATCH["mlm_labels"]).loss.backward()
    for (name, ours), theirs in zip(pair.generator.lm.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("sharing", ["token", "none"])
def test_what_is_not_shared_learns_apart(sharing: Sharing) -> None:
    """The gradients of the tensors that were one add up to the golden one."""
    pair = pair_of(sharing=sharing)
    total(run(pair)).backward()
    found = gradients(pair)
    for name, gradient in load_file(golden_folder() / "electra_lm/electra/grads_total.safetensors").items():
        ours = found[name]
        own = name.replace("disc.", "gen.") if name.startswith("disc.electra.embeddings.") else ""
        assert (own in found) == (bool(own) and (sharing == "none" or "word_embeddings" not in name))
        ours = ours + found[own] if own in found else ours
        torch.testing.assert_close(ours, gradient, rtol=1e-9, atol=1e-10, msg=name)


def test_a_row_is_drawn_by_its_own_seed_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50, dtype=torch.float64)
    whole = draw_tokens(logits, [2, 0, 4], [5, 6, 7])
    state = torch.get_rng_state()
    assert torch.equal(whole[2:], draw_tokens(logits[2:], [4], [7])) and torch.equal(state, torch.get_rng_state())
    assert not torch.equal(whole[2:], draw_tokens(logits[2:], [4], [8]))


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -30.0]).expand(20_000, 4)
    shares = torch.bincount(draw_tokens(logits, [20_000], [1]), minlength=4) / 20_000
    torch.testing.assert_close(shares, logits[0].softmax(0), rtol=0, atol=0.015)


@pytest.mark.parametrize("sharing", ["all", "token", "none"])
def test_both_folders_load_alone(tmp_path: Path, sharing: Sharing) -> None:
    pair = pair_of("float32", sharing).eval()
    pair.save(tmp_path)
    ids, mask = BATCH["masked_ids"], BATCH["attention_mask"]
    for kind, folder, own in (
        (ElectraForPreTraining, tmp_path, pair.discriminator),
        (ElectraForMaskedLM, tmp_path / "generator", pair.generator.lm),
    ):
        model, report = kind.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        logits, wanted = model.eval()(ids, mask).logits, own(ids, mask).logits
        torch.testing.assert_close(logits[mask.bool()], wanted[mask.bool()])
    AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("sharing", "change", "message"),
    [
        ("all", {"max_position_embeddings": 20}, "max_position_embeddings is 20, the discriminator's 16"),
        ("token", {"embedding_size": 8}, "embedding_size is 8, the discriminator's 12"),
        ("none", {"vocab_size": 41}, "vocab_size is 41, the discriminator's 40"),
    ],
)
def test_sizes_that_cannot_be_shared_are_refused(sharing: Sharing, change: dict[str, int], message: str) -> None:
    discriminator = ElectraForPreTraining(ElectraConfig(**CONFIGS["discriminator"]))
    generator = Backbone(ElectraForMaskedLM(ElectraConfig(**CONFIGS["generator"] | change)))
    with pytest.raises(UserError, match=message):
        ElectraPair(discriminator, generator, sharing=sharing)
    ElectraPair(discriminator, generator, sharing="none") if sharing != "none" else None
