"""LSTM and attention in ONNX Runtime: one operator of ONNX each, inference only.

The operator LSTM takes the gates in the order i, o, f, g; attention is the operator Attention of
opset 23. Results are written into tensors that are bound once.
"""

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, numpy_helper

OPSET, IR_VERSION = 24, 11


def settings():
    """Returns how ONNX Runtime is run, for the result file."""
    return {"providers": "CPUExecutionProvider", "threads": torch.get_num_threads()}


def reordered(t):
    """Returns rows i, f, g, o of a weight or bias in the order of ONNX: i, o, f, g."""
    i, f, g, o = t.chunk(4)
    return torch.cat([i, o, f, g])


def lstm(x, W_ih, W_hh, b, h0, c0):
    """Returns the node, the constants and the inputs of `reference.lstm`."""
    # ONNX has a bias of the input product and one of the recurrent product.
    biases = torch.cat([reordered(b), torch.zeros_like(b)])
    constants = {"W": reordered(W_ih)[None], "R": reordered(W_hh)[None], "B": biases[None]}
    inputs = {"X": x, "h0": h0[None], "c0": c0[None]}
    (T, B, _), H = x.shape, h0.size(1)
    outputs = {"Y": (T, 1, B, H), "h": (1, B, H), "c": (1, B, H)}
    node = helper.make_node(
        "LSTM", ["X", "W", "R", "B", "", "h0", "c0"], list(outputs), hidden_size=H
    )
    return node, constants, inputs, outputs


def attention(q, k, v, *, causal=False, key_lengths=None):
    """Returns the node, the constants and the inputs of `reference.attention`."""
    inputs = {"q": q, "k": k, "v": v}
    if key_lengths is not None:
        # The operator's own lengths (nonpad_kv_seqlen) shift a causal mask; a mask does not.
        visible = torch.arange(k.size(2)) < key_lengths[:, None, None, None]
        inputs["mask"] = visible.expand(-1, 1, q.size(2), -1)
    node = helper.make_node("Attention", list(inputs), ["out"], is_causal=int(causal))
    return node, {}, inputs, {"out": tuple(q.shape)}


OPERATORS = {"lstm": lstm, "attention": attention}


def supports(case):
    return case.op in OPERATORS and not case.backward


def model(node, constants, inputs, outputs):
    """Returns a model of one node, as ONNX Runtime reads it. outputs: {name: shape}"""
    described = {name: (array.dtype, array.shape) for name, array in inputs.items()}
    described |= {name: (np.dtype("float32"), shape) for name, shape in outputs.items()}
    values = {
        name: helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)
        for name, (dtype, shape) in described.items()
    }
    graph = helper.make_graph(
        [node],
        "operator",
        [values[name] for name in inputs],
        [values[name] for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    made = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    onnx.checker.check_model(made)
    return made.SerializeToString()


class Call:
    """A case as a session of ONNX Runtime."""

    compile_seconds = None

    def __init__(self, case, args, kwargs, cotangents=()):
        node, constants, inputs, outputs = OPERATORS[case.op](*args, **kwargs)
        constants, inputs = (
            {name: np.ascontiguousarray(t.detach().numpy()) for name, t in tensors.items()}
            for tensors in (constants, inputs)
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
        self.session = onnxruntime.InferenceSession(
            model(node, constants, inputs, outputs), options, providers=["CPUExecutionProvider"]
        )
        self.outputs = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(np.empty(shape, np.float32))
            for name, shape in outputs.items()
        }
        self.binding = self.session.io_binding()
        for name, array in inputs.items():
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            self.binding.bind_ortvalue_input(name, value)
        for name, value in self.outputs.items():
            self.binding.bind_ortvalue_output(name, value)
        self.op = case.op

    def __call__(self):
        self.session.run_with_iobinding(self.binding)

    def results(self):
        """Returns the results as tensors in the layout of the fused operator."""
        self()
        arrays = [torch.tensor(value.numpy()) for value in self.outputs.values()]
        if self.op == "attention":
            return arrays
        y, h, c = arrays
        return [y[:, 0], h[0], c[0]]
