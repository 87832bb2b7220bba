"""How `MultiheadAttention` turns torch's arguments into those of the operator `attention`: batch
dimension, masks, positions and lengths; and the attention probabilities, which the operator never
stores.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedseq import reference
from fusedseq.nn.key_value_cache import KeyValueCache
from fusedseq.nn.relative_positions import RelativePositions


class Masking(NamedTuple):
    """Which keys a query attends to: the arguments of `MultiheadAttention.forward`."""

    attn_mask: Tensor | None
    key_padding_mask: Tensor | None
    key_lengths: Any
    is_causal: bool
    causal_alignment: str | None

    def given(self) -> dict[str, Any]:
        """Returns the arguments but for the alignment, None for one that masks nothing."""
        return {
            "attn_mask": self.attn_mask,
            "key_padding_mask": self.key_padding_mask,
            "key_lengths": self.key_lengths,
            "is_causal": self.is_causal or None,
        }

    def with_batch(self, device: torch.device) -> "Masking":
        """Returns the arguments for inputs that got a batch dimension of 1."""
        padding = self.key_padding_mask
        return self._replace(
            key_padding_mask=None if padding is None else padding[None],
            key_lengths=one_length(self.key_lengths, device),
        )

    def first_position(self, L: int, S: int, cache: KeyValueCache | None) -> int:
        """Returns the position of the first of L queries among S keys."""
        alignment = self.causal_alignment
        if alignment is None:
            as_torch = self.is_causal and self.attn_mask is not None and cache is None
            alignment = "start" if as_torch else "end"
        if alignment not in ("start", "end"):
            raise ValueError(
                f"MultiheadAttention: causal_alignment must be 'start' or 'end', got {alignment!r}"
            )
        if alignment == "start" and cache is not None:
            raise ValueError(
                "MultiheadAttention: causal_alignment must be 'end' with a cache, whose last keys "
                "are those of the queries, got 'start'"
            )
        return S - L if alignment == "end" else 0

    def check_packed(self, cache: KeyValueCache | None, need_weights: bool) -> None:
        """Raises ValueError for an option that packed sequences do not have."""
        masks = self.key_padding_mask, self.attn_mask, self.key_lengths
        if any(option is not None for option in (*masks, cache)) or need_weights:
            raise ValueError(
                "MultiheadAttention: key_padding_mask, attn_mask, key_lengths, cache and "
                "need_weights must be None for packed sequences, got one"
            )
        if self.causal_alignment not in (None, "end"):
            raise ValueError(
                "MultiheadAttention: causal_alignment must be 'end' for packed sequences, got "
                f"{self.causal_alignment!r}"
            )


def logit_terms(
    q: Tensor, S: int, offset: int, masking: Masking, positions: RelativePositions | None
) -> dict[str, Any]:
    """Returns the operator's mask and bias, and the arguments of the positions module.

    q: (B, N, L, D)    S: number of keys    offset: position of the first query
    positions: the module's ALiBi, RelativeBias, RelativeKeys or Rotary, or None
    """
    B, N, L, _ = q.shape
    attn_mask, key_padding_mask = masking.attn_mask, masking.key_padding_mask
    terms: dict[str, Any] = {}
    if attn_mask is not None:
        required = {2: (L, S), 3: (B * N, L, S)}.get(attn_mask.dim())
        symbols = "(L, S)" if attn_mask.dim() == 2 else "(B N, L, S)"
        check_mask("attn_mask", attn_mask, symbols, required)
        attn_mask = attn_mask.unflatten(0, (B, N)) if attn_mask.dim() == 3 else attn_mask
    if key_padding_mask is not None:
        check_mask("key_padding_mask", key_padding_mask, "(B, S)", (B, S))
        key_padding_mask = key_padding_mask[:, None, None]
    if positions is not None:
        terms |= positions.options(L, S, offset)
    for given in (attn_mask, key_padding_mask):
        if given is None:
            continue
        if given.dtype == torch.bool:
            terms["mask"] = ~given & terms["mask"] if "mask" in terms else ~given
        else:
            bias = given.to(q.dtype)
            terms["bias"] = bias + terms["bias"] if "bias" in terms else bias
    return terms


def with_batch(
    dim: int, query: Tensor, key: Tensor | None, value: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the inputs with a batch dimension of 1; what was one tensor remains one tensor,
    because its projections are then one product.

    dim: the position of the batch dimension
    """
    made: dict[int, Tensor] = {}
    query_, key_, value_ = (
        None if t is None else made.setdefault(id(t), t.unsqueeze(dim)) for t in (query, key, value)
    )
    assert query_ is not None, "MultiheadAttention checks that there is a query"
    return query_, key_, value_


def one_length(key_lengths: Any, device: torch.device) -> Tensor | None:
    """Returns the number of keys of an input without a batch dimension as (1,), or None."""
    if key_lengths is None:
        return None
    length = torch.as_tensor(key_lengths, device=device)
    if length.numel() != 1:
        raise ValueError(
            "MultiheadAttention: key_lengths must be one number for inputs without a batch "
            f"dimension, got {tuple(length.shape)}"
        )
    return length.reshape(1)


def check_traced(**options: Any) -> None:
    """Raises NotImplementedError for an option that is not None while torch.jit.trace records.

    The checks and tables of such options need the lengths of the call as numbers, which a trace
    would take for constants.
    """
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(
                f"MultiheadAttention: {name} must not be used under torch.jit.trace, which would "
                f"record the lengths of this call as constants, got {type(value).__name__}; "
                "torch.export takes it"
            )


def check_mask(name: str, mask: Tensor, symbols: str, required: tuple[int, ...] | None) -> None:
    """Raises TypeError or ValueError for a mask of another dtype or shape.

    symbols: the required shape in words
    required: the required shape, or None for a shape that the operator checks
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"MultiheadAttention: {name} must be bool, True where a key is not attended to, or a "
            f"float that is added to the logits, got {mask.dtype}"
        )
    if required is not None and tuple(mask.shape) != required:
        raise ValueError(
            f"MultiheadAttention: {name} must be {symbols} = {required}, got {tuple(mask.shape)}"
        )


def probabilities(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """Returns the attention probabilities after dropout: (B, N, L, S).

    They are the oracle's result for the identity matrix as values.
    q: (B, N, L, D)    k: (B, N, S, D)    options: other arguments of the operator `attention`
    """
    S = k.size(2)
    identity = torch.eye(S, dtype=q.dtype, device=q.device).expand(*k.shape[:3], S)
    weights: Tensor = reference.attention(q, k, identity, **options)
    return weights
