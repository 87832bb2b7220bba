"""What the recurrent operators whose state is h alone have in common: gru, rnn, layer_norm_gru."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autocast, autograd, check, cudnn_recurrence, int8_weight
from fusedseq.fused.gradient import Gradient
from fusedseq.fused.lstm import check_sequence, pad, saved_dtypes, unchecked
from fusedseq.fused.schema import Named
from fusedseq.fused.through_oracle import call_reference
from fusedseq.fused.transforms import is_transformed
from fusedseq.reference.steps import flip_sequences, mask_of_steps

GATES = {"gru": 3, "rnn": 1, "layer_norm_gru": 3}  # of W_ih and W_hh, for each hidden unit
BIASES = {"gru": 4, "rnn": 1, "layer_norm_gru": 4}
SLOTS = {"gru": 4, "rnn": 1, "layer_norm_gru": 6}  # saved pre-activations or products
# {operator: its vectors of parameters, (GATES H,) each, in the order in which `norm` has them}
VECTORS = {"layer_norm_gru": ("gamma_ih", "gamma_hh")}
STATISTICS = {"layer_norm_gru": 2}  # saved for each row and step
TENSORS = ("x", "W_ih", "W_hh", "b", "h0")
FLAGS = ("reverse", "variational", "training")
BY_CUDNN = ("gru", "rnn")  # operators that cuDNN has too


def call(op: str, given: Named) -> tuple[Tensor, Tensor]:
    """Checks the arguments of an operator, by name, and computes it.

    returns y: (T, B, H), h: (B, H)
    """
    a = dict(given)
    found = unchecked(op, a, dict.fromkeys(VECTORS.get(op, ()), GATES[op]))
    if found is not NotImplemented:
        y, h, *_ = found
        return y, h
    names = (*TENSORS, *VECTORS.get(op, ()))
    tensors = {name: a[name] for name in names[1:]}
    a["lengths"] = check_sequence(op, GATES[op], BIASES[op], a["x"], tensors, a["lengths"])
    x, G = a["x"], GATES[op]
    for name in names[len(TENSORS) :]:
        check.shape(op, name, a[name], f"({G}H,)", (G * a["h0"].size(1),))
    check.starts(op, a["starts"], x)
    for name in ("zoneout_h", "weight_drop"):
        check.probability(op, name, a[name])
    check.flags(op, **{name: a[name] for name in FLAGS})
    if not a["training"]:
        a["weight_drop"] = 0.0
    if op == "rnn" and not isinstance(a["relu"], bool):
        raise TypeError(f"rnn: relu must be a bool, got {type(a['relu']).__name__}")
    has_mask = a["weight_drop"] or a["zoneout_h"]
    a["seed"] = check.seed(op, a["seed"], x.device) if has_mask else None
    cast = autocast.cast(x.device.type, *(a[name] for name in names))
    a |= dict(zip(names, cast, strict=True))
    weights = a["W_ih"], a["W_hh"]
    others = [a[name] for name in names if name not in ("x", "W_ih", "W_hh")]
    is_random = a["training"] and has_mask
    is_int8 = int8_weight.has_recurrence(a["x"], weights, others, is_random)
    if not is_int8:
        a["W_ih"], a["W_hh"] = int8_weight.dequantized(*weights)
        if is_by_cudnn(op, **a):
            return by_cudnn(op, a)
    if op in VECTORS:
        a["norm"] = torch.cat([a[name] for name in VECTORS[op]])
    if is_int8:
        y, h = int8_weight.call(op, a, ("W_ih", "W_hh"))
        return y, h
    y, h, *_ = autograd.call_by_name(op, a)
    return y, h


def is_by_cudnn(
    op: str,
    x: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    relu: bool = False,
    starts: Tensor | None = None,
    zoneout_h: float = 0.0,
    weight_drop: float = 0.0,
    training: bool = True,
    **_: Any,
) -> bool:
    """Whether cuDNN computes a call, given its arguments by name: it has kernels for whole
    sequences, while the loop of csrc/cuda/recurrence/loop.cu launches two for a step.

    Not with `starts`, zoneout or a weight drop, which cuDNN does not have, and not while
    torch.compile or torch.func traces the call. Not with lengths and ReLUs: cuDNN computes the
    steps past a length too, and the state of an RNN with ReLUs can overflow there, so that its
    gradient is NaN.
    """
    if op not in BY_CUDNN or is_transformed():
        return False
    if starts is not None or zoneout_h or (weight_drop and training):
        return False
    if x.size(1) == 0 or (relu and lengths is not None):
        return False
    return cudnn_recurrence.accepts(x) and cudnn_recurrence.may_replace_loop()


def by_cudnn(op: str, a: Named) -> tuple[Tensor, Tensor]:
    """Computes a call by cuDNN.    a: the checked arguments by name"""
    x, h0, lengths = a["x"], a["h0"], a["lengths"]
    alive = mask_of_steps(lengths, x)
    if alive is not None:
        x = torch.where(alive, x, 0.0)
    if a["reverse"]:
        x = flip_sequences(x, lengths)
    mode, oracle = cudnn_recurrence.GRU, getattr(reference, op)
    if op == "rnn":
        mode = cudnn_recurrence.RELU if a["relu"] else cudnn_recurrence.TANH
        oracle = functools.partial(oracle, relu=a["relu"])
    weights = a["W_ih"].contiguous(), a["W_hh"].contiguous()
    b = None if a["b"] is None else a["b"].contiguous()
    y, h = cudnn_recurrence.call(mode, oracle, x.contiguous(), *weights, b, h0.contiguous())
    if alive is not None:
        # The state after a sequence's last step, or the initial one of a sequence without steps.
        last_step = (lengths - 1).clamp(min=0)[None, :, None].expand(1, *h0.shape)
        h = torch.where(lengths[:, None] > 0, y.gather(0, last_step)[0], h0)
        y = torch.where(alive, y, 0.0)
    return (flip_sequences(y, lengths) if a["reverse"] else y), h


def register(op: str, oracle: Callable[..., Any]) -> None:
    """Registers the shapes of an operator's results, and its gradients."""

    def fake(named: Named) -> tuple[Tensor, ...]:
        x, h0 = named["x"], named["h0"]
        (T, B, _), H, (activations, computing) = x.shape, h0.size(1), saved_dtypes(x)
        y, h = x.new_empty(T, B, H), x.new_empty(B, H)
        gates = x.new_empty(T, B, SLOTS[op], pad(H), dtype=activations)
        if op not in STATISTICS:
            return y, h, gates
        return y, h, gates, x.new_empty(T, B, STATISTICS[op], dtype=computing)

    def by_reference(named: Named) -> Any:
        if op not in VECTORS:
            return call_reference(oracle, named)
        parts = named["norm"].chunk(len(VECTORS[op]))
        return call_reference(oracle, named | dict(zip(VECTORS[op], parts, strict=True)))

    autograd.register(
        op,
        fake,
        Gradient(
            results=("y", "h"), backwards=(f"{op}_backward",), oracle=by_reference, loops=True
        ),
    )
    autograd.register_fake_backward(op)
