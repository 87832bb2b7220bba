"""Bloom, whose attention in transformers does not go through `AttentionInterface`."""

import importlib
from typing import Any

import torch
from torch import Tensor

MODELING = "transformers.models.bloom.modeling_bloom"


def replace() -> None:
    """Makes new Bloom models use `attention_layer`'s class."""
    modeling: Any = importlib.import_module(MODELING)
    if not hasattr(modeling.BloomAttention, "fused"):
        modeling.BloomAttention = attention_layer(modeling)


def attention_layer(modeling: Any) -> type[torch.nn.Module]:
    """Returns transformers' `BloomAttention`, extended by a forward pass of `fused.attention`.

    ALiBi is the (B, N, 1, S) bias that Bloom computes from the padding: slope times position of the
    key. Beside a softmax over keys this equals slope times distance.
    """
    from fusedseq.integrations.transformers import NAME
    from fusedseq.integrations.transformers.attention import attention_forward

    class FusedBloomAttention(modeling.BloomAttention):  # type: ignore[misc]
        fused = True

        def __init__(self, config: Any, layer_idx: int | None = None) -> None:
            super().__init__(config, layer_idx)
            self.config = config

        def forward(
            self,
            hidden_states: Tensor,
            residual: Tensor,
            alibi: Tensor,
            attention_mask: Tensor | None,
            layer_past: Any = None,
            **kwargs: Any,
        ) -> Any:
            """Computes the layer; the arguments and results are those of `BloomAttention`."""
            if self.config._attn_implementation != NAME:
                return super().forward(
                    hidden_states, residual, alibi, attention_mask, layer_past, **kwargs
                )
            if self.pretraining_tp > 1 and self.slow_but_exact:
                raise ValueError(
                    f'attn_implementation="{NAME}": slow_but_exact of Bloom must be False, got '
                    f'True with pretraining_tp = {self.pretraining_tp}; use "eager"'
                )
            q, k, v = self._reshape(self.query_key_value(hidden_states))
            if layer_past is not None:
                k, v = layer_past.update(k, v, self.layer_idx)
            B, N, L, _ = q.shape
            out, _ = attention_forward(
                self,
                q,
                k,
                v,
                attention_mask,
                dropout=self.attention_dropout.p,
                scaling=self.inv_norm_factor,
                position_bias=alibi.view(B, N, 1, -1),
                output_attentions=kwargs.get("output_attentions"),
            )
            out = self.dense(out.reshape(B, L, -1))
            out = modeling.dropout_add(out, residual, self.hidden_dropout, self.training)
            return out, None

    FusedBloomAttention.__name__ = FusedBloomAttention.__qualname__ = "BloomAttention"
    return FusedBloomAttention
