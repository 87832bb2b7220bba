"""Recurrences with weights in 8 bits: their kernels, and which calls run them."""

import copy

import pytest
import torch
from fusedseq import fused, nn
from fusedseq.fused import check, int8_weight
from fusedseq.quantization import Int8Weight, quantize_

from tests.support import direct_calls
from tests.support.rounded_weights import weight, with_rounded_weights

pytestmark = pytest.mark.cpu
RECURRENCES = {
    "lstm": lambda: nn.LSTM(9, 12, 2),
    "whole vectors": lambda: nn.LSTM(128, 80),
    "whole vectors and a rest": lambda: nn.LSTM(70, 133, bias=False),
    "bidirectional": lambda: nn.LSTM(9, 12, bidirectional=True),
    "zoneout": lambda: nn.LSTM(9, 12, zoneout_h=0.3, zoneout_c=0.2),
    "peephole": lambda: nn.PeepholeLSTM(9, 12, zoneout_c=0.2),
    "layer-normalized": lambda: nn.LayerNormLSTM(9, 12),
    "gru": lambda: nn.GRU(9, 70, 2),
    "gru with zoneout": lambda: nn.GRU(9, 12, zoneout_h=0.2),
    "layer-normalized gru": lambda: nn.LayerNormGRU(9, 12),
    "rnn": lambda: nn.RNN(70, 12, nonlinearity="relu"),
    "mogrifier": lambda: nn.MogrifierLSTM(9, 12, 2, rounds=5),
    "wide mogrifier": lambda: nn.MogrifierLSTM(66, 128, rounds=4),
    "low rank": lambda: nn.MogrifierLSTM(
        9, 12, rounds=3, rank=2, mogrifier_bias=True, zoneout_h=0.1, zoneout_c=0.2
    ),
    "shared rounds": lambda: nn.MogrifierLSTM(
        12, 12, 3, rounds=4, share_rounds=True, cap_input_gate=True, residual=True
    ),
}
# One step and more, of so few rows that they are multiplied by dot products, of more, and of more
# than one chunk of them.
SIZES = [(1, 1), (1, 8), (1, 9), (1, 150), (4, 1), (4, 3), (20, 8), (4, 20)]


@pytest.mark.parametrize("element", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize(("T", "B"), SIZES)
def test_a_recurrence_computes_with_the_rounded_weights(name, T, B, element):
    torch.manual_seed(0)
    model = RECURRENCES[name]().eval().to(element)
    quantized = copy.deepcopy(model)
    rounded = quantize_(quantized)
    matrices = [n for n, p in model.named_parameters() if p.dim() > 1 and "bias" not in n]
    assert rounded == matrices
    x = torch.randn(T, B, model.input_size).to(element)
    exact = with_rounded_weights(model, quantized)
    with torch.no_grad():
        for lengths in (None, [T - 1] * B):
            found, state = quantized(x, lengths=lengths)
            wanted, last = exact(x, lengths=lengths)
            assert found.dtype == element
            # The rounded weights of the other model are rounded to 16 bits once more.
            error = T * torch.finfo(element).eps
            close = {} if element == torch.float32 else {"rtol": error, "atol": error}
            torch.testing.assert_close((found, state), (wanted, last), **close)


def test_a_recurrence_does_not_depend_on_the_threads():
    torch.manual_seed(0)
    model = nn.MogrifierLSTM(65, 130, rounds=3).eval()
    quantize_(model)
    threads = torch.get_num_threads()
    try:
        for T, B in ((1, 3), (5, 2), (3, 20)):
            x, found = torch.randn(T, B, 65), []
            for n in (1, 2, 3):
                torch.set_num_threads(n)
                with torch.no_grad():
                    found.append(model(x)[0])
            assert torch.equal(found[0], found[1])
            assert torch.equal(found[0], found[2])
    finally:
        torch.set_num_threads(threads)


def test_what_reads_the_weights_as_they_are(monkeypatch):
    """Inference does, at any sizes; other calls convert the weights."""
    called = []
    call = int8_weight.call
    monkeypatch.setattr(
        int8_weight, "call", lambda op, *given: called.append(op) or call(op, *given)
    )
    W_ih, W_hh = (Int8Weight.from_float(weight(16, n)) for n in (3, 4))

    def calls(T, B, W_hh=W_hh, element=torch.float32, grad=False, **options):
        called.clear()
        x, c = torch.zeros(T, B, 3, dtype=element), torch.zeros(B, 4, dtype=element)
        h = torch.zeros(B, 4, dtype=element, requires_grad=grad)
        fused.lstm(x, W_ih.to(element), W_hh.to(element), None, h, c, **options)
        return called

    assert calls(1, 1) == ["lstm"]
    assert calls(5, 20) == ["lstm"]
    assert calls(1, 1, element=torch.bfloat16) == ["lstm"]
    assert calls(1, 1, weight_drop=0.5, training=False) == ["lstm"]
    assert calls(1, 1, zoneout_h=0.5, training=False) == ["mogrifier_lstm"]
    assert calls(1, 1, zoneout_h=0.5, training=True) == []
    assert calls(1, 1, weight_drop=0.5, training=True) == []
    assert calls(1, 1, grad=True) == []
    assert calls(1, 1, W_hh.dequantize()) == []
    assert calls(1, 1, element=torch.float64) == []


@pytest.mark.parametrize(
    "name", ["lstm", "layer-normalized", "gru", "layer-normalized gru", "rnn", "wide mogrifier"]
)
def test_the_operator_alone_checks_a_call_without_masks(monkeypatch, name):
    """The checks in Python, which take longer than a small product, run only if it refuses."""

    def refuse(op, *_):
        raise AssertionError(f"the arguments of {op} were checked in Python")

    model = RECURRENCES[name]().eval()
    quantize_(model)
    for function in ("tensor", "shape"):
        monkeypatch.setattr(check, function, refuse)
    x = torch.randn(2, 3, model.input_size)
    with torch.no_grad():
        model(x)
    with pytest.raises(AssertionError, match="checked in Python"), torch.no_grad():
        model(x.double())


INT8_CALLS = list(direct_calls.recurrences_in_8_bits())


@pytest.mark.parametrize(("op", "call"), INT8_CALLS, ids=[op for op, _ in INT8_CALLS])
def test_opcheck_of_a_recurrence(op, call):
    operator = getattr(torch.ops.fusedseq, op)
    names = [a.name for a in operator.default._schema.arguments]
    torch.library.opcheck(
        operator, [call[n] for n in names], test_utils=("test_schema", "test_faketensor")
    )


def test_the_registered_recurrences_guard_their_memory():
    op, call = INT8_CALLS[0]
    operator = getattr(torch.ops.fusedseq, op)
    for wrong, message in (
        ({"W_hh_scale": call["W_hh_scale"][:-1]}, r"W_hh_scale must be \(16,\), got \(15,\)"),
        ({"W_ih_scale": call["W_ih_scale"].double()}, "W_ih_scale must be float32"),
        ({"W_hh": call["W_hh"].float()}, "W_hh must be int8"),
        ({n: call[n].double() for n in ("x", "b", "h0", "c0")}, "fp32 or bf16 .* got fp64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            operator(**{**call, **wrong})


def test_a_weight_that_no_round_uses_is_not_read():
    call = dict(INT8_CALLS)["mogrifier_lstm_int8"]
    unused = {"rounds": 0, "Q": torch.zeros((), dtype=torch.int8), "Q_factor": None}
    assert torch.ops.fusedseq.mogrifier_lstm_int8(**{**call, **unused})[0].isfinite().all()


@pytest.mark.parametrize("name", ["lstm", "gru", "low rank"])
def test_a_traced_recurrence_calls_its_kernel(name):
    torch.manual_seed(0)
    model = RECURRENCES[name]().eval()
    quantize_(model)
    x, targets = torch.randn(3, 2, 9), []

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        found = torch.compile(model, backend=backend, fullgraph=True)(x)
        torch.testing.assert_close(found, model(x))
    assert any(target.endswith("_int8.default") for target in targets)


@pytest.mark.parametrize("name", ["lstm", "gru", "low rank"])
def test_an_exported_program_keeps_a_recurrence(name):
    torch.manual_seed(0)
    model, x = RECURRENCES[name]().eval(), torch.randn(3, 2, 9)
    quantize_(model)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        assert torch.equal(program.module()(x)[0], model(x)[0])
    assert any(str(node.target).endswith("_int8.default") for node in program.graph.nodes)
