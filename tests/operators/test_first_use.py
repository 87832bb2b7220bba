"""The comparison of kernels with their oracles at their first use on a GPU, with the CPU in its
place: guards before the CPU kernels, and kernels that are wrong on purpose.
"""

import json
import multiprocessing
import os
import threading
import warnings

import pytest
import torch
from fusedseq import first_use, fused, reference, testing
from fusedseq.first_use import compare, guard, verdicts
from fusedseq.fused import autograd
from fusedseq.fused.schema import Schema
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.cpu
IDENTITY = {"gpu": "a test", "capability": "7.7", "driver": "1", "torch": "2", "build": "3"}
CPU = torch.device("cpu")
LSTM_INPUTS = [torch.randn(shape) for shape in ((3, 2, 4), (20, 4), (20, 5), (20,), (2, 5), (2, 5))]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fusedseq" / "verdicts"


@pytest.fixture
def guarded(monkeypatch):
    """A function that returns new Guards of the CPU kernels; they and what they replaced are
    removed at the end, and calls are recorded in C++ again.
    """
    made = []
    monkeypatch.setattr(autograd, "recorder", autograd.recorder)
    monkeypatch.setattr(autograd, "_recorded", dict(autograd._recorded))

    def make(**options):
        options.setdefault("identity", lambda device: IDENTITY)
        options.setdefault("devices", lambda: [CPU])
        guards = guard.Guards("CPU", **options)
        made.append(guards)
        guards.install()
        return guards

    yield make
    for guards in made:
        for library in [*guards.libraries.values(), *guards.replaced]:
            library._destroy()
    for rule in autograd._rules.values():
        vars(rule).pop("compute", None)
    autograd.switched_off.clear()


@pytest.fixture
def wrong():
    """A function that replaces the CPU kernel of an operator until the end of the test."""
    replaced = []

    def replace(op, function):
        replaced.append(guard._registered({op: function}, "CPU"))

    yield replace
    for library in replaced:
        library._destroy()


def linear_with_an_error(x, W, b):
    return 1.01 * torch.nn.functional.linear(x, W, b)


def inputs():
    x, W, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    return x.requires_grad_(), W.requires_grad_(), b


# ---- kernels that agree


def test_a_guard_compares_once_and_then_costs_nothing(guarded, cache):
    compared = []

    def comparing(op, device):
        compared.append(op)
        return compare.compare_in_thread(op, device)

    guards = guarded(compare=comparing)
    for _ in range(2):
        fused.linear(*inputs())
    assert compared == ["linear"]
    assert "linear" not in guards.libraries
    assert "attention" in guards.libraries
    (path,) = cache.glob("*.json")
    content = json.loads(path.read_text())
    assert content["identity"] == IDENTITY
    assert content["verdicts"]["linear"]["found"] == verdicts.AGREES


def test_each_kind_of_device_is_compared_once(guarded):
    """All calls are on the CPU, which takes the place of one device and then of the other."""
    compared, two = [], [CPU, torch.device("cpu", 1)]
    kinds = {None: "one kind", 1: "another kind"}

    def identity(device):
        return IDENTITY | {"gpu": kinds[device.index]}

    def comparing(op, device):
        compared.append(kinds[device.index])
        return compare.compare_in_thread(op, device)

    guards = guarded(compare=comparing, identity=identity, devices=lambda: two)
    for _ in range(2):
        x, W, b = inputs()
        fused.linear(x, W, b).sum().backward()
        torch.testing.assert_close(x.grad, W.detach().sum(0).expand_as(x))
    assert compared == ["one kind"]
    assert "linear" in guards.libraries
    kinds = {None: "another kind", 1: "one kind"}
    guards.judged["linear"] = {two[1]}
    for _ in range(2):
        fused.linear(*inputs())
    assert compared == ["one kind", "another kind"]
    assert "linear" not in guards.libraries


@pytest.mark.parametrize("op", reference.__all__)
def test_the_cpu_kernels_agree(op):
    assert compare.cases_of(op)
    assert compare.compare(op, CPU).found == verdicts.AGREES


def test_cases_of_recurrences_reach_the_persistent_kernels():
    found = [case.inputs() for case in compare.cases_of("lstm")]
    steps = [args[0].size(0) for args, options in found if not compare.ORDERED & options.keys()]
    assert max(steps) >= compare.SHORTEST


@pytest.mark.parametrize("op", ["lstm", "peephole_lstm", "gru"])
def test_cases_of_recurrences_reach_the_persistent_kernels_with_starts(op):
    found = [case.inputs() for case in compare.cases_of(op)]
    steps = [args[0].size(0) for args, options in found if options.get("starts") is not None]
    assert max(steps) >= compare.SHORTEST


@pytest.mark.parametrize("op", ["lstm", "mogrifier_lstm", "gru", "rnn"])
def test_cases_of_recurrences_have_steps_in_another_order(op):
    options = [case.inputs()[1] for case in compare.cases_of(op)]
    assert any(compare.ORDERED & given.keys() for given in options)
    if op in compare.BY_CUDNN:  # which does not compute these
        loops = "starts", "zoneout_h", "weight_drop"
        assert all(any(given.get(name) is not None for name in loops) for given in options)


def test_cases_reach_every_kernel_of_an_operator():
    def found(op):
        return set().union(*(compare.features(op, case) for case in compare.cases_of(op)))

    assert found("attention") >= {"packed", "row", "split", "tiled", "packed sequences"}
    assert found("residual_layer_norm") == {"long rows"}
    lstms = "lstm", "mogrifier_lstm", "peephole_lstm", "layer_norm_lstm"
    for op in (*lstms, "gru", "rnn", "layer_norm_gru"):
        assert found(op) >= {"steps", "lengths", "starts", "reverse"}, op
        if op != "lstm":  # whose zoneout mogrifier_lstm computes
            assert "zoneout_h" in found(op), op
        if op in ("lstm", "gru", "rnn", "layer_norm_gru"):
            assert "weight_drop" in found(op)


def test_every_option_of_attention_is_compared_in_the_kernels_of_every_size():
    """As far as a test case has it; packed sequences are calls of the same registered operator."""
    chosen = compare.cases_of("attention")
    assert {case.op for case in chosen} == {"attention", "attention_varlen"}
    found = set().union(*(compare.features("attention", case) for case in chosen))
    cases = [case for case in testing.CASES if case.op in ("attention", "attention_varlen")]
    cases = [case for case in cases if all(t.numel() for t in case.inputs()[0][:3])]
    assert found == set().union(*(compare.features("attention", case) for case in cases))
    everywhere = "bias", "mask", "relative_keys", "alibi", "rope", "causal", "dropout"
    for kernels in ("packed", "row", "tiled", "packed sequences"):
        assert found >= {f"{option}, {kernels}" for option in everywhere}, kernels
    assert found >= {f"{option}, tiled" for option in (*compare.IN_TILES, "wide heads")}


def test_attention_s_features_are_those_of_the_plan_of_its_kernels():
    pytest.importorskip("triton")
    from fusedseq.kernels.attention.plan import PLAIN, parts_of_keys, plan

    for case in testing.CASES:
        args, options = case.inputs()
        if case.op != "attention" or not all(t.numel() for t in args[:3]):
            continue
        (B, N, L, D), S = args[0].shape, args[1].size(2)
        in_tiles = bool({"window", "softcap", "sinks"} & options.keys())
        chosen = plan(L, S, D, 2, PLAIN, in_tiles)
        parts = 0 if in_tiles else parts_of_keys(chosen, B * N, L, S, D)
        assert ("split" if parts else chosen.family) in compare.features("attention", case), case.id


def test_wrong_packed_sequences_count(guarded, monkeypatch):
    """The kernels of `attention` that only attention_varlen calls are compared too."""
    right = fused.attention_varlen
    monkeypatch.setattr(fused, "attention_varlen", lambda *args, **more: 1.1 * right(*args, **more))
    guarded()
    x = torch.randn(1, 1, 3, 4)
    with pytest.warns(RuntimeWarning, match=r"attention: the kernels disagree"):
        fused.attention(x, x, x, causal=True)  # without an option the CPU calls attention_plain


def test_sizes_of_the_features_are_those_of_the_kernels():
    pytest.importorskip("triton")
    from fusedseq.kernels import residual_layer_norm
    from fusedseq.kernels.attention.plan import MAX_PACKED, MAX_ROW

    assert (compare.MAX_PACKED, compare.MAX_ROW) == (MAX_PACKED, MAX_ROW)
    assert compare.MAX_COLUMNS == residual_layer_norm.MAX_COLUMNS


@pytest.mark.parametrize("op", reference.__all__)
def test_a_comparison_is_small(op):
    """So that its time on a GPU is that of some launches; what Triton compiles comes on top."""
    tensors = [
        t
        for case, _ in compare._pairs(op)
        for t in tree_leaves(case.inputs())
        if isinstance(t, torch.Tensor)
    ]
    assert sum(t.numel() for t in tensors) < 200_000
    assert len(list(compare._pairs(op))) <= 25


@pytest.mark.parametrize("always", [False, True])
def test_a_cached_verdict_is_not_computed_again_unless_always(guarded, always):
    verdicts.Verdicts(IDENTITY).add("linear", verdicts.Verdict(verdicts.AGREES))
    compared = []
    guarded(always=always, compare=lambda op, _: compared.append(op) or verdicts.Verdict("agrees"))
    fused.linear(*inputs())
    assert compared == ["linear"] * always


def test_a_verified_gpu_is_not_compared(guarded, monkeypatch, cache):
    monkeypatch.setattr(guard, "VERIFIED", frozenset(["7.7"]))
    guarded(compare=None)
    fused.linear(*inputs())
    assert not cache.exists()


def test_the_comparison_has_none_of_the_callers_modes(guarded):
    """bf16 autocast, inference mode and the random numbers of the caller."""
    guarded()
    x, W, b = inputs()
    state = torch.get_rng_state()
    with torch.autocast("cpu"), torch.inference_mode():
        fused.residual_layer_norm(x, x, torch.ones(4), torch.zeros(4))
    assert torch.equal(state, torch.get_rng_state())
    assert verdicts.Verdicts(IDENTITY).read()["residual_layer_norm"].found == verdicts.AGREES


# ---- kernels that do not


@pytest.mark.parametrize("direct", [False, True])
def test_a_wrong_kernel_is_replaced_by_the_oracle_with_one_warning(guarded, wrong, direct):
    wrong("linear", linear_with_an_error)
    guarded()
    call = torch.ops.fusedseq.linear if direct else fused.linear
    x, W, b = inputs()
    with pytest.warns(RuntimeWarning, match="linear: .*disagree.*report.*fusedseq info") as warned:
        y = call(x, W, b)
    grads = torch.autograd.grad(y.sum(), (x, W))
    with warnings.catch_warnings(action="error"):
        again = call(x, W, b)
    assert len(warned) == 1
    assert "fusedseq.reference.linear, with which" in fused.explain("linear", x, W, b)
    wanted = reference.linear(x, W, b)
    assert torch.equal(y, wanted)
    assert torch.equal(again, wanted)
    for got, right in zip(grads, torch.autograd.grad(wanted.sum(), (x, W)), strict=True):
        torch.testing.assert_close(got, right)


def test_a_wrong_verdict_from_the_cache_warns_too(guarded):
    verdict = verdicts.Verdict(verdicts.DISAGREES, "case of a day before")
    verdicts.Verdicts(IDENTITY).add("dropout", verdict)
    guarded(compare=None)
    with pytest.warns(RuntimeWarning, match="case of a day before"):
        fused.dropout(torch.ones(8), 0.5, 3)


def test_a_wrong_backward_counts(guarded, wrong):
    def ones(*inputs):
        named = dict(zip(Schema("bias_activation_dropout_backward").inputs, inputs, strict=True))
        return torch.ones_like(named["x"]), torch.ones_like(named["b"])

    wrong("bias_activation_dropout_backward", ones)
    guarded()
    case = next(case for case in testing.CASES if case.op == "bias_activation_dropout")
    with pytest.warns(RuntimeWarning, match="gradient of"):
        testing.check(case.op, *case.inputs())


def test_an_error_of_a_kernel_counts(guarded, wrong):
    def fail(*_):
        raise RuntimeError("no kernel image")

    wrong("linear", fail)
    guarded()
    with pytest.warns(RuntimeWarning, match="no kernel image"):
        y = fused.linear(*inputs())
    assert y.shape == (3, 5)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ImportError("needs Triton")])
def test_other_errors_are_no_verdict(guarded, wrong, cache, error):
    def fail(*_):
        raise error

    wrong("linear", fail)
    guards = guarded()
    with pytest.raises(type(error)):
        fused.linear(*inputs())
    assert "linear" in guards.libraries
    assert not cache.exists()


@pytest.mark.parametrize("op", reference.__all__)
def test_every_operator_can_be_computed_by_its_oracle(guarded, op):
    """Forward and backward, through the public function."""
    guards = guarded(compare=lambda *_: verdicts.Verdict(verdicts.DISAGREES))
    cases = [case for case in testing.CASES if case.op == op][:12]
    with warnings.catch_warnings(record=True) as warned:
        for case in cases:
            testing.check(op, *case.inputs())
    assert guards.replaced
    assert [w for w in warned if "switched off" in str(w.message)]


def test_a_call_that_was_recorded_before_raises_in_its_backward(guarded):
    guards = guarded(compare=lambda *_: verdicts.Verdict(verdicts.AGREES))
    x, W, b = inputs()
    y = fused.linear(x, W, b)
    guards.switch_off("linear")
    with pytest.raises(RuntimeError, match=r"linear_backward: .*make the call again"):
        y.sum().backward()


def test_wrong_persistent_kernels_leave_the_loop(guarded, monkeypatch):
    monkeypatch.setenv("FUSEDSEQ_RECURRENCE", "")
    tried = []

    def disagreement(op, device):
        tried.append(os.environ.get("FUSEDSEQ_RECURRENCE") or "persistent")
        return "" if tried[-1] == "loop" else "case a: error 3 > budget 1"

    monkeypatch.setattr(compare, "disagreement", disagreement)
    guarded(compare=compare.compare)
    case = next(case for case in testing.CASES if case.op == "lstm")
    (x, *others), options = case.inputs()
    with pytest.warns(RuntimeWarning, match=r"run the loop .*case a: error 3"):
        fused.lstm(x.requires_grad_(), *others, **options)
    assert tried == ["persistent", "loop"]
    assert os.environ["FUSEDSEQ_RECURRENCE"] == "loop"


# ---- calls that cannot be compared


def test_a_call_inside_of_a_backward_is_not_compared(guarded):
    guards = guarded(compare=None)
    x = torch.ones(3, requires_grad=True)
    seen = []
    x.register_hook(lambda g: seen.append(fused.dropout(g.detach(), 0.5, 1)))
    (2 * x).sum().backward()
    assert seen
    assert "dropout" in guards.libraries


def test_a_call_inside_of_a_backward_computes_the_same(guarded):
    expected = fused.lstm(*LSTM_INPUTS)
    guarded(compare=None)
    x = torch.ones(3, requires_grad=True)
    seen = []
    x.register_hook(lambda g: seen.extend(tree_leaves(fused.lstm(*LSTM_INPUTS))))
    (2 * x).sum().backward()
    for got, y in zip(seen, tree_leaves(expected), strict=True):
        assert torch.equal(got, y)


def test_a_comparison_that_calls_another_operator_does_not_wait_for_itself(guarded, monkeypatch):
    def calls_dropout(op, device):
        fused.dropout(torch.ones(3), 0.5, 1)
        return verdicts.Verdict(verdicts.AGREES)

    monkeypatch.setattr(compare, "compare", calls_dropout)
    guards = guarded(compare=compare.compare_in_thread)
    caller = threading.Thread(target=lambda: fused.linear(*inputs()), daemon=True)
    caller.start()
    caller.join(60)
    assert not caller.is_alive()
    assert "linear" not in guards.libraries
    assert "dropout" in guards.libraries


def test_tracing_meets_no_guard(guarded):
    guards = guarded(compare=None)
    x, W, b = inputs()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert torch.ops.fusedseq.linear(x, W, b).shape == (3, 5)
    assert "linear" in guards.libraries


# ---- the cache


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"identity": 3}', json.dumps({"identity": IDENTITY})]
)
def test_a_corrupted_file_counts_as_empty_and_is_replaced(cache, text):
    file = verdicts.Verdicts(IDENTITY)
    cache.mkdir(parents=True)
    file.path.write_text(text)
    assert file.read() == {}
    file.add("lstm", verdicts.Verdict(verdicts.AGREES))
    assert file.read() == {"lstm": verdicts.Verdict(verdicts.AGREES)}


def test_verdicts_of_another_kind_are_not_read(cache):
    file = verdicts.Verdicts(IDENTITY)
    file.add("lstm", verdicts.Verdict("perhaps"))
    file.add("linear", verdicts.Verdict(verdicts.AGREES))
    assert {*file.read()} == {"linear"}
    assert verdicts.Verdicts(IDENTITY | {"driver": "2"}).read() == {}


def test_a_cache_that_cannot_be_written_is_left_out(cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in place of the folder")
    file = verdicts.Verdicts(IDENTITY)
    file.add("lstm", verdicts.Verdict(verdicts.AGREES))
    assert file.read() == {}


def add_all(number):
    for i in range(20):
        verdicts.Verdicts(IDENTITY).add(f"{number} {i}", verdicts.Verdict(verdicts.AGREES))


def test_two_processes_at_once_lose_nothing(cache):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=add_all, args=(n,)) for n in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(verdicts.Verdicts(IDENTITY).read()) == 40
    assert not list(cache.glob("*.part"))


# ---- the variable


@pytest.mark.parametrize(("value", "installed"), [("off", False), ("first", True), ("", True)])
def test_the_variable_decides(monkeypatch, value, installed):
    monkeypatch.setenv("FUSEDSEQ_VERIFY", value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(guard.Guards, "install", lambda self: None)
    assert bool(guard.install()) is installed


def test_a_wrong_value_of_the_variable(monkeypatch):
    monkeypatch.setenv("FUSEDSEQ_VERIFY", "sometimes")
    with pytest.raises(ValueError, match="FUSEDSEQ_VERIFY must be off or first or always"):
        guard.install()


def test_a_build_without_cuda_has_no_guards():
    assert first_use.__doc__
    assert torch.version.cuda is not None or fused._guards is None
