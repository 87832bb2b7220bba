"""`lstm` by cuDNN: the calls that its persistent kernel supports, and those that would otherwise
run the loop of csrc/cuda/recurrence/loop.cu.

It cannot be a kernel of the registered operator: how much memory cuDNN saves for backward is known
to cuDNN alone, so that the shapes of the results cannot be given to a compiler.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fusedseq import kernel_table
from fusedseq._load import variable
from fusedseq.fused import recurrence_plan
from fusedseq.fused.through_oracle import call_reference, through_oracle
from fusedseq.fused.transforms import is_transformed

LSTM_MODE = 2  # CUDNN_LSTM
INPUTS = ("x", "W_ih", "W_hh", "b", "h0", "c0")
BF16_FROM = 91300  # the version of cuDNN from which torch gives it LSTMs in bf16: 9.13


def has_persistent_kernel(
    dtype: torch.dtype, capability: tuple[int, int], B: int, X: int, H: int
) -> bool:
    """Whether torch chooses cuDNN's persistent kernel for one layer in one direction: these
    conditions are those of torch's ATen/native/cudnn/RNN.cpp.

    capability: the device's compute capability, such as (9, 0); below 8.0 this returns False
    """
    major, minor = capability
    return (
        dtype == torch.float16
        and major >= 8
        and minor != 6
        and 0 < H <= 1024
        and H % 128 == 0
        and X % 128 == 0
        and 0 < B <= 128
        and B % 8 == 0
    )


def accepts(x: Tensor) -> bool:
    """Whether torch gives LSTMs of the dtype of x, which is on CUDA, to cuDNN. fp64 is left to the
    loop."""
    if x.dtype == torch.bfloat16:
        # torch.backends.cudnn.is_acceptable knows no bf16; these are the conditions of aten's RNNs.
        cudnn = torch.backends.cudnn
        if not (cudnn.enabled and cudnn.is_available() and (cudnn.version() or 0) >= BF16_FROM):
            return False
        return torch.cuda.get_device_capability(x.device)[0] >= 8
    return x.dtype != torch.float64 and torch.backends.cudnn.is_acceptable(x)


def replaces_loop(x: Tensor, h0: Tensor) -> bool:
    """Whether cuDNN computes a call in place of the loop: where csrc/cuda/recurrence/plan.h finds a
    persistent kernel for neither direction. Not if torch is to use deterministic algorithms, since
    cuDNN's are not always, and not if FUSEDSEQ_RECURRENCE selects the loop.
    """
    if torch.are_deterministic_algorithms_enabled() or variable("FUSEDSEQ_RECURRENCE", "loop"):
        return False
    return recurrence_plan.runs_loop(x, h0)


def is_flipped(x: Tensor, starts: Tensor | None, reverse: bool) -> bool:
    """Whether a call computes a reversed copy of x: on CUDA, where only the loop has `reverse`. The
    copies of x and y take the time of a few steps; the persistent kernels and cuDNN save more.
    """
    return reverse and starts is None and x.is_cuda and not variable("FUSEDSEQ_RECURRENCE", "loop")


def supports(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    lengths: Tensor | None,
    weight_drop: float,
    starts: Tensor | None = None,
    reverse: bool = False,
) -> bool:
    """Whether cuDNN computes this call of `lstm`: not with lengths, a weight drop, `starts` or
    `reverse`, which it has no arguments for, and not while torch.compile or torch.func traces the
    call.
    """
    if not x.is_cuda or lengths is not None or weight_drop or x.size(1) == 0:
        return False
    if starts is not None or reverse:
        return False
    if is_transformed() or not accepts(x):
        return False
    if not all(t is None or t.is_contiguous() for t in (x, W_ih, W_hh, b, h0, c0)):
        return False
    capability = torch.cuda.get_device_capability(x.device)
    sizes = x.size(1), x.size(2), h0.size(1)
    if kernel_table.cudnn:
        key = ".".join(map(str, capability)), str(x.dtype).removeprefix("torch.")
        measured = kernel_table.cudnn.get((*key, *sizes))
        if measured is not None:
            return measured
    return has_persistent_kernel(x.dtype, capability, *sizes) or replaces_loop(x, h0)


@contextmanager
def products_of(dtype: torch.dtype) -> Iterator[None]:
    """In fp32, keeps cuDNN from rounding products to TF32, which torch allows it by default, unless
    torch's matrix products are allowed to. The setting is global: another thread that calls cuDNN
    at the same time computes without TF32 too.
    """
    rnn: Any = torch.backends.cudnn.rnn
    before = rnn.fp32_precision
    matmul: Any = torch.backends.cuda.matmul
    if dtype != torch.float32 or before != "tf32" or matmul.fp32_precision == "tf32":
        yield
        return
    rnn.fp32_precision = "ieee"
    try:
        yield
    finally:
        rnn.fp32_precision = before


class CudnnLstm(torch.autograd.Function):
    """(oracle, x, W_ih, W_hh, b, h0, c0) -> y, h, c"""

    @staticmethod
    def forward(ctx: Any, oracle: Callable[..., Any], *inputs: Any) -> Any:
        x, W_ih, W_hh, b, h0, c0 = inputs
        weights = [W_ih, W_hh] if b is None else [W_ih, W_hh, b, torch.zeros_like(b)]
        ctx.options = (
            LSTM_MODE,
            h0.size(1),  # hidden size
            0,  # projection size
            1,  # layers
            False,  # batch first
            0.0,  # dropout
            any(ctx.needs_input_grad),  # training
            False,  # bidirectional
            [],  # batch sizes
            None,  # state of the dropout
        )
        # The operands already have autocast's dtype; autocast would flatten the weights again.
        with torch.autocast("cuda", enabled=False), products_of(x.dtype):
            y, h, c, reserve, packed = torch.ops.aten._cudnn_rnn(
                x, weights, len(weights), None, h0[None], c0[None], *ctx.options
            )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, y, reserve, packed)
        ctx.oracle = oracle
        return y, h[0], c[0]

    @staticmethod
    def backward(ctx: Any, dy: Any, dh: Any, dc: Any) -> Any:
        *inputs, y, reserve, packed = ctx.saved_tensors
        x, W_ih, W_hh, b, h0, c0 = inputs
        needs = ctx.needs_input_grad[1:]
        if dy is None and dh is None and dc is None:
            return (None,) * 7
        if torch.is_grad_enabled():
            needed = frozenset(n for n, need in zip(INPUTS, needs, strict=True) if need)
            found = through_oracle(
                lambda named: call_reference(ctx.oracle, named),
                dict(zip(INPUTS, inputs, strict=True)),
                {"y": dy, "h": dh, "c": dc},
                needed,
            )
            return None, *(found.get(name) for name in INPUTS)
        weights = [W_ih, W_hh] if b is None else [W_ih, W_hh, b, torch.zeros_like(b)]
        dh, dc = (None if d is None else d[None] for d in (dh, dc))
        with products_of(x.dtype):
            dx, dh0, dc0, dW = torch.ops.aten._cudnn_rnn_backward(
                x,
                weights,
                len(weights),
                packed,
                h0[None],
                c0[None],
                y,
                dy,
                dh,
                dc,
                *ctx.options,
                reserve.clone(),  # cuDNN writes to it, and another backward may follow
                [needs[0], needs[4], needs[5], any(needs[1:4])],
            )
        dW_ih, dW_hh, db = (*dW, None, None, None)[:3]
        states = (None if d is None else d[0] for d in (dh0, dc0))
        grads = dx, dW_ih, dW_hh, db, *states
        return None, *(g if need else None for g, need in zip(grads, needs, strict=True))
