"""Prepares the arguments of the attention kernels from those of the operator."""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from fusedseq.kernels import launch, philox
from fusedseq.kernels.attention import checks, tiled
from fusedseq.kernels.attention.arguments import OptionalTensors, Sizes
from fusedseq.kernels.attention.plan import BIAS, DROPOUT, PLAIN, RICH, Plan, plan
from fusedseq.kernels.attention.tile import Rope

AT_END = -(2**63)  # the operator's `offset` that stands for S - L
UNLIMITED = 2**30  # a side of a window; usually all positions and sizes are smaller


class Extra(NamedTuple):
    """The options that the tiled kernels alone compute, as the operator's inputs."""

    sinks: Any = None
    softcap: float = 0.0
    window_left: int = -1
    window_right: int = -1
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0

    def sizes(self, q, k, key_rows):
        """Returns (B, L, S): of packed sequences their number and the longest ones."""
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.size(0) - 1, self.max_seqlen_q, self.max_seqlen_k
        return q.size(0), q.size(2), k.size(2) if key_rows is None else key_rows.size(1)

    def options(self, causal, offset, L, S):
        """Returns them as fields of OptionalTensors.

        offset, L, S: as in arguments.Sizes
        """
        fields = {
            "sinks": contiguous(self.sinks),
            "softcap": float(self.softcap) if self.softcap else None,
        }
        if self.window_left >= 0 or self.window_right >= 0:
            reach = abs(offset) + L + S
            left = window_side(self.window_left, offset + L, reach)
            right = window_side(self.window_right, S - offset, reach)
            fields |= {"window_left": left, "window_right": 0 if causal else right}
        if self.cu_seqlens_q is not None:
            fields |= {
                "cu_seqlens_q": self.cu_seqlens_q.contiguous(),
                "cu_seqlens_k": self.cu_seqlens_k.contiguous(),
                "longest_q": self.max_seqlen_q,
                "longest_k": self.max_seqlen_k,
            }
        return fields

    def places(self, queries):
        """Returns the sequence of each query of packed sequences, and its index there."""
        t = torch.arange(queries, device=self.cu_seqlens_q.device)
        b = torch.searchsorted(self.cu_seqlens_q, t, right=True) - 1
        return b, t - self.cu_seqlens_q[b]


def window_side(size, most, reach):
    """Returns a side of a window as the kernels take it.

    size: as the operator takes it; negative: unlimited    most: a side that hides no key
    reach: the largest distance of a position from 0
    """
    # Near 0 it does not depend on L and S, for which a second kernel might be compiled. Elsewhere
    # it is no larger than needed, so that a position with the side added has no more bits.
    unlimited = UNLIMITED if reach <= UNLIMITED else max(most, 0)
    return unlimited if size < 0 else min(size, unlimited)


NO_EXTRA = Extra()


def extra_of(values):
    """Returns the Extra of a tuple of inputs, and whether any is given."""
    if not values or values == NO_EXTRA:
        return NO_EXTRA, False
    return Extra(*values), True


class Call(NamedTuple):
    """What the launchers need to know of a call."""

    B: int
    L: int
    S: int
    D: int
    q: torch.Tensor  # (B, N, L, D) with a last stride of 1, as the next two
    k: torch.Tensor  # (B, N_kv, S, D)
    v: torch.Tensor  # (B, N_kv, S, D)
    optional: OptionalTensors
    sizes: Sizes
    plan: Plan
    causal: bool
    applied_rope: Rope | None  # if q and k have been rotated before the kernel

    @property
    def N(self):
        return self.sizes.N

    @property
    def group(self):
        return self.sizes.group

    def constants(self, tiles, *tensors):
        """Returns the compile-time arguments of a kernel that reads `tensors` beside k and v.

        tiles: of the plan
        """
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32" and self.q.dtype == torch.float32
        return {
            **tiles,
            "D": self.D,
            "CAUSAL": self.causal,
            "PRECISION": "tf32" if tf32 else "ieee",
            "BYTES": row_alignment(self.k, self.v, *tensors),
        }


def prepare(
    q,
    k,
    v,
    bias,
    mask,
    key_lengths,
    alibi,
    relative_keys,
    rope,
    rope_interleaved,
    key_rows,
    seed,
    scale,
    causal,
    offset,
    dropout,
    extra=NO_EXTRA,
):
    """Returns the Call of an operator's arguments; fusedseq.reference.attention documents them."""
    (B, L, S), N, D = extra.sizes(q, k, key_rows), q.size(1), q.size(3)
    checks.require_shapes(q, k, v, (B, N, L, S), bias, mask, key_lengths, alibi, key_rows, extra)
    checks.require_positions(q, rope, offset, L, S)
    packed = extra.cu_seqlens_q is not None
    applied_rope = None
    if rope is not None:
        columns = tl.constexpr(rope.size(1))
        rope = Rope(rope.contiguous(), columns, tl.constexpr(rope_interleaved))
    if relative_keys is not None and rope is not None:
        if packed:
            raise NotImplementedError(
                "attention_varlen: relative_keys and rope are not computed together on a GPU"
            )
        # The product with relative_keys, computed below, needs the rotated queries.
        q, k = rotated(q, rope, offset), rotated(k[:, :, :S], rope, 0)
        applied_rope, rope = rope, None
    q, k, v = with_unit_stride(q), with_unit_stride(k), with_unit_stride(v)
    optional = OptionalTensors(
        bias=bias,
        bias_strides=broadcast_strides(bias),
        mask=mask,
        mask_strides=broadcast_strides(mask),
        alignment=element_alignment(1 if packed else S, bias, mask),
        key_lengths=contiguous(key_lengths),
        alibi=contiguous(alibi),
        relative=products_with_relative(q, relative_keys, extra),
        clip=None if relative_keys is None else len(relative_keys) // 2,
        rope=rope,
        key_rows=contiguous(key_rows),
        seed=seed if dropout else None,
        **({} if extra is NO_EXTRA else extra.options(causal, offset, L, S)),
    )
    sizes = Sizes(
        N=N,
        L=L,
        S=S,
        offset=offset,
        threshold=philox.threshold(dropout),
        scale=scale,
        keep_scale=philox.scale(dropout),
        group=N // k.size(1),
    )
    pressure = register_pressure(dropout, bias, mask, rope, relative_keys, extra.softcap)
    small_bias = rope is not None or relative_keys is not None
    hopper = launch.capability(tiled.tiled_forward, q) == 90
    in_tiles = extra is not NO_EXTRA
    chosen = plan(L, S, D, q.element_size(), pressure, in_tiles, small_bias, hopper)
    return Call(B, L, S, D, q, k, v, optional, sizes, chosen, causal, applied_rope)


def products_with_relative(q, relative_keys, extra):
    """Returns the (B, N, L, 2K + 1) products of q and relative_keys, or None."""
    if relative_keys is None:
        return None
    products = q @ relative_keys.T
    if extra.cu_seqlens_q is None:
        return products.contiguous()
    B, L, _ = extra.sizes(q, q, None)
    padded = products.new_zeros(B, q.size(1), L, len(relative_keys))
    b, i = extra.places(q.size(2))
    padded[b, :, i] = products[0].transpose(0, 1)
    return padded


def register_pressure(dropout, bias, mask, rope, relative_keys, softcap=0.0):
    """Returns the register pressure of a call with these options."""
    if rope is not None or relative_keys is not None or softcap:
        return RICH
    if bias is not None or mask is not None:
        return RICH if dropout else BIAS
    return DROPOUT if dropout else PLAIN


def with_unit_stride(x):
    return x if x.stride(-1) == 1 or x.size(-1) == 1 else x.contiguous()


def strides(x):
    """Returns the strides of the first three dimensions."""
    return x.stride()[:3]


def strides_of(call, *tensors):
    """Returns the strides of each tensor; packed sequences have none between batch rows."""
    if call.optional.cu_seqlens_q is None:
        return tuple(map(strides, tensors))
    return tuple((0, *strides(x)[1:]) for x in tensors)


def contiguous(option):
    return None if option is None else option.contiguous()


def broadcast_strides(option):
    """Returns the strides of an option, 0 for a dimension of size 1, or None."""
    if option is None:
        return None
    return tuple(
        0 if size == 1 else stride
        for size, stride in zip(option.shape, option.stride(), strict=True)
    )


def row_alignment(*tensors):
    """Returns the largest power of two, at most 16, that divides every row's address in bytes."""
    bits = 16
    for x in tensors:
        bits |= x.data_ptr()
        for stride in x.stride()[:3]:
            bits |= stride * x.element_size()
    return bits & -bits


def has_descriptors(call):
    """Returns whether keys and values of a call can be loaded by tensor descriptors.

    A descriptor needs rows at multiples of 16 bytes. It loads whole tiles: keys behind a length,
    which may be NaN, keys of several batch rows, and rotations need pointers.
    """
    options = call.optional
    plain = all_none(options.key_lengths, options.key_rows, options.rope, options.cu_seqlens_q)
    if not plain or call.k.element_size() != 2 or row_alignment(call.k, call.v) < 16:
        return False
    broadcast = any(0 in x.stride() for x in (call.k, call.v))
    return not broadcast


def element_alignment(S, *options):
    """Returns the largest power of two, at most 16, that divides S and the first element of every
    row of the options.

    1 where columns are not adjacent, since nothing is known of their addresses then. None if all
    options are None.
    """
    options = [x for x in options if x is not None]
    bits = 16 | S
    for x in options:
        *rows, column = broadcast_strides(x)
        bits |= 1 if column > 1 else x.data_ptr() // x.element_size()
        for stride in rows:
            bits |= stride
    return tl.constexpr(bits & -bits) if options else None


def heads_last(like, B, N, L, D, dtype=None):
    """Returns a new (B, N, L, D) tensor that is stored as (B, L, N, D)."""
    return like.new_empty(B, L, N, D, dtype=dtype).transpose(1, 2)


def rotated(x, rope, first, sign=1):
    """Rotates x (B, N, L, D) by a Rope's angles of positions first : first + L.

    sign: -1 rotates backwards
    """
    rows = rope.table[first : first + x.size(2)].float().unflatten(-1, (-1, 2))
    pairs, pair = ((-1, 2), -1) if rope.interleaved.value else ((2, -1), -2)
    whole = x[..., : rope.columns.value].float()
    (cos, sin), (a, b) = rows.unbind(-1), whole.unflatten(-1, pairs).unbind(pair)
    sin = sin * sign
    y = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=pair).flatten(-2).to(x.dtype)
    return torch.cat([y, x[..., y.size(-1) :]], dim=-1) if y.size(-1) < x.size(-1) else y


def all_none(*options):
    """Returns whether all options are None."""
    return all(option is None for option in options)
