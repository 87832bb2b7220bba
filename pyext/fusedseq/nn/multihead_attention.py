"""Multi-head attention over the operators `attention` and `linear`."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fusedseq import fused
from fusedseq.nn.attention_options import (
    Masking,
    check_traced,
    logit_terms,
    probabilities,
    with_batch,
)
from fusedseq.nn.attention_projections import AttentionProjections
from fusedseq.nn.dropout import check_probability, draw_seed
from fusedseq.nn.initialization import reset_in_order
from fusedseq.nn.key_value_cache import KeyValueCache
from fusedseq.nn.operators import Operators, shown_options
from fusedseq.nn.packed_sequences import boundaries, longest, nested_as, rows_of
from fusedseq.nn.relative_positions import RelativePositions


class MultiheadAttention(AttentionProjections):
    """Multi-head attention (Vaswani et al., 2017), a drop-in for torch.nn.MultiheadAttention.

    It has the parameters of torch.nn.MultiheadAttention and loads its state dict, and takes the
    arguments of torch's constructor in torch's order. Self-attention computes q, k and v in one
    matrix product, and attention reads them from its result without a copy.

    embed_dim: E    num_heads: N, a divisor of E
    dropout: probability of dropping an attention probability in training mode
    bias: whether the projections have biases
    add_bias_kv, add_zero_attn: must be False: the operator has no keys beside those that are given
    kdim, vdim: sizes of key and value, by default E
    batch_first: whether inputs are (B, L, E), not (L, B, E)
    positions: a module that tells the logits the positions: an ALiBi, RelativeBias, RelativeKeys or
        Rotary; None for none
    scale: factor of the logits, by default 1/sqrt(E / N)
    window: (left, right): a query sees at most so many keys before and after its position; None
        for all
    softcap: above 0, a logit x becomes softcap * tanh(x / softcap); 0 for none
    sinks: whether there is a parameter `sinks` (N,), initialized to 0: logits that the softmax of
        every query has beside those of its keys, with a value of zero
    need_weights: the default of `forward`'s argument of this name. True makes this module return
        the probabilities where torch's does, in code that calls it as torch's and uses its second
        result; `fusedseq.models.convert.attention` sets it. Packed sequences are an error then
    device, dtype: of the parameters, as in torch    ops: `fusedseq.fused` or `fusedseq.reference`
    Errors: ValueError if N does not divide E, for a dropout outside [0, 1], and for add_bias_kv or
    add_zero_attn.

    A query whose keys are all masked gets the bias of `out_proj`, as if it attended to a vector of
    zeros, and zero gradients; its probabilities are 0. torch gives the same with need_weights=False
    and NaN with need_weights=True.

    The projections are the operator `linear`, whose page has its speed.
    """

    # Of modules that were pickled before these options existed.
    need_weights: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    sinks: nn.Parameter | None
    # With False, torch.nn.TransformerEncoderLayer calls `forward`. With True it would, in eval
    # mode, run a kernel of its own on our parameters.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        positions: RelativePositions | None = None,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        need_weights: bool = False,
        ops: Operators = fused,
    ) -> None:
        for name, value in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if value:
                raise ValueError(
                    f"MultiheadAttention: {name} must be False, because attention has no keys "
                    f"beside those that are given, got {value!r}"
                )
        super().__init__(embed_dim, num_heads, bias, kdim, vdim, batch_first, device, dtype, ops)
        self.dropout = check_probability(dropout, "MultiheadAttention", "dropout")
        self.need_weights = need_weights
        self.positions, self.scale = positions, scale
        self.window, self.softcap = window, softcap
        zeros = torch.zeros(num_heads, device=device, dtype=dtype) if sinks else None
        self.register_parameter("sinks", None if zeros is None else nn.Parameter(zeros))
        self._attention, self._attention_varlen = ops.attention, ops.attention_varlen

    def reset_parameters(self) -> None:
        """Initializes as torch.nn.MultiheadAttention: weights Xavier uniform, biases 0.

        out_proj.weight is drawn as that of torch.nn.Linear. The parameters of `positions` are drawn
        first. After the same torch.manual_seed the weights are equal to those of a new module, and
        without `positions` to torch's.
        """
        reset_in_order((self.positions, self.out_proj))
        self._draw_projections()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def cache(self, rows: int, max_length: int) -> KeyValueCache:
        """Returns an empty KeyValueCache for `forward`: `rows` rows of `max_length` positions."""
        weight = self.out_proj.weight
        return KeyValueCache(
            rows,
            self.num_heads,
            max_length,
            self.head_dim,
            device=weight.device,
            dtype=weight.dtype,
        )

    def fill(self, cache: KeyValueCache, key: Tensor, value: Tensor) -> None:
        """Appends the projections of key and value to the cache without computing attention.

        The keys of a source sentence are computed once in this way, for any number of hypotheses
        (see `KeyValueCache.reorder`). key, value: as in `forward`
        """
        cache.append(*self._keys_and_values(key, value))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        key_lengths: Tensor | Sequence[int] | None = None,
        causal_alignment: Literal["start", "end"] | None = None,
        cache: KeyValueCache | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes attention of query over key and value.

        For self-attention pass the same tensor three times.
        query: (L, B, E), key: (S, B, kdim), value: (S, B, vdim), or (B, L, E), ... with
            `batch_first`. Without a batch dimension: (L, E), (S, kdim), (S, vdim)
        key_padding_mask: (B, S), or (S,) without a batch dimension
        attn_mask: (L, S), (B N, L, S), or broadcastable to (B, N, L, S). As in torch, a bool mask
            is True where a key is NOT attended to, and a float mask is added to the logits
        key_lengths: (B,) int64 or int32, or a list: the number of keys of each row of the batch.
            Faster than a key_padding_mask. Without a batch dimension: one number
        is_causal: query i attends to no key after its own position. No attn_mask is required for
            it; where one is given, both apply
        causal_alignment: the positions of L queries among S keys, for is_causal and for the
            module's `positions`. "end": the last query is at the position of the last key, as in
            cached decoding. "start": the first query is at the position of the first key, as
            torch's is_causal has it. By default "start" if is_causal and an attn_mask are given,
            which is how torch has to be called, and "end" otherwise. For L = S there is no
            difference
        need_weights: also return the probabilities after dropout, (B, L, S) averaged over the heads
            or (B, N, L, S), without B for inputs without a batch dimension. By default as the
            module's `need_weights`, which is False, unlike torch's, because the operator never
            stores the probabilities in memory: the oracle computes them in a second pass
        average_attn_weights: whether the probabilities are averaged over the heads
        cache: a KeyValueCache. Key and value are appended to it, and attention is over all its
            positions; without key and value, over the positions already in it. Inference only
        cu_seqlens, max_seqlen: query, key and value are (rows, E) of sequences that follow each
            other without padding, as `fused.attention_varlen` has them, in self-attention. The same
            is meant by nested tensors (B, L*, E) in torch's jagged layout, of which y is one too;
            their keys may have other lengths. key_padding_mask, key_lengths, attn_mask, cache and
            need_weights are not for them, and with `positions` keys have the lengths of the queries
        returns y, as query; the weights or None
        Errors: ValueError or TypeError for shapes and dtypes; those of the operator `attention`;
        NotImplementedError under torch.jit.trace for what it cannot record, masks, is_causal,
        positions, dropout, window, softcap, sinks and cache, which torch.export takes.
        """
        need_weights = self.need_weights if need_weights is None else need_weights
        masking = Masking(attn_mask, key_padding_mask, key_lengths, is_causal, causal_alignment)
        if cu_seqlens is not None or getattr(query, "is_nested", False):
            masking.check_packed(cache, need_weights)
            return self._packed(query, key, value, is_causal, cu_seqlens, max_seqlen), None
        if max_seqlen is not None:
            raise ValueError(
                f"MultiheadAttention: max_seqlen must be None without cu_seqlens, got {max_seqlen}"
            )
        self._check(query, key, value, has_cache=cache is not None)
        if query.dim() == 3:
            y, probability = self._attend(query, key, value, masking, cache, need_weights)
        else:
            inputs = with_batch(self._batch_dim, query, key, value)
            masking = masking.with_batch(query.device)
            y, probability = self._attend(*inputs, masking, cache, need_weights)
            y = y.squeeze(self._batch_dim)
        if probability is None:
            return y, None
        weights = probability.mean(1) if average_attn_weights else probability
        return y, weights if query.dim() == 3 else weights[0]

    def _attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        masking: Masking,
        cache: KeyValueCache | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns y and, if need_weights, the probabilities of each head, of inputs with a batch
        dimension, which `forward` describes.
        """
        if torch.jit.is_tracing():
            check_traced(
                **masking.given(),
                cache=cache,
                positions=self.positions,
                dropout=(self.training and self.dropout) or None,
                **self._logit_options(),
            )
        q, k, v = self._heads(query, key, value)
        L, S = q.size(2), (0 if k is None else k.size(2)) + (0 if cache is None else cache.length)
        offset = masking.first_position(L, S, cache)
        options: dict[str, Any] = {
            "scale": self.scale,
            "causal": masking.is_causal,
            "key_lengths": masking.key_lengths,
        }
        if offset != S - L:
            options["offset"] = offset
        options |= self._logit_options()
        # Before the cache takes the keys, as it may refuse a mask.
        options |= logit_terms(q, S, offset, masking, self.positions)
        held = 0 if cache is None else cache.length
        if cache is not None:
            if k is not None and v is not None:
                cache.append(k, v)
            k, v, options["key_rows"] = cache.held()
        assert k is not None, "_check requires a key or a cache"
        assert v is not None, "_check requires a value or a cache"
        options |= self._draws(q.device)
        try:
            # (B, L, E), a view: the operator's result is laid out in memory as (B, L, N, D)
            y = self._attention(q, k, v, **options).transpose(1, 2).flatten(2)
        except Exception:
            if cache is not None:
                cache.length = held  # without the keys of a call that was refused
            raise
        y = self._linear(y, self.out_proj.weight, self.out_proj.bias)
        found = probabilities(q, k, options) if need_weights else None
        return y if self.batch_first else y.transpose(0, 1), found

    def _draws(self, device: torch.device) -> dict[str, Any]:
        """Returns the operator's arguments of a dropout that is active."""
        if not (self.training and self.dropout):
            return {}
        return {"dropout": self.dropout, "seed": draw_seed(device)}

    def _logit_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.window is not None:
            options["window"] = self.window
        if self.softcap:
            options["softcap"] = self.softcap
        if getattr(self, "sinks", None) is not None:  # of a pickled module it may be missing
            options["sinks"] = self.sinks
        return options

    def _packed(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        causal: bool,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> Tensor:
        """Returns y of packed sequences, as `forward` describes them."""
        (cu_q, most_q), (cu_k, most_k) = boundaries(query, key, value, cu_seqlens, max_seqlen)
        # One tensor stays one tensor, because its projections are then one product. With a batch of
        # one they are views (1, N, rows, D).
        rows = {id(t): rows_of(t).unsqueeze(self._batch_dim) for t in (query, key, value)}
        q_rows, k_rows, v_rows = (rows[id(t)] for t in (query, key, value))
        self._check(q_rows, k_rows, v_rows, has_cache=False)
        q, k, v = self._heads(q_rows, k_rows, v_rows)
        assert k is not None, "there is a key"
        assert v is not None, "there is a value"
        options: dict[str, Any] = {"scale": self.scale, "causal": causal}
        options |= self._logit_options()
        if self.positions is not None:
            if cu_q is not cu_k:
                raise ValueError(
                    "MultiheadAttention: positions must be None for packed sequences whose keys "
                    f"have other lengths than the queries, got {type(self.positions).__name__}"
                )
            most_q = most_k = longest(cu_q) if most_q is None else most_q
            options |= self.positions.options(most_q, most_q, 0)
        options |= self._draws(q.device)
        q, k, v = (t.squeeze(0).transpose(0, 1) for t in (q, k, v))
        y = self._attention_varlen(q, k, v, cu_q, cu_k, most_q, most_k, **options).flatten(1)
        y = self._linear(y, self.out_proj.weight, self.out_proj.bias)
        return nested_as(query, y) if query.is_nested else y

    def extra_repr(self) -> str:
        sizes = {"kdim": self.kdim, "vdim": self.vdim}
        return shown_options(
            self,
            bias=self.in_proj_bias is not None,
            sinks=getattr(self, "sinks", None) is not None,
            **{name: None if n == self.embed_dim else n for name, n in sizes.items()},
        )
