"""The parameters and the projections of multi-head attention."""

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fusedseq.nn.heads import heads, select_rows
from fusedseq.nn.operators import Operators


class AttentionProjections(nn.Module):
    """What MultiheadAttention has of torch.nn.MultiheadAttention's parameters: the projections of
    query, key and value, with the operator `linear`, and `out_proj`.

    The arguments are those of MultiheadAttention.
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool,
        kdim: int | None,
        vdim: int | None,
        batch_first: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        ops: Operators,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(
                "MultiheadAttention: embed_dim must be a multiple of num_heads, both at least 1, "
                f"got {embed_dim} and {num_heads}"
            )
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.batch_first = batch_first
        one_weight = self.kdim == self.vdim == embed_dim
        shapes: dict[str, tuple[int, ...] | None] = {
            "in_proj_weight": (3 * embed_dim, embed_dim) if one_weight else None,
            "q_proj_weight": None if one_weight else (embed_dim, embed_dim),
            "k_proj_weight": None if one_weight else (embed_dim, self.kdim),
            "v_proj_weight": None if one_weight else (embed_dim, self.vdim),
            "in_proj_bias": (3 * embed_dim,) if bias else None,
        }
        for name, shape in shapes.items():
            parameter = (
                None
                if shape is None
                else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            )
            self.register_parameter(name, parameter)
        # As in torch's module: torch.ao.quantization.quantize_dynamic leaves it as it is.
        self.out_proj = NonDynamicallyQuantizableLinear(
            embed_dim, embed_dim, bias=bias, device=device, dtype=dtype
        )
        self._linear = ops.linear
        self._draw_projections()

    def _draw_projections(self) -> None:
        for weight in (
            self.in_proj_weight,
            self.q_proj_weight,
            self.k_proj_weight,
            self.v_proj_weight,
        ):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    @property
    def _batch_dim(self) -> int:
        return 0 if self.batch_first else 1

    def _check(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, has_cache: bool
    ) -> None:
        """Checks that the inputs are tensors of the right numbers of dimensions and widths."""
        rank = query.dim() if isinstance(query, Tensor) else 3
        for name, t, size in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if has_cache and name != "query" and key is None and value is None:
                continue
            if not isinstance(t, Tensor):
                raise TypeError(
                    f"MultiheadAttention: {name} must be a tensor (key and value may be None only "
                    f"with a cache), got {type(t).__name__}"
                )
            if t.dim() not in (2, 3) or t.dim() != rank or t.size(-1) != size:
                length = "L" if name == "query" else "S"
                batched = f"B, {length}" if self.batch_first else f"{length}, B"
                raise ValueError(
                    f"MultiheadAttention: {name} must be ({batched}, {size}), or ({length}, "
                    f"{size}) if no input has a batch dimension, got {tuple(t.shape)}"
                )

    def _heads(
        self, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns q (B, N, L, D), and k and v (B, N, S, D) or None.

        They are views of as few matrix products as there are different inputs.
        """
        if self.in_proj_weight is not None and key is query and value is query:
            q, k, v = self._project(query, 0, 3)
            return q, k, v
        (q,) = self._project(query, 0, 1)
        if key is None or value is None:
            return q, None, None
        return q, *self._keys_and_values(key, value)

    def _keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.in_proj_weight is not None and key is value:
            k, v = self._project(key, 1, 3)
            return k, v
        return self._project(key, 1, 2)[0], self._project(value, 2, 3)[0]

    def _project(self, x: Tensor, first: int, last: int) -> tuple[Tensor, ...]:
        """Returns the projections of x numbered `first` to `last` - 1 of (q, k, v).

        They are views (B, N, L, D) of one matrix product.
        """
        rows = slice(first * self.embed_dim, last * self.embed_dim)
        if self.in_proj_weight is not None:
            weight = select_rows(self.in_proj_weight, rows)
        else:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[first]
        y = self._linear(x, weight, select_rows(self.in_proj_bias, rows))
        return heads(y, last - first, self.num_heads, self.batch_first)
