"""Calls of the Triton launchers, with tensors of the meta device, that cover each kernel and
configuration that ships.
"""

import functools

import torch
from fusedseq import kernels
from fusedseq.kernels.attention.plan import DESCRIBED_LOADS, SPECIALIZED_LOADS, TILED


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def norm(shape, dtype=torch.bfloat16, prenorm=False):
    """Calls of residual_layer_norm and its backward, with every tensor that they accept."""
    x, weight, seed = (
        empty(*shape, dtype=dtype),
        empty(shape[-1], dtype=dtype),
        empty(1, dtype=torch.int64),
    )
    module = kernels.module("residual_layer_norm")

    def forward():
        module.residual_layer_norm(x, x, weight, weight, 0.1, 1e-5, prenorm, seed)

    def backward():
        statistics = [empty(x.numel() // x.size(-1), dtype=torch.float32)] * 2
        ds, s = (x, x) if prenorm else (None, None)
        module.residual_layer_norm_backward(x, ds, x, x, weight, s, *statistics, 0.1, seed, 15)

    name = f"{shape[0]}x{shape[1]}-{str(dtype)[6:]}" + "-prenorm" * prenorm
    return {
        f"residual_layer_norm-{name}": forward,
        f"residual_layer_norm_backward-{name}": backward,
    }


def activation(shape, name, dtype=torch.bfloat16):
    """Calls of bias_activation_dropout and its backward."""
    x, b, seed = (
        empty(*shape, dtype=dtype),
        empty(shape[-1], dtype=dtype),
        empty(1, dtype=torch.int64),
    )
    module = kernels.module("bias_activation_dropout")
    label = f"{shape[0]}x{shape[1]}-{name}-{str(dtype)[6:]}"
    return {
        f"bias_activation_dropout-{label}": lambda: module.bias_activation_dropout(
            x, b, name, 0.1, seed
        ),
        f"bias_activation_dropout_backward-{label}": lambda: (
            module.bias_activation_dropout_backward(x, x, b, name, 0.1, seed, 3)
        ),
    }


def cross_entropy(label, dtype=torch.bfloat16, options=False):
    """Calls of linear_cross_entropy with and without gradients, and of its backward."""
    x, W, b = (
        empty(512, 640, dtype=dtype),
        empty(10_000, 640, dtype=dtype),
        empty(10_000, dtype=dtype),
    )
    inputs = (
        x,
        W,
        empty(512, dtype=torch.int64),
        b,
        empty(10_000, dtype=torch.float32) if options else None,
    )
    settings = -100, 0.1 * options, 1e-4 * options, 1.0, 1
    lse = empty(512, dtype=torch.float32)
    output_grads = empty(dtype=torch.float32), lse if options else None, lse if options else None
    module = kernels.module("linear_cross_entropy")
    return {
        f"linear_cross_entropy-{label}": lambda: module.linear_cross_entropy(*inputs, *settings, 7),
        f"linear_cross_entropy-{label}-forward": lambda: module.linear_cross_entropy(
            *inputs, *settings, 0
        ),
        f"linear_cross_entropy_backward-{label}": lambda: module.linear_cross_entropy_backward(
            *output_grads, lse, *inputs, *settings, 7
        ),
    }


def attention(
    L,
    S,
    D,
    dtype=torch.bfloat16,
    *,
    B=8,
    N=8,
    N_kv=8,
    causal=False,
    dropout=0.0,
    lengths=False,
    projected=False,
    bias=None,
    mask=None,
    alibi=False,
    relative=None,
    rope=False,
    rows=False,
    window=None,
    softcap=0.0,
    sinks=False,
    varlen=False,
):
    """A forward call and, except for decoding with key_rows, a backward call.

    varlen: the B sequences are packed in one row
    """
    floats, module = functools.partial(empty, dtype=dtype), kernels.module("attention")
    q, k, v = (floats(B, n, heads, D) for n, heads in ((L, N), (S, N_kv), (S, N_kv)))
    if varlen:
        q, k, v = (floats(1, B * n, heads, D) for n, heads in ((L, N), (S, N_kv), (S, N_kv)))
    if projected:
        q, k, v = floats(B, L, 3, N, D).unbind(2)
    bias, relative = bias and floats(*bias), relative and floats(2 * relative + 1, D)
    options = [
        bias,
        mask and empty(*mask, dtype=torch.bool),
        empty(B, dtype=torch.int64) if lengths else None,
        empty(N, dtype=torch.float32) if alibi else None,
        relative,
        empty(S, int(rope * D), dtype=torch.float32) if rope else None,
        rope is True,
    ]
    inputs = [*(x.transpose(1, 2) for x in (q, k, v)), *options]
    settings = [empty(1, dtype=torch.int64), D**-0.5, causal, S - L, dropout]
    cu_seqlens = empty(B + 1, dtype=torch.int64)
    extra = [empty(N, dtype=torch.float32) if sinks else None, softcap, *(window or (-1, -1))]
    extra += [cu_seqlens, cu_seqlens, L, S] if varlen else [None, None, 0, 0]
    out, lse = module.attention(
        *inputs, empty(B, S, dtype=torch.int64) if rows else None, *settings, *extra
    )
    if not rows:
        needs = 7 + 8 * (bias is not None) + 16 * (relative is not None) + 32 * sinks
        module.attention_backward(out, out, lse, *inputs, *settings, *extra, needs)


def attention_call(L, S, D, *, dtype=torch.bfloat16, **settings):
    name = f"attention-L{L}-S{S}-D{D}" + "-fp32" * (dtype == torch.float32)
    words = [
        f"{k}" if v is True else f"{k}{v:g}" if isinstance(v, float | int) else k
        for k, v in settings.items()
    ]
    return "-".join([name, *words]), functools.partial(attention, L, S, D, dtype, **settings)


def everything(L, S):
    """Returns every option except relative keys, with which the rope is applied outside of the
    kernel."""
    return {
        "causal": True,
        "dropout": 0.1,
        "lengths": True,
        "alibi": True,
        "bias": (1, 8, L, S),
        "mask": (8, 1, L, S),
    }


FP32 = torch.float32
ATTENTION = [
    *(attention_call(6, 6, D, lengths=True, dropout=0.1) for D in (32, 64, 2048)),
    attention_call(5, 5, 20, projected=True, causal=True, lengths=True, dropout=0.3),
    attention_call(6, 6, 64, rope=True, **everything(6, 6)),
    attention_call(6, 6, 64, relative=5, **everything(6, 6)),
    attention_call(6, 6, 32, dtype=FP32, lengths=True, dropout=0.1),
    attention_call(6, 6, 2048, dtype=FP32, rope=True, **everything(6, 6)),
    *(attention_call(90, 90, D, projected=True, lengths=True, dropout=0.3) for D in (10, 20, 60)),
    attention_call(90, 90, 64, causal=True, lengths=True, dropout=0.1),
    attention_call(90, 90, 64, rope=True, **everything(90, 90)),
    attention_call(90, 90, 64, relative=16, **everything(90, 90)),
    attention_call(90, 90, 64, dtype=FP32, causal=True, lengths=True, dropout=0.1),
    *(attention_call(1024, 1024, D, causal=True) for D in (64, 128, 256)),
    *(attention_call(1024, 1024, D, lengths=True, dropout=0.1, N_kv=2) for D in (64, 128, 512)),
    *(attention_call(1024, 1024, D, rope=True, **everything(1024, 1024)) for D in (64, 128, 256)),
    attention_call(1024, 1024, 64, relative=64, **everything(1024, 1024)),
    *(attention_call(512, 512, D, bias=(8, 8, 512, 512)) for D in (64, 128)),
    attention_call(1024, 1024, 128, causal=True, lengths=True, alibi=True, N_kv=2),
    *(
        attention_call(1024, 1024, D, **everything(1024, 1024) | {"dropout": 0.0})
        for D in (64, 128)
    ),
    attention_call(1024, 1024, 128, dtype=FP32, rope=True, **everything(1024, 1024)),
    *(
        attention_call(1024, 1024, D, causal=True, dropout=0.1, **option)
        for option in ({"window": (256, 0)}, {"softcap": 30.0}, {"sinks": True}, {"varlen": True})
        for D in (64, 128)
    ),
    attention_call(
        1024, 1024, 64, window=(256, 0), softcap=30.0, sinks=True, **everything(1024, 1024)
    ),
    attention_call(1024, 1024, 64, varlen=True, window=(256, 0), softcap=30.0, sinks=True),
    attention_call(1024, 1024, 64, dtype=FP32, varlen=True, window=(256, 0), sinks=True),
    *(
        attention_call(n, n, D, mask=(8, 1, n, n), dropout=0.1)
        for n, D in ((6, 10), (6, 64), (90, 20), (90, 64), (1024, 64), (1024, 128), (1024, 256))
    ),
    attention_call(1, 1024, 64, causal=True, rows=True),
    attention_call(1, 1024, 128, causal=True, rows=True, rope=True),
]


def described_attention(D, dropout, loads):
    """A causal forward call whose tiled kernel loads keys and values in this way; see
    kernels/attention/plan.py."""
    module, key = kernels.module("attention"), (D, int(dropout > 0), "forward")
    q, seed = empty(8, 1024, 8, D).transpose(1, 2), empty(1, dtype=torch.int64)
    kernels.tiles[key] = (*TILED[key[:2]][0], loads)
    try:
        module.attention(q, q, q, *[None] * 6, False, None, seed, D**-0.5, True, 0, dropout)
    finally:
        kernels.tiles.clear()


# On sm_80 they load by pointers, and only on sm_100 in warps of their own.
LOADS = {"descriptors": DESCRIBED_LOADS, "specialized": SPECIALIZED_LOADS}
DESCRIBED = {
    f"attention-L1024-S1024-D{D}-causal{label}-{name}": functools.partial(
        described_attention, D, dropout, loads
    )
    for D in (64, 128)
    for label, dropout in (("", 0.0), ("-dropout0.1", 0.1))
    for name, loads in LOADS.items()
}
# Calls of launchers that cover each kernel and configuration that ships.
CALLS = {
    **dict(ATTENTION),
    **DESCRIBED,
    "dropout_mask": lambda: kernels.module("dropout_mask").dropout_mask(
        empty(1, dtype=torch.int64), 0.3, (90, 90)
    ),
    **norm((12288, 256), torch.float32),
    **norm((5760, 512)),
    **norm((5760, 512), torch.float32, prenorm=True),
    **norm((64, 4096), torch.float32),
    **norm((64, 16384), prenorm=True),
    **activation((5760, 2048), "relu", torch.float32),
    **activation((5760, 2048), "gelu"),
    **activation((5760, 2048), "gelu_tanh"),
    **activation((5760, 2048), "tanh"),
    **cross_entropy("bfloat16"),
    **cross_entropy("bfloat16-options", options=True),
    **cross_entropy("float32", torch.float32),
}
