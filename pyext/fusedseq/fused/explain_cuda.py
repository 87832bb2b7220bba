"""Which kernel a call runs on CUDA, for `explain`."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from fusedseq import kernels, reference
from fusedseq.fused import gru_cudnn, lstm_cudnn, recurrence_plan
from fusedseq.fused.explain_calls import CALLS, WITHOUT_ROUNDS, is_with_zoneout
from fusedseq.fused.projected_lstm import arguments_of_lstm

# The file of csrc/cuda, where it does not have the operator's name.
CUDA_SOURCES = {
    "activation_regularization": "regularization",
    "locked_dropout": "dropout",
    "weight_drop": "dropout",
}
BY_PRODUCT = "a call of lstm, whose recurrent weight is the product of W_hh and W_hr"


def on_cuda(name: str, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> str:
    called = CALLS.get(name, name)
    if called in kernels.MODULES:
        return kernels.explain(called, *args, **kwargs)
    if name == "lstm":
        return lstm_on_cuda(*args, **kwargs)
    if name == "bidirectional_lstm":
        forward, reverse = directions_of_call(*args, **kwargs)
        return f"two calls of lstm: {lstm_on_cuda(**forward)}; {lstm_on_cuda(**reverse)}"
    if name == "projected_lstm":
        bound = inspect.signature(reference.projected_lstm).bind(*args, **kwargs)
        bound.apply_defaults()
        return f"{BY_PRODUCT}: {lstm_on_cuda(**arguments_of_lstm(bound.arguments))}"
    if name in recurrence_plan.LOOP_ALONE:
        return recurrence_plan.LOOP_ALONE[name]
    if "lstm" in name or name == "gru":
        gpu = recurrence_plan.this_gpu(tensors[0].device)
        if name == "mogrifier_lstm_pair":
            return recurrence_plan.explain_pair(gpu, *args, **kwargs)
        return recurrence_plan.explain(name, gpu, *args, **kwargs)
    return f"csrc/cuda/{CUDA_SOURCES.get(name, name)}.cu"


def directions_of_call(*args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of the two calls of `lstm` that make up one of `bidirectional_lstm`."""
    bound = inspect.signature(reference.bidirectional_lstm).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    reverse = {n.removesuffix("_reverse"): v for n, v in given.items() if n.endswith("_reverse")}
    forward = {n: v for n, v in given.items() if not n.endswith("_reverse")}
    return forward, forward | reverse | {"reverse": True}


def lstm_on_cuda(*args: Any, **kwargs: Any) -> str:
    bound = inspect.signature(reference.lstm).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if lstm_cudnn.is_flipped(given["x"], given["starts"], given["reverse"]):
        return f"a reversed copy of x: {lstm_on_cuda(**{**given, 'reverse': False})}"
    is_zoned = is_with_zoneout("lstm", given)
    if not is_zoned and is_cudnn(given):
        return (
            "cuDNN, through torch: its persistent kernel in float16, for sizes that it supports, "
            "and what would otherwise run the loop over products"
        )
    gpu = recurrence_plan.this_gpu(given["x"].device)
    kernel = recurrence_plan.explain("lstm", gpu, **given)
    return f"{kernel}; {WITHOUT_ROUNDS}" if is_zoned else kernel


def is_by_cudnn(name: str, args: Any, kwargs: Any) -> bool:
    """Whether cuDNN computes a call of `gru` or `rnn`."""
    given = inspect.signature(getattr(reference, name)).bind(*args, **kwargs).arguments
    return gru_cudnn.supports(**given)


def is_cudnn(given: Mapping[str, Any]) -> bool:
    """Whether cuDNN computes a call of `lstm`. given: all of its arguments by name"""
    names = inspect.signature(lstm_cudnn.supports).parameters
    call = {name: given[name] for name in names}
    if not given["training"]:
        call["weight_drop"] = 0.0
    return lstm_cudnn.supports(**call)
