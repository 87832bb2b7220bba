"""A third operator set, of en-es/torch-mha: `fusedseq.fused` with torch.nn.MultiheadAttention.

Its attention module has parameters of the same names and shapes, so a model trained with it can be
decoded with the other operator sets. It has no cache itself and decodes whole prefixes. Its random
masks are torch's own.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fusedseq.fused import *  # noqa: F403  an operator set is a module of functions

HAS_CACHE = False


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with the interface of `fusedseq.nn.MultiheadAttention`.

    Errors: ValueError for positions, a scale or a cache, which torch's module does not have.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        positions: nn.Module | None = None,
        scale: float | None = None,
        ops: object = None,
        **options: Any,
    ) -> None:
        if positions is not None or scale is not None:
            raise ValueError(
                "torch.nn.MultiheadAttention: positions and scale must be None, got "
                f"{positions} and {scale}"
            )
        super().__init__(embed_dim, num_heads, dropout, bias, **options)

    def reset_parameters(self) -> None:
        """Draws all parameters as the constructor does, in its order."""
        self.out_proj.reset_parameters()
        self._reset_parameters()

    def cache(self, rows: int, max_length: int) -> NoReturn:
        """Raises ValueError: torch's module has no cache."""
        raise ValueError(
            "torch.nn.MultiheadAttention has no cache: load the weights with other operators to "
            "decode"
        )

    def forward(  # type: ignore[override]  # the interface is that of fusedseq.nn
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        key_lengths: Tensor | None = None,
        cache: None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As fusedseq.nn.MultiheadAttention.forward, with L = S if is_causal.

        A row of the batch whose length is 0 gives NaN.
        """
        time = 1 if self.batch_first else 0
        L, S = query.size(time), key.size(time)
        padding = future = None
        if key_lengths is not None:
            padding = torch.arange(S, device=query.device) >= key_lengths[:, None]
        if is_causal:
            future = torch.ones(L, S, dtype=torch.bool, device=query.device).triu(1)
        return super().forward(query, key, value, padding, need_weights=False, attn_mask=future)
