"""Export to ONNX, in which every operator of this package becomes its definition in plain PyTorch.

ONNX has no operators of ours. A program that `torch.export` has traced holds each of them as one
node, and `decompositions` replaces such a node by the operations of `fusedseq.reference`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fusedseq.fused import autograd
from fusedseq.fused.schema import Schema, overload
from fusedseq.reference import dropout_mask


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns {operator: its definition in plain PyTorch}, for
    `torch.export.ExportedProgram.run_decompositions`.

    A result that only a backward pass reads, such as the gates of `lstm`, is an empty tensor: the
    table is for inference. A recurrence becomes its operations for each time step, so that the
    number T of steps must not be dynamic.
    """
    operators = [op for op in autograd._rules if "backward" not in op]
    table = {overload(op): _by_oracle(op, Schema(op)) for op in operators}
    for op in autograd.inferring():
        inference = f"{op}_inference"
        table[overload(inference)] = _by_oracle(op, Schema(inference))
    table[overload("dropout_mask")] = dropout_mask
    return table


def _by_oracle(op: str, schema: Schema) -> Callable[..., Any]:
    """schema: of `op`, or of `<op>_inference`"""
    rule = autograd._rules[op]

    def decomposition(*inputs: Any) -> Any:
        found = rule.by_oracle(dict(zip(rule.schema.inputs, inputs, strict=True)))
        like = next(t for t in inputs if isinstance(t, Tensor))
        outputs = tuple(found.get(name, like.new_empty(0)) for name in schema.outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    return decomposition


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    path: str | None = None,
    *,
    dynamic_shapes: Any = None,
    **options: Any,
) -> Any:
    """Exports a module in eval mode to ONNX by `torch.onnx.export`; returns its ONNXProgram.

    args: example inputs of the module
    path: the file to write; None for none
    dynamic_shapes: as of `torch.export.export`; the time steps of a recurrence must be static
    options: further arguments of `torch.onnx.export`
    Errors: ValueError for a module in training mode, because the random masks of ONNX would not be
    those of this package; ImportError without the packages onnx and onnxscript (the extra "onnx").
    """
    if module.training:
        raise ValueError("onnx.export: module must be in eval mode, got one in training mode")
    with torch.no_grad():
        program = torch.export.export(module, args, dynamic_shapes=dynamic_shapes)
        plain = program.run_decompositions(decompositions())
    return torch.onnx.export(plain, (), path, dynamo=True, **options)
