"""Times an operator beside the same call in JAX and ONNX Runtime, and in torch where it has one."""

import torch
from fusedseq import fused, testing

from bench.peers import installed, turns
from bench.suite import baselines, roofline

# A peer's result may differ from ours by this part of the tensor's largest element.
TOLERANCE = 1e-4
TORCH = {"lstm": baselines.lstm, "attention": baselines.attention}


def measure(case, peers, measuring_seconds):
    """Returns the row of a case in the result file.

    peers: {name: module} of the peers that are timed
    Errors: ValueError if a peer's results or gradients differ from ours
    """
    args, kwargs = case.inputs("cpu")
    functions = {"fused": getattr(fused, case.op)}
    if case.op in TORCH:
        functions["torch"] = TORCH[case.op]
    expected = testing.run(functions["fused"], args, kwargs, None if case.backward else [])
    cotangents = testing.cotangents(expected[0])
    calls = {
        name: roofline.bind(function, args, kwargs, case.backward)
        for name, function in functions.items()
    }
    differences, compile_seconds = {}, {}
    for name, peer in peers.items():
        if not peer.supports(case):
            continue
        calls[name] = peer.Call(case, args, kwargs, cotangents)
        differences[name] = check(name, case, calls[name].results(), [*expected[0], *expected[1]])
        if calls[name].compile_seconds is not None:
            compile_seconds[name] = calls[name].compile_seconds
    return {
        "name": case.name,
        "op": case.op,
        "mode": case.mode,
        "dtype": str(case.dtype)[6:],
        "difference": differences,
        "compile seconds": compile_seconds,
        "flops": case.flops * (3 if case.backward else 1),
        **turns.timed(calls, measuring_seconds),
    }


def difference(got, expected):
    """Returns the largest difference over the tensors, each as a part of its largest element; NaN
    if one is.
    """
    assert len(got) == len(expected)
    parts = []
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape, (a.shape, b.shape)
        scale = b.abs().max().clamp(min=torch.finfo(b.dtype).tiny)
        parts.append(float((a - b).abs().max() / scale))
    return torch.tensor(parts).max().item()


def check(peer, case, got, expected):
    """Returns `difference`. Errors: ValueError if it is above TOLERANCE or not a number."""
    found = difference(got, expected)
    if not found <= TOLERANCE:
        raise ValueError(
            f"{case.name}: {installed.title(peer)} must agree with fused.{case.op} within "
            f"{TOLERANCE:g} of the largest element, got a difference of {found:.2g}"
        )
    return found
