"""The recurrences on CUDA, as far as no GPU is needed: accepted dtypes, shapes of saved tensors,
the choice of kernels.

The kernels themselves run on a simulated GPU: tests/simt/test_simt_recurrence.py,
test_simt_persistent.py.
"""

import re
from importlib import import_module

import pytest
import torch
from fusedseq import _load, fused, testing
from fusedseq.fused import cudnn_recurrence, lstm_cudnn, recurrence_plan
from fusedseq.testing import (
    convert,
    differentiable,
    hidden_state_case,
    lstm_case,
    lstm_with_vectors_case,
    mogrifier_lstm_case,
    mogrifier_lstm_pair_case,
    projected_lstm_case,
    run,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

HALF = torch.float16
CASES = {
    "lstm": lstm_case(3, 2, 5, 7),
    "mogrifier_lstm": mogrifier_lstm_case(3, 2, 5, 7, 5),
    "of low rank": mogrifier_lstm_case(3, 2, 5, 7, 4, rank=2),
}
needs_cuda_code = pytest.mark.skipif(
    not _load.build_info()["nvcc"], reason="this build has no CUDA in it"
)


def on_cuda(case, dtype):
    """Returns the inputs of a case as CUDA tensors without data. Called within a FakeTensorMode."""

    def move(t):
        return torch.empty(
            t.shape, dtype=dtype if t.is_floating_point() else t.dtype, device="cuda"
        )

    return tree_map_only(torch.Tensor, move, case.inputs())


@pytest.mark.parametrize(
    "case",
    [case for case in testing.CASES if case.op == "projected_lstm"],
    ids=lambda case: case.id,
)
def test_a_projected_lstm_is_computed_by_an_lstm_where_it_has_no_kernel(monkeypatch, case):
    monkeypatch.setattr(import_module("fusedseq.fused.projected_lstm"), "DEVICES", set())
    args, kwargs = testing.convert(case.inputs(), dtype=torch.float64)
    testing.check("projected_lstm", args, kwargs)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"H": 1024, "B": 128, "X": 1152}, True),
        ({"capability": (8, 0)}, True),
        ({"dtype": torch.bfloat16}, False),
        ({"dtype": torch.float32}, False),
        ({"capability": (8, 6)}, False),
        ({"capability": (7, 0)}, False),
        ({"H": 1152}, False),
        ({"H": 650}, False),
        ({"X": 650}, False),
        ({"B": 20}, False),
        ({"B": 136}, False),
        ({"B": 0}, False),
    ],
    ids=str,
)
def test_sizes_that_cudnn_s_persistent_kernel_accepts(change, taken):
    call = {"dtype": HALF, "capability": (9, 0), "B": 64, "X": 256, "H": 512}
    assert lstm_cudnn.has_persistent_kernel(**call | change) == taken


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"lengths": torch.zeros(8)}, False),
        ({"weight_drop": 0.5}, False),
        ({"b": None}, True),
        ({"h0": "transposed"}, False),
        ({"x": torch.zeros(3, 0, 128)}, False),
        ({"starts": torch.zeros(3, 8, dtype=torch.bool)}, False),
        ({"reverse": True}, False),
    ],
)
def test_a_call_with_options_that_cudnn_lacks_does_not_go_to_cudnn(monkeypatch, change, taken):
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda x: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    shapes = {
        "x": (3, 8, 128),
        "W_ih": (512, 128),
        "W_hh": (512, 128),
        "b": (512,),
        "h0": (8, 128),
        "c0": (8, 128),
    }
    with FakeTensorMode():
        call = {
            name: torch.empty(shape, dtype=HALF, device="cuda") for name, shape in shapes.items()
        }
        if "h0" in change:
            change = {"h0": torch.empty(128, 8, dtype=HALF, device="cuda").T}
        if "x" in change:
            change = {"x": torch.empty(3, 0, 128, dtype=HALF, device="cuda")}
        assert (
            lstm_cudnn.supports(**{**call, "lengths": None, "weight_drop": 0.0, **change}) == taken
        )


SMALL_GPU, H200 = (20, 232448, True), (132, 232448, True)


@pytest.mark.parametrize(
    ("own", "gpu", "cudnn", "taken"),
    [
        (torch.float32, SMALL_GPU, 91002, True),
        (torch.float32, H200, 91002, False),
        (HALF, SMALL_GPU, 91002, True),
        (torch.bfloat16, SMALL_GPU, 91300, True),
        (torch.bfloat16, SMALL_GPU, 91002, False),
        (torch.bfloat16, H200, 91300, False),
        (torch.float64, H200, 91300, False),
    ],
    ids=str,
)
def test_what_would_run_the_loop_goes_to_cudnn(monkeypatch, own, gpu, cudnn, taken):
    """H 650 fits into the shared memory of an H200 and not into that of 20 multiprocessors."""
    backend = torch.backends.cudnn
    monkeypatch.setattr(backend, "is_acceptable", lambda x: x.dtype != torch.bfloat16)
    monkeypatch.setattr(backend, "is_available", lambda: True)
    monkeypatch.setattr(backend, "version", lambda: cudnn)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(recurrence_plan, "this_gpu", lambda device: gpu)
    with FakeTensorMode():
        (x, W_ih, W_hh, b, h0, c0), _ = on_cuda(lstm_case(70, 20, 650, 650), own)
        call = x, W_ih, W_hh, b, h0, c0, None, 0.0
        assert lstm_cudnn.supports(*call) == taken
        monkeypatch.setenv("FUSEDSEQ_RECURRENCE", "loop")
        assert not lstm_cudnn.supports(*call)
        monkeypatch.delenv("FUSEDSEQ_RECURRENCE")
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert not lstm_cudnn.supports(*call)


@pytest.mark.parametrize(
    ("own", "matmul", "inside"),
    [(torch.float32, "none", "ieee"), (torch.float32, "tf32", "tf32"), (HALF, "none", "tf32")],
    ids=str,
)
def test_cudnn_rounds_to_tf32_only_where_products_do(own, matmul, inside):
    rnn = torch.backends.cudnn.rnn
    before = rnn.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    try:
        rnn.fp32_precision, torch.backends.cuda.matmul.fp32_precision = "tf32", matmul
        with cudnn_recurrence.products_of(own):
            assert rnn.fp32_precision == inside
        assert rnn.fp32_precision == "tf32"
    finally:
        rnn.fp32_precision, torch.backends.cuda.matmul.fp32_precision = before


@needs_cuda_code
@pytest.mark.parametrize("own", [torch.float32, torch.float64, torch.bfloat16, HALF], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_dtypes_and_sizes_of_saved_tensors(case, own):
    case = CASES[case]
    with FakeTensorMode():
        args, kwargs = on_cuda(case, own)
        if case.op == "lstm":
            found = torch.ops.fusedseq.lstm(args[0], None, False, *args[1:], None, None, 0.0, False)
        else:
            Q, R = ((w, None) if isinstance(w, torch.Tensor) else w for w in args[6:8])
            seed = torch.zeros((), dtype=torch.int64, device="cuda")
            found = torch.ops.fusedseq.mogrifier_lstm(
                args[0],
                None,
                False,
                *args[1:6],
                None,
                *Q,
                *R,
                None,
                None,
                seed,
                kwargs["rounds"],
                False,
                True,
                0.0,
                0.0,
                0.0,
                0.0,
                False,
            )
    computing = torch.float64 if own == torch.float64 else torch.float32
    assert [t.dtype for t in found[:6]] == [own, own, own, own, computing, own][: len(found)]
    assert [t.numel() for t in found[6:]] == [0] * (len(found) > 6)


def without_cudnn(monkeypatch):
    """As in a torch for the CPU. A torch for CUDA asks the GPU whether cuDNN supports it, and there
    may be none.
    """
    monkeypatch.setattr(
        import_module("fusedseq.fused.explain_cuda"), "is_cudnn", lambda given: False
    )


MAKERS = {
    "lstm": lstm_case,
    "mogrifier_lstm": mogrifier_lstm_case,
    "projected_lstm": projected_lstm_case,
}


def explained(monkeypatch, op, T, B, X, H, dtype, gpu=(132, 232448, True), **options):
    """What `explain` says of this package's kernels on such a GPU."""
    monkeypatch.setattr(recurrence_plan, "this_gpu", lambda device: gpu)
    without_cudnn(monkeypatch)
    with FakeTensorMode():
        case = MAKERS[op](T, B, X, H, **options)
        return fused.explain(op, *on_cuda(case, dtype)[0], **on_cuda(case, dtype)[1])


@needs_cuda_code
@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (
            ("lstm", 70, 20, 650, 650, torch.bfloat16),
            "persistent_forward.cu.*forward 130 blocks of 5 units, 1 group",
        ),
        (
            ("lstm", 70, 20, 650, 650, torch.float32),
            "persistent_forward.cu.*forward 130 blocks of 5 units, 1 group",
        ),
        (
            ("lstm", 70, 20, 650, 650, torch.float64),
            "loop.cu.*not persistent: .*float32, bfloat16 and float16",
        ),
        (
            ("lstm", 70, 512, 650, 650, torch.bfloat16),
            "persistent_forward.cu.*forward 3 launches of 2 x 65 blocks of 10 units, 2 groups",
        ),
        (("lstm", 3, 20, 650, 650, torch.bfloat16), "loop.cu.*fewer than 4 steps"),
        (("lstm", 70, 20, 650, 650, torch.bfloat16, (20, 232448, True)), "loop.cu.*hold"),
        (
            ("lstm", 70, 20, 650, 650, torch.bfloat16, (132, 232448, False)),
            "loop.cu.*no cooperative",
        ),
    ],
    ids=str,
)
def test_explain_names_the_kernels(monkeypatch, call, wanted):
    assert re.search(rf"on cuda, \w+: csrc/cuda/recurrence/{wanted}", explained(monkeypatch, *call))


@needs_cuda_code
def test_explain_names_the_lstm_that_computes_a_projected_one(monkeypatch):
    size = 70, 20, 400, 650, torch.bfloat16
    text = explained(monkeypatch, "projected_lstm", *size, P=200)
    assert re.search(r"a call of lstm, .*persistent_forward.cu.*forward 130 blocks of 5", text)


@needs_cuda_code
def test_explain_describes_the_layout_of_a_mogrifier(monkeypatch):
    text = explained(
        monkeypatch,
        "mogrifier_lstm",
        *(70, 20, 768, 768, torch.bfloat16),
        gpu=(108, 166912, True),
        rounds=5,
    )
    assert re.search(r"only in backward .*; forward \S+/loop.cu; backward 96 blocks", text)
    size = 70, 20, 1150, 1150, torch.bfloat16
    text = explained(monkeypatch, "mogrifier_lstm", *size, rounds=5)
    assert re.search(
        r"forward 128 blocks of 9 units and 9 inputs, .* 7 steps along K of W_ih in registers; ",
        text,
    )
    monkeypatch.setenv("FUSEDSEQ_RECURRENCE", "loop")
    assert "FUSEDSEQ_RECURRENCE is loop" in explained(
        monkeypatch, "mogrifier_lstm", *size, rounds=5
    )


REVERSED = r"a reversed copy of x: \S+persistent_forward.cu"
ORDERED = {"starts": [(1, 0)]}, {"reverse": True}


CELLS = r"persistent_cells.cu: the weights stay"


@needs_cuda_code
@pytest.mark.parametrize("options", ORDERED, ids=str)
def test_another_order_has_kernels_of_its_own(monkeypatch, options):
    """But an LSTM with `reverse` alone computes a reversed copy, and rounds run the loop."""
    monkeypatch.setattr(recurrence_plan, "this_gpu", lambda device: (132, 232448, True))
    without_cudnn(monkeypatch)
    loop = r"loop.cu.*with rounds have neither `starts` nor `reverse`"
    for case, wanted in (
        (lstm_case(70, 20, 650, 650, **options), CELLS if "starts" in options else REVERSED),
        (mogrifier_lstm_case(70, 20, 650, 650, 5, **options), loop),
        (mogrifier_lstm_case(70, 20, 650, 650, 0, **options), CELLS),
        (lstm_with_vectors_case("peephole_lstm", 70, 20, 650, 650, **options), CELLS),
    ):
        with FakeTensorMode():
            args, kwargs = on_cuda(case, torch.bfloat16)
            text = fused.explain(case.op, *args, **kwargs)
        assert re.search(wanted, text)


@needs_cuda_code
def test_an_lstm_with_zoneout_runs_the_kernels_of_a_mogrifier_lstm(monkeypatch):
    """And not cuDNN, where it would compute the call without zoneout."""
    monkeypatch.setattr(recurrence_plan, "this_gpu", lambda device: (132, 232448, True))
    monkeypatch.setattr(
        import_module("fusedseq.fused.explain_cuda"), "is_cudnn", lambda given: True
    )
    for zoneout, wanted in (({}, "cuDNN"), ({"zoneout_c": 0.1}, "mogrifier_lstm without rounds")):
        for reverse in (False, True):
            case = lstm_case(70, 16, 128, 128, reverse=reverse, **zoneout)
            with FakeTensorMode():
                args, kwargs = on_cuda(case, HALF)
                text = fused.explain("lstm", *args, **kwargs)
            assert wanted in text
            assert ("reversed copy" in text) == reverse


@needs_cuda_code
@pytest.mark.parametrize(
    ("op", "wanted"), [("peephole_lstm", "persistent_cells.cu"), ("layer_norm_lstm", "loop.cu")]
)
def test_explain_names_the_kernels_of_other_lstm_cells(monkeypatch, op, wanted):
    monkeypatch.setattr(recurrence_plan, "this_gpu", lambda device: (132, 232448, True))
    with FakeTensorMode():
        args, kwargs = on_cuda(lstm_with_vectors_case(op, 4, 3, 5, 6), HALF)
        assert wanted in fused.explain(op, *args, **kwargs)
        y, (h, c) = getattr(fused, op)(*args, **kwargs)
    assert [(t.shape, t.dtype) for t in (y, h, c)] == [((4, 3, 6), HALF), *[((3, 6), HALF)] * 2]


@needs_cuda_code
@pytest.mark.parametrize("op", ["gru", "rnn"])
def test_cudnn_computes_a_gru_that_it_can(monkeypatch, op):
    """Also in reverse and with lengths; not with `starts`, zoneout or a weight drop, whose mask is
    fusedseq's, and not in dtypes that torch does not give to cuDNN."""
    monkeypatch.setattr(recurrence_plan, "this_gpu", lambda device: (132, 232448, True))
    own = "persistent_cells.cu" if op == "gru" else "loop.cu"
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda x: True)
    options = {"lengths": [3, 0, 5, 1], "reverse": True}
    drop = {"weight_drop": 0.3, "seed": 3}

    def explained(dtype=HALF, **options):
        with FakeTensorMode():
            args, kwargs = on_cuda(hidden_state_case(op, 5, 4, 6, 5, **options), dtype)
            return fused.explain(op, *args, **kwargs)

    assert "cuDNN" in explained()
    assert "cuDNN" in explained(**options)
    assert "cuDNN" in explained(torch.float32, **options)
    assert "cuDNN" in explained(**options, **drop, training=False)
    assert own in explained(**options, **drop)
    assert "loop.cu" in explained(torch.float64)
    if op == "rnn":
        assert "cuDNN" in explained(relu=True)
        assert "loop.cu" in explained(relu=True, lengths=[3, 0, 5, 1])
    assert own in explained(**options, starts=[(1, 0)])
    assert own in explained(**options, zoneout_h=0.1)
    monkeypatch.setenv("FUSEDSEQ_RECURRENCE", "loop")
    assert "loop.cu" in explained()
    monkeypatch.delenv("FUSEDSEQ_RECURRENCE")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert own in explained()


def call_with_two_layers(monkeypatch, function, dtype, H=650, gpu=(132, 232448, True), **options):
    monkeypatch.setattr(recurrence_plan, "this_gpu", lambda device: gpu)
    with FakeTensorMode():
        args, kwargs = on_cuda(mogrifier_lstm_pair_case(70, 20, 30, H, H, 5, 5, **options), dtype)
        return function(args, kwargs)


@needs_cuda_code
@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (
            {"dtype": torch.bfloat16},
            r"recurrence/wavefront.cu, .*; first forward 65 blocks of 10 units and 1 .*second back",
        ),
        ({"dtype": torch.bfloat16, "H": 1150}, "one layer after the other: .*half of the GPU"),
        ({"dtype": torch.float32}, "one layer after the other: .*bfloat16"),
        ({"dtype": HALF, "gpu": (132, 232448, False)}, "one layer after the other: .*cooperative"),
    ],
    ids=str,
)
def test_explain_says_whether_two_layers_run_in_one_launch(monkeypatch, call, wanted):
    def explain(args, kwargs):
        return fused.explain("mogrifier_lstm_pair", *args, **kwargs)

    assert re.search(
        rf"on cuda, \w+: (csrc/cuda/)?{wanted}", call_with_two_layers(monkeypatch, explain, **call)
    )
    monkeypatch.setenv("FUSEDSEQ_RECURRENCE", "loop")
    assert "FUSEDSEQ_RECURRENCE is loop" in call_with_two_layers(monkeypatch, explain, **call)


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("compiled", [False, True])
def test_two_layers_are_one_operator(monkeypatch, p, compiled):
    """Shapes and dtypes of results and gradients, on the meta device, by the path of CUDA."""
    monkeypatch.setattr(import_module("fusedseq.fused.mogrifier_lstm_pair"), "PAIRED", {"meta"})
    case = mogrifier_lstm_pair_case(4, 3, 5, 6, 7, 5, 5, input_dropout=p, seed=3)
    args, kwargs = convert(case.inputs(), "meta", HALF)
    function = fused.mogrifier_lstm_pair
    function = (
        torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    )
    results, gradients = run(function, args, kwargs)
    assert [tuple(t.shape) for t in results] == [
        (4, 3, 6),
        (3, 6),
        (3, 6),
        (4, 3, 7),
        (3, 7),
        (3, 7),
    ]
    assert [t.shape for t in gradients] == [t.shape for t in differentiable(args, kwargs)]
    assert {t.dtype for t in (*results, *gradients)} == {HALF}


@pytest.mark.parametrize("case", CASES)
def test_other_dtypes_are_rejected(case):
    case = CASES[case]
    with FakeTensorMode():
        args, kwargs = on_cuda(case, torch.float8_e4m3fn)
        with pytest.raises(
            TypeError, match=rf"^{case.op}: x must be .* on cuda, got torch.float8_e4m3fn"
        ):
            getattr(fused, case.op)(*args, **kwargs)
