"""Calls of `gru`, `rnn` and `lstm` that cuDNN computes, with torch's recurrences on the CPU in its
place: what it is given, what is made of its results, and which calls it is not given.
"""

import pytest
import torch
from fusedseq import fused, reference, testing
from fusedseq.fused import autograd, cudnn_recurrence, lstm_cudnn
from fusedseq.testing import hidden_state_case, lstm_case

pytestmark = pytest.mark.cpu
CASES = [case for case in testing.CASES if case.op in ("gru", "rnn")]
CASES += [lstm_case(5, 4, 6, 5), lstm_case(4, 3, 5, 7, bias=False)]
OPS = pytest.mark.parametrize("op", ["gru", "rnn", "lstm"])
FUNCTIONS = {
    cudnn_recurrence.RELU: torch.rnn_relu,
    cudnn_recurrence.TANH: torch.rnn_tanh,
    cudnn_recurrence.LSTM: torch.lstm,
    cudnn_recurrence.GRU: torch.gru,
}


class Cudnn:
    """`_cudnn_rnn` and its backward on the CPU, as strict as they are on CUDA.

    calls: the arguments of each call of `forward`, by name
    precisions: of products in fp32, as they were set in each call
    """

    def __init__(self):
        aten = torch.ops.aten
        self.names = [a.name for a in aten._cudnn_rnn.default._schema.arguments]
        self.names_of_backward = [
            a.name for a in aten._cudnn_rnn_backward.default._schema.arguments
        ]
        self.calls, self.precisions = [], []

    def compute(self, a, x, hx, cx, weights):
        tensors = [t for t in (x, hx, cx, *weights) if t is not None]
        assert all(t.is_contiguous() for t in tensors)
        self.precisions.append(torch.backends.cudnn.rnn.fp32_precision)
        state = hx if cx is None else (hx, cx)
        options = len(weights) == 4, a["num_layers"], a["dropout"], a["train"], a["bidirectional"]
        return FUNCTIONS[a["mode"]](x, state, weights, *options, a["batch_first"])

    def forward(self, *values):
        a = dict(zip(self.names, values, strict=True))
        self.calls.append(a)
        assert (a["cx"] is not None) == (a["mode"] == cudnn_recurrence.LSTM)
        y, h, *c = self.compute(a, a["input"], a["hx"], a["cx"], a["weight"])
        return y, h, *(c or [h.new_empty(0)]), torch.zeros(2), torch.zeros(2)

    def backward(self, *values):
        a = dict(zip(self.names_of_backward, values, strict=True))
        if not a["train"]:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        assert not a["reserve"].any(), "an earlier backward has written to it"
        a["reserve"].fill_(1.0)
        tensors = [a["input"], a["hx"], *([] if a["cx"] is None else [a["cx"]]), *a["weight"]]
        with torch.enable_grad():
            x, hx, *others = (t.detach().requires_grad_() for t in tensors)
            cx = others.pop(0) if a["cx"] is not None else None
            found = self.compute(a, x, hx, cx, others)
            upstream = a["grad_output"], a["grad_hy"], a["grad_cy"]
            pairs = [(y, g) for y, g in zip(found, upstream, strict=False) if g is not None]
            inputs = [x, hx, *([] if cx is None else [cx]), *others]
            outputs, grads = [y for y, _ in pairs], [g for _, g in pairs]
            dx, dh, *d = torch.autograd.grad(outputs, inputs, grads, materialize_grads=True)
        dc = d.pop(0) if cx is not None else None
        return dx, dh, dc, d if a["output_mask"][3] else []


@pytest.fixture
def cudnn(monkeypatch):
    """cuDNN, which computes what it would compute on a GPU, in fp64 too."""
    found = Cudnn()
    monkeypatch.setattr(torch.ops.aten, "_cudnn_rnn", found.forward)
    monkeypatch.setattr(torch.ops.aten, "_cudnn_rnn_backward", found.backward)
    monkeypatch.setattr(cudnn_recurrence, "accepts", lambda x: True)
    monkeypatch.setattr(lstm_cudnn, "supports", lambda *_: True)
    monkeypatch.setattr(autograd, "call_if_valid", lambda *_: NotImplemented)  # of calls on a CPU
    return found


def inputs(op, T=5, lengths=None, **options):
    """(tensors in fp64 that need a gradient, options)"""
    case = lstm_case(T, 4, 6, 5) if op == "lstm" else hidden_state_case(op, T, 4, 6, 5)
    tensors, _ = testing.convert(case.inputs(), dtype=torch.float64)
    options |= {} if lengths is None else {"lengths": torch.tensor(lengths)}
    return [t.requires_grad_() for t in tensors], options


def results(function, tensors, options):
    y, state = function(*tensors, **options)
    return [y, *(state if isinstance(state, tuple) else (state,))]


def loss_of(function, tensors, options):
    return sum(t.sin().sum() for t in results(function, tensors, options))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients_are_those_of_the_oracle(cudnn, case):
    args, options = case.inputs()
    testing.check(case.op, args, options)
    is_not = options.get("starts") is not None or options.get("zoneout_h") or args[0].size(1) == 0
    is_not = is_not or (options.get("relu") and options.get("lengths") is not None)
    is_not = is_not or (options.get("weight_drop") and options.get("training", True))
    assert len(cudnn.calls) == (not is_not)


@OPS
def test_a_gradient_does_not_need_training(cudnn, op):
    """`training` is about the weight drop alone."""
    tensors, options = inputs(op, training=False, weight_drop=0.5, seed=3)
    found = torch.autograd.grad(loss_of(getattr(fused, op), tensors, options), tensors)
    wanted = torch.autograd.grad(loss_of(getattr(reference, op), tensors, options), tensors)
    assert cudnn.calls
    torch.testing.assert_close(found, wanted)


@OPS
@pytest.mark.parametrize("lengths", [None, [3, 0, 5, 1]], ids=str)
def test_second_derivatives_are_those_of_the_oracle(cudnn, op, lengths):
    tensors, options = inputs(op, lengths=None if op == "lstm" else lengths)
    found = []
    for module in (fused, reference):
        loss = loss_of(getattr(module, op), tensors, options)
        first = torch.autograd.grad(loss, tensors, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), tensors)
        found.append((first, second))
    assert cudnn.calls
    torch.testing.assert_close(*found)


@OPS
def test_a_graph_can_be_differentiated_twice(cudnn, op):
    tensors, options = inputs(op)
    loss = loss_of(getattr(fused, op), tensors, options)
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, tensors), first)


@OPS
@pytest.mark.parametrize("needed", [0, 2, 3, 4])
def test_a_gradient_of_one_tensor_alone(cudnn, op, needed):
    tensors, options = inputs(op)
    tensors = [t.detach() for t in tensors]
    tensors[needed].requires_grad_()
    one = tensors[needed]
    (found,) = torch.autograd.grad(loss_of(getattr(fused, op), tensors, options), one)
    (wanted,) = torch.autograd.grad(loss_of(getattr(reference, op), tensors, options), one)
    torch.testing.assert_close(found, wanted)


@OPS
def test_cudnn_saves_nothing_where_no_gradient_follows(cudnn, op):
    tensors, options = inputs(op)
    with torch.no_grad():
        getattr(fused, op)(*tensors, **options)
    getattr(fused, op)(*(t.detach() for t in tensors), **options)
    getattr(fused, op)(*tensors, **options)
    assert [call["train"] for call in cudnn.calls] == [False, False, True]


@OPS
def test_products_in_fp32_are_not_rounded_to_tf32(cudnn, op):
    rnn, matmul = torch.backends.cudnn.rnn, torch.backends.cuda.matmul
    before = rnn.fp32_precision, matmul.fp32_precision
    tensors, options = inputs(op)
    tensors = [t.detach().float().requires_grad_() for t in tensors]
    try:
        rnn.fp32_precision, matmul.fp32_precision = "tf32", "none"
        torch.autograd.grad(loss_of(getattr(fused, op), tensors, options), tensors)
    finally:
        rnn.fp32_precision, matmul.fp32_precision = before
    assert cudnn.precisions == ["ieee", "ieee"]


@pytest.mark.parametrize("op", ["gru", "rnn"])
def test_inputs_need_not_be_contiguous(cudnn, op):
    tensors, options = inputs(op)
    others = [t.detach().mT.contiguous().mT if t.dim() > 1 else t for t in tensors]
    found = results(getattr(fused, op), others, options)
    assert cudnn.calls
    torch.testing.assert_close(found, results(getattr(reference, op), tensors, options))


@pytest.mark.parametrize("op", ["gru", "rnn"])
def test_compiled_code_has_the_registered_operator(cudnn, op):
    """And neither a break in its graph nor the operations of each step."""
    nodes = []

    def backend(graph, _):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    function = getattr(fused, op)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    tensors, options = inputs(op, T=20)
    found = results(compiled, tensors, options)
    assert not cudnn.calls
    assert any(f"fusedseq.{op}" in name for name in nodes)
    assert len(nodes) < 20
    torch.testing.assert_close(found, results(getattr(reference, op), tensors, options))


@pytest.mark.parametrize("op", ["gru", "rnn"])
def test_transforms_do_not_meet_cudnn(cudnn, op):
    tensors, options = inputs(op)
    tensors = [t.detach() for t in tensors]
    positions = tuple(range(len(tensors)))

    def gradients(function):
        return torch.func.grad(lambda *ts: loss_of(function, ts, options), positions)(*tensors)

    torch.testing.assert_close(gradients(getattr(fused, op)), gradients(getattr(reference, op)))
    assert not cudnn.calls


def test_what_lies_behind_a_length_does_not_overflow(cudnn):
    """The state of ReLUs grows with each step; cuDNN would compute those past a length, too."""
    T, H = 300, 3
    x, h0 = torch.randn(T, 2, H), torch.ones(2, H)
    W_ih, W_hh = torch.randn(H, H), (3 * torch.eye(H)).requires_grad_()
    y, _ = fused.rnn(x, W_ih, W_hh, None, h0, lengths=[2, 3], relu=True)
    (dW,) = torch.autograd.grad(y.sum(), W_hh)
    assert dW.isfinite().all()
    assert not cudnn.calls


@pytest.mark.parametrize("op", ["gru", "rnn"])
def test_no_steps_are_rejected_before_cudnn(cudnn, op):
    tensors, options = inputs(op)
    with pytest.raises(ValueError, match=rf"^{op}: x must be .* at least 1, got \(0, 4, 6\)"):
        getattr(fused, op)(tensors[0][:0], *tensors[1:], **options)
    assert not cudnn.calls


@pytest.mark.parametrize("op", ["gru", "rnn"])
def test_what_cudnn_is_not_given(cudnn, monkeypatch, op):
    tensors, options = inputs(op)
    wanted = results(getattr(reference, op), tensors, options)
    with monkeypatch.context() as patch:
        patch.setenv("FUSEDSEQ_RECURRENCE", "loop")
        torch.testing.assert_close(results(getattr(fused, op), tensors, options), wanted)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        torch.testing.assert_close(results(getattr(fused, op), tensors, options), wanted)
    assert not cudnn.calls
