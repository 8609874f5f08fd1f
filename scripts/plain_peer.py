"""The plain way of Condenser pretraining, as the reference computes it: what our step is measured against."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import BertForMaskedLM
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.bert.modeling_bert import BertLayer

from condenser.corpus.corruption import IGNORED
from condenser.models.condenser import CondenserModel


class PlainCondenser(nn.Module):
    """Logits of all positions from the last layer and from the head, padding included.

    Args:
        lm: the masked language model.
        head: the layers of the Condenser head.
        skip_from: which hidden states the head sees for all tokens but CLS.
    """

    def __init__(self, lm: BertForMaskedLM, head: nn.ModuleList, skip_from: int) -> None:
        super().__init__()
        self.lm, self.head, self.skip_from = lm, head, skip_from

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Run padded rows (batch, length) to losses, each the mean over the masked tokens."""
        out = self.lm(input_ids=ids, attention_mask=mask, labels=labels, output_hidden_states=True)
        hidden = torch.cat([out.hidden_states[-1][:, :1], out.hidden_states[self.skip_from][:, 1:]], dim=1)
        seen = create_bidirectional_mask(self.lm.config, hidden, mask)
        for layer in self.head:
            hidden = layer(hidden, seen)
        logits = self.lm.cls(hidden)
        loss = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=IGNORED)
        return {"head_mlm": loss, "late_mlm": out.loss}


def plain_copy(model: CondenserModel) -> PlainCondenser:
    """Return the plain way with a copy of the weights of one of our models, of the BERT family."""
    config = copy.deepcopy(model.backbone.config)
    config._attn_implementation = "sdpa"
    lm = BertForMaskedLM(config)
    lm.load_state_dict(model.backbone.lm.state_dict())
    head = nn.ModuleList([BertLayer(lm.config) for _ in model.head])
    head.load_state_dict(model.head.state_dict())
    return PlainCondenser(lm, head, model.skip_from)
