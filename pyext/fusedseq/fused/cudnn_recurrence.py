"""Recurrences by cuDNN, which has kernels for whole sequences: `lstm`, `gru` and `rnn`. Which calls
those are is decided in lstm_cudnn.py and gru_cudnn.py.

They cannot be kernels of the registered operators: how much memory cuDNN saves for backward is
known to cuDNN alone, so that the shapes of the results cannot be given to a compiler.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusedseq._load import variable
from fusedseq.fused.through_oracle import call_reference, through_oracle

RELU, TANH, LSTM, GRU = range(4)  # cudnnRNNMode_t
INPUTS = ("x", "W_ih", "W_hh", "b", "h0", "c0")
BF16_FROM = 91300  # the version of cuDNN from which torch gives it recurrences in bf16: 9.13


def accepts(x: Tensor) -> bool:
    """Whether torch gives recurrences of the device and dtype of x to cuDNN. fp64 is left to the
    loop."""
    if not x.is_cuda:
        return False
    if x.dtype == torch.bfloat16:
        # torch.backends.cudnn.is_acceptable knows no bf16; these are the conditions of aten's RNNs.
        cudnn = torch.backends.cudnn
        if not (cudnn.enabled and cudnn.is_available() and (cudnn.version() or 0) >= BF16_FROM):
            return False
        return torch.cuda.get_device_capability(x.device)[0] >= 8
    return x.dtype != torch.float64 and torch.backends.cudnn.is_acceptable(x)


def may_replace_loop() -> bool:
    """Whether cuDNN may compute what would run the loop: not if torch is to use deterministic
    algorithms, since cuDNN's are not always, and not if FUSEDSEQ_RECURRENCE selects the loop.
    """
    return not (
        torch.are_deterministic_algorithms_enabled() or variable("FUSEDSEQ_RECURRENCE", "loop")
    )


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


def two_biases(mode: int, b: Tensor, H: int) -> list[Tensor]:
    """The biases of the two products, which cuDNN adds each, from the one vector b."""
    if mode == GRU:  # b_r, b_z, b_in of the product with W_ih, b_hn of that with W_hh
        return [b[: 3 * H], pad(b[3 * H :], (2 * H, 0))]
    return [b, torch.zeros_like(b)]


def call(
    mode: int,
    oracle: Callable[..., Any],
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    h0: Tensor,
    c0: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Computes one layer in one direction; all tensors are contiguous, c0 is of an LSTM alone.

    oracle: the operator's, for higher derivatives
    returns y, h and, of an LSTM, c
    """
    inputs = x, W_ih, W_hh, b, h0, c0
    # Within `forward` torch records nothing, so it cannot tell whether a backward will follow.
    training = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    found: tuple[Tensor, ...] = CudnnRecurrence.apply(mode, oracle, training, *inputs)  # type: ignore[no-untyped-call]
    return found


class CudnnRecurrence(torch.autograd.Function):
    """(mode, oracle, training, x, W_ih, W_hh, b, h0, c0) -> y, h and, of an LSTM, c"""

    @staticmethod
    def forward(
        ctx: Any, mode: int, oracle: Callable[..., Any], training: bool, *inputs: Any
    ) -> Any:
        x, W_ih, W_hh, b, h0, c0 = inputs
        H = h0.size(1)
        weights = [W_ih, W_hh, *([] if b is None else two_biases(mode, b, H))]
        ctx.options = (
            mode,
            H,
            0,  # projection size
            1,  # layers
            False,  # batch first
            0.0,  # dropout
            training,  # whether cuDNN saves what its backward reads
            False,  # bidirectional
            [],  # batch sizes
            None,  # state of the dropout
        )
        states = (None if s is None else s[None] for s in (h0, c0))
        # The operands already have autocast's dtype; autocast would flatten the weights again.
        with torch.autocast("cuda", enabled=False), products_of(x.dtype):
            y, h, c, reserve, packed = torch.ops.aten._cudnn_rnn(
                x, weights, len(weights), None, *states, *ctx.options
            )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, y, reserve, packed)
        ctx.oracle = oracle
        return (y, h[0]) if c0 is None else (y, h[0], c[0])

    @staticmethod
    def backward(ctx: Any, dy: Any, dh: Any, dc: Any = None) -> Any:
        *inputs, y, reserve, packed = ctx.saved_tensors
        x, W_ih, W_hh, b, h0, c0 = inputs
        needs = ctx.needs_input_grad[3:]
        if dy is None and dh is None and dc is None:
            return (None,) * 9
        if torch.is_grad_enabled():
            needed = frozenset(n for n, need in zip(INPUTS, needs, strict=True) if need)
            found = through_oracle(
                lambda named: call_reference(ctx.oracle, named),
                dict(zip(INPUTS, inputs, strict=True)),
                {"y": dy, "h": dh, "c": dc},
                needed,
            )
            return None, None, None, *(found.get(name) for name in INPUTS)
        mode, H = ctx.options[:2]
        weights = [W_ih, W_hh, *([] if b is None else two_biases(mode, b, H))]
        h0, c0, dh, dc = (None if t is None else t[None] for t in (h0, c0, dh, dc))
        with products_of(x.dtype):
            dx, dh0, dc0, dW = torch.ops.aten._cudnn_rnn_backward(
                x,
                weights,
                len(weights),
                packed,
                h0,
                c0,
                y,
                dy,
                dh,
                dc,
                *ctx.options,
                reserve.clone(),  # cuDNN writes to it, and another backward may follow
                [needs[0], needs[4], needs[5], any(needs[1:4])],
            )
        dW_ih, dW_hh, db, db_h = (*dW, None, None, None, None)[:4]
        if mode == GRU and needs[3]:
            db = torch.cat([db, db_h[2 * H :]])
        states = (None if d is None else d[0] for d in (dh0, dc0))
        grads = dx, dW_ih, dW_hh, db, *states
        needed_grads = (g if need else None for g, need in zip(grads, needs, strict=True))
        return None, None, None, *needed_grads
