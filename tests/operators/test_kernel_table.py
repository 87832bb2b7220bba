"""Tables of measured kernels: what the reader accepts, and that the operators look it up; the
command that writes them, with a clock that the test sets.
"""

import ctypes
import json
import os
import subprocess
import sys
import warnings
from argparse import ArgumentParser

import pytest
import torch
from fusedseq import _load, cli, fused, kernel_table, kernels, tune_kernels
from fusedseq.fused import lstm_cudnn, recurrence_plan

pytestmark = pytest.mark.cpu
GPU = {"name": "A GPU", "capability": "9.0", "multiprocessors": 132}
LSTM = {"op": "lstm", "dtype": "float16", "B": 20, "X": 650, "H": 640, "rounds": 0}
PAIR = {"op": "mogrifier_lstm_pair", "dtype": "bfloat16", "B": 2, "X": 3, "H": 4, "rounds": 5}
PAIR |= {"H2": 6, "rounds2": 7}
ATTENTION = {"D": 64, "options": "plain", "forward": [64, 32, 64, 4, 2]}
ATTENTION["keys"] = [32, 128, 64, 8, 2]
TABLE = {
    "format": kernel_table.FORMAT,
    "gpu": GPU,
    "recurrences": [LSTM | {"engine": "loop"}, PAIR | {"engine": "in turn"}],
    "attention": [ATTENTION],
}


def written(folder, content):
    path = folder / "table.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def forgotten():
    """Removes the tables that a test uses at its end."""
    used = []
    yield used
    for table in used:
        kernel_table.forget(table)
    kernel_table.cudnn.clear()
    kernels.tiles.clear()
    kernels.tiles_of_gpu = ""
    kernels._is_gpu.cache_clear()


def measured(*key):
    function = _load.operators().fusedseq_measured_engine
    function.restype = ctypes.c_int64
    return function((ctypes.c_int64 * 9)(*key))


# ---- reading


def test_a_table_is_read(tmp_path):
    table = kernel_table.read(written(tmp_path, TABLE))
    assert table.gpu == kernel_table.Gpu("A GPU", "9.0", 132)
    assert table.recurrences == {
        ("lstm", "float16", 20, 650, 640, 0): "loop",
        ("mogrifier_lstm_pair", "bfloat16", 2, 3, 4, 5, 6, 7): "in turn",
    }
    assert table.attention == {
        (64, 0, "forward"): (64, 32, 64, 4, 2, 0),
        (64, 0, "keys"): (32, 128, 64, 8, 2),
    }


WRONG = {  # what replaces a part of TABLE: the sentence
    "": "must be a kernel table in JSON",
    "[]": r'"format": "fusedseq kernel table 1", got \[\]',
    '{"format": "a later one"}': "got 'a later one'",
}


@pytest.mark.parametrize("text", WRONG)
def test_another_file_is_named_in_the_error(tmp_path, text):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=WRONG[text]) as error:
        kernel_table.read(path)
    assert str(error.value).startswith(f"{path}: ")


def recurrence(**changes):
    return {"recurrences": [LSTM | {"engine": "loop"} | changes]}


ENTRIES = [
    ({"gpu": None}, "gpu: name must be a text, got None"),
    ({"gpu": GPU | {"multiprocessors": "132"}}, "multiprocessors must be an integer, got '132'"),
    ({"recurrences": {}}, "recurrences must be a list, got {}"),
    ({"recurrences": [3]}, r"recurrences\[0\]: op must be a text, got None"),
    (recurrence(op="gru"), "op must be one of lstm, mogrifier_lstm, .*got 'gru'"),
    (recurrence(dtype="float64"), "dtype must be one of float32, .*got 'float64'"),
    (recurrence(engine="fast"), "engine must be one of loop, persistent, .*cudnn, got 'fast'"),
    (
        recurrence(op="mogrifier_lstm", engine="cudnn"),
        "one of loop, persistent, persistent words, got 'cudnn'",
    ),
    (recurrence(B=0), "B must be at least 1, got 0"),
    (recurrence(H=True), "H must be an integer, got True"),
    (recurrence(op="mogrifier_lstm_pair", engine="wavefront"), "H2 must be an integer, got None"),
    ({"attention": [ATTENTION | {"D": 65}]}, "D must be one of 64, 128, 256, got 65"),
    ({"attention": [ATTENTION | {"options": "all"}]}, "options must be one of plain, .*'all'"),
    ({"attention": [ATTENTION | {"forward": [64]}]}, r"forward must be BM, .*got \[64\]"),
    ({"attention": [ATTENTION | {"forward": [63, 32, 64, 4, 2]}]}, "BM of forward must be .*63"),
    ({"attention": [ATTENTION | {"keys": [32, 32, 64, 4, 2, "pointers"]}]}, "keys must be BM, "),
    ({"attention": [{"D": 64, "options": "rich"}]}, "must have forward or keys or queries, got D"),
    (
        {"attention": [ATTENTION | {"forward": [64, 32, 64, 4, 2, "tma"]}]},
        "loads of forward must be one of pointers, descriptors, specialized, got 'tma'",
    ),
]


@pytest.mark.parametrize(("change", "message"), ENTRIES, ids=[m for _, m in ENTRIES])
def test_a_wrong_entry_is_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        kernel_table.read(written(tmp_path, TABLE | change))


# ---- looking up


def test_the_operators_look_it_up(tmp_path, forgotten):
    table = kernel_table.read(written(tmp_path, TABLE))
    forgotten.append(table)
    size = 132, 90, 3, 20, 650, 640, 0, 0, 0
    assert measured(*size) == 0
    kernel_table.use(table)
    assert measured(*size) == 1
    assert measured(132, 90, 2, 2, 3, 4, 5, 6, 7) == 4
    assert measured(131, 90, *size[2:]) == 0  # another GPU
    assert measured(*size[:3], 21, *size[4:]) == 0
    kernel_table.forget(table)
    assert measured(*size) == 0


def test_explain_says_what_the_table_chooses(forgotten):
    """On a GPU with so many multiprocessors; the persistent kernels would fit both calls."""
    gpu = kernel_table.Gpu("A GPU", "9.0", 132)
    lstm = ("lstm", "bfloat16", 2, 3, 5, 0)
    table = kernel_table.Table(
        gpu, {lstm: "loop", ("mogrifier_lstm_pair", "bfloat16", 2, 3, 5, 2, 6, 1): "in turn"}
    )
    forgotten.append(table)
    plan_gpu = 132, 232448, True, True
    sizes = {"T": 4, "B": 2, "X": 3, "H": 5, "rounds": 2, "H2": 6, "rounds2": 1}
    meta = torch.device("meta")

    def explained():
        args, _ = tune_kernels.recurrence_inputs("lstm", sizes, torch.bfloat16, meta)
        pair, _ = tune_kernels.recurrence_inputs("mogrifier_lstm_pair", sizes, torch.bfloat16, meta)
        return recurrence_plan.explain("lstm", plan_gpu, *args), recurrence_plan.explain_pair(
            plan_gpu, *pair
        )

    assert all("persistent" in text or "one launch" in text for text in explained())
    kernel_table.use(table)
    assert "loop.cu" in explained()[0]
    assert "in turn" not in explained()[0]
    assert all("as FUSEDSEQ_KERNEL_TABLE says" in text for text in explained())


def test_attention_takes_measured_tiles(tmp_path, forgotten):
    plan = pytest.importorskip("fusedseq.kernels.attention.plan")
    before = plan.plan(512, 512, 64, 2, plan.PLAIN)
    table = kernel_table.read(written(tmp_path, TABLE))
    forgotten.append(table)
    kernel_table.use(table)
    after = plan.plan(512, 512, 64, 2, plan.PLAIN)
    sizes = {"BM": 64, "BN": 32, "BD": 64, "warps": 4, "stages": 2}
    assert after.forward == sizes | {"loads": plan.POINTER_LOADS}
    assert after.backward == plan.tiles(32, 128, 64, 8, 2, 64)
    assert after.queries == before.queries
    assert plan.plan(512, 512, 128, 2, plan.PLAIN).forward["BM"] == 128


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("pointers", "POINTER_LOADS"),
        ("descriptors", "DESCRIBED_LOADS"),
        ("specialized", "SPECIALIZED_LOADS"),
    ],
)
def test_tiles_say_how_keys_and_values_are_loaded(tmp_path, word, name):
    plan = pytest.importorskip("fusedseq.kernels.attention.plan")
    entry = ATTENTION | {"forward": [*ATTENTION["forward"], word]}
    found = kernel_table.read(written(tmp_path, TABLE | {"attention": [entry]})).attention
    assert found[64, 0, "forward"] == (64, 32, 64, 4, 2, getattr(plan, name))


def test_tiles_hold_for_the_gpu_of_the_table_alone(tmp_path, forgotten, monkeypatch):
    table = kernel_table.read(written(tmp_path, TABLE))
    forgotten.append(table)

    class Facts:
        name, major, minor, multi_processor_count = "A GPU", 9, 0, 132

    class OfAnother(Facts):
        multi_processor_count = 66

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: (Facts, OfAnother)[i])
    kernel_table.use(table)
    current = 0
    assert kernels.tiles_of_current_gpu()
    current = 1
    with pytest.warns(RuntimeWarning, match=r"is of A GPU \(9.0, 132 .*this GPU is .*66 multi"):
        assert not kernels.tiles_of_current_gpu()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warned once
        assert not kernels.tiles_of_current_gpu()
        current = 0
        assert kernels.tiles_of_current_gpu()


@pytest.mark.parametrize("engine", ["cudnn", "loop"])
def test_cudnn_is_called_where_it_was_measured_to_be_faster(monkeypatch, forgotten, engine):
    """In bf16, which torch's rule for cuDNN's persistent kernel excludes."""
    entry = LSTM | {"engine": engine, "dtype": "bfloat16", "B": 2, "X": 3, "H": 4}
    key, engine = kernel_table._recurrence("here", "entry", entry)
    table = kernel_table.Table(kernel_table.Gpu("A GPU", "9.0", 132), {key: engine})
    forgotten.append(table)
    monkeypatch.setattr(lstm_cudnn, "accepts", lambda x: True)
    monkeypatch.setattr(lstm_cudnn, "replaces_loop", lambda x, h0: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))

    class Facts:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Facts)

    class OnCuda:
        is_cuda, dtype, device = True, torch.bfloat16, "cuda:0"

        def __init__(self, *shape):
            self.shape = shape

        def size(self, i):
            return self.shape[i]

        def is_contiguous(self):
            return True

    tensors = OnCuda(5, 2, 3), OnCuda(16, 3), OnCuda(16, 4), None, OnCuda(2, 4), OnCuda(2, 4)
    assert not lstm_cudnn.supports(*tensors, None, 0.0)
    kernel_table.use(table)
    assert lstm_cudnn.supports(*tensors, None, 0.0) is (engine == "cudnn")
    assert not lstm_cudnn.supports(OnCuda(5, 9, 3), *tensors[1:], None, 0.0)
    Facts.multi_processor_count = 114  # another GPU of the same capability
    assert not lstm_cudnn.supports(*tensors, None, 0.0)


# ---- the variable


def import_with(path):
    code = "import fusedseq.fused, fusedseq.kernels as k; print(k.tiles)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment[kernel_table.VARIABLE] = str(path)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def test_only_the_variable_brings_a_table_into_use(tmp_path):
    assert import_with("").stdout == "{}\n"
    assert import_with(written(tmp_path, TABLE)).stdout == (
        "{(64, 0, 'forward'): (64, 32, 64, 4, 2, 0), (64, 0, 'keys'): (32, 128, 64, 8, 2)}\n"
    )


def test_a_file_that_is_missing_or_wrong_is_named(tmp_path, monkeypatch):
    path = tmp_path / "none.json"
    monkeypatch.setenv(kernel_table.VARIABLE, str(path))
    with pytest.raises(ValueError, match=r"FUSEDSEQ_KERNEL_TABLE must name .*none\.json.*No such"):
        kernel_table.use_environment()
    monkeypatch.setenv(kernel_table.VARIABLE, str(written(tmp_path, "{}")))
    with pytest.raises(ValueError, match=r"FUSEDSEQ_KERNEL_TABLE: .*table\.json: must be"):
        kernel_table.use_environment()


# ---- the command


def arguments(*words):
    parser = ArgumentParser()
    tune_kernels.add_arguments(parser)
    return parser.parse_args(["--out", "unused", *words])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_the_command_says_so(tmp_path, capsys):
    assert cli.main(["tune-kernels", "--out", str(tmp_path / "t"), "--lstm", "4,2,3,5"]) == 2
    assert "tune-kernels: needs a GPU" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("text", ["4,2,3", "4,2,3,x", "4,2,3,0", ""])
def test_a_wrong_size_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        arguments("--lstm", text)
    assert repr(text) in capsys.readouterr().err


def test_attention_in_fp32_has_no_tiles_to_choose(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="--attention must be timed with --dtype bfloat16 or"):
        tune_kernels.run(arguments("--attention", "1,2,64,64,32", "--dtype", "float32"))


def test_the_fastest_engine_is_written(tmp_path, monkeypatch, forgotten):
    """On the CPU, where all engines are the same; the clock prefers the loop and the wavefront.
    What is in use while a call is timed is what the table says afterwards.
    """
    monkeypatch.setattr(recurrence_plan, "this_gpu", lambda _: (132, 232448, True))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    gpu = kernel_table.Gpu("A GPU", "9.0", 132)
    seen = []

    def clock(call):
        call()
        engine = measured(132, 90, 2, 2, 3, 5, 0, 0, 0), measured(132, 90, 2, 2, 3, 5, 2, 6, 1)
        seen.append((*engine, *kernel_table.cudnn.values()))
        return {1: 1.0, 2: 2.0, 3: 1.0, 4: 2.0}.get(max(engine), 3.0)

    words = "--lstm", "4,2,3,5", "--pair", "4,2,3,5,2,6,1"
    content = tune_kernels.tune(arguments(*words), torch.device("cpu"), gpu, clock)
    assert seen == [(1, 0, False), (2, 0, False), (0, 0, True), (0, 4), (0, 3)]
    assert not kernel_table.cudnn
    path = tmp_path / "table.json"
    tune_kernels.write(path, content)
    assert kernel_table.read(path).recurrences == {
        ("lstm", "bfloat16", 2, 3, 5, 0): "loop",
        ("mogrifier_lstm_pair", "bfloat16", 2, 3, 5, 2, 6, 1): "wavefront",
    }


def test_words_are_timed_where_they_fit(monkeypatch):
    monkeypatch.setattr(recurrence_plan, "this_gpu", lambda _: (132, 232448, True))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    cpu = torch.device("cpu")

    def engines(op, dtype=torch.bfloat16, **size):
        return [*tune_kernels.engines(op, {"T": 4, "B": 2, "X": 4, "H": 6} | size, dtype, cpu)]

    both, words = ["loop", "persistent"], ["persistent words"]
    assert engines("lstm") == engines("mogrifier_lstm", rounds=3) == [*both, *words]
    assert engines("lstm", H=5) == engines("lstm", torch.float32) == both
    assert engines("lstm", X=3) == [*both, *words]
    assert engines("mogrifier_lstm", X=3, rounds=3) == both


@pytest.mark.parametrize("H", [6, 7])
def test_a_table_selects_the_protocol_of_the_exchange(forgotten, H):
    """In the text of explain, and under its number in the C++ table. Words need an even H."""
    gpu = kernel_table.Gpu("A GPU", "9.0", 132)
    sizes = {"T": 4, "B": 2, "X": 4, "H": H, "rounds": 3}
    meta = torch.device("meta")
    args, kwargs = tune_kernels.recurrence_inputs("mogrifier_lstm", sizes, torch.bfloat16, meta)

    def explained():
        return recurrence_plan.explain("mogrifier_lstm", (132, 232448, True), *args, **kwargs)

    text, without = "words in place of flags", "by flags, since words do not fit there"
    assert text not in explained()
    assert without not in explained()
    table = kernel_table.Table(
        gpu, {("mogrifier_lstm", "bfloat16", 2, 4, H, 3): "persistent words"}
    )
    kernel_table.use(table)
    assert explained().count(text) == (0 if H % 2 else 2)
    assert (f"forward and backward {without}" in explained()) == (H % 2 == 1)
    assert measured(132, 90, 2, 2, 4, H, 3, 0, 0) == 5
    kernel_table.forget(table)
    assert text not in explained()
    assert without not in explained()


@pytest.mark.parametrize(
    ("capability", "loads"), [("8.0", 0), ("9.0", 1), ("10.0", 2), ("12.0", 1)]
)
@pytest.mark.parametrize(("options", "number"), [("plain", 0), ("dropout", 1), ("rich", 2)])
def test_the_fastest_tiles_are_written(tmp_path, monkeypatch, capability, loads, options, number):
    plan = pytest.importorskip("fusedseq.kernels.attention.plan")
    given = []

    def attention(q, k, v, **kwargs):
        given.append(set(kwargs))
        return q

    monkeypatch.setattr(fused, "attention", attention)
    gpu = kernel_table.Gpu("A GPU", capability, 132)

    def clock(call):
        """The smallest tiles are the fastest, by the last way to load."""
        call()
        return float(sum(sum(tiles[:3]) - sum(tiles[5:]) for tiles in kernels.tiles.values()))

    words = "--attention", "2,2,300,300,100", "--options", options
    content = tune_kernels.tune(arguments(*words), torch.device("cpu"), gpu, clock)
    assert not kernels.tiles
    wanted = {"plain": set(), "dropout": {"dropout", "seed"}, "rich": {"dropout", "seed", "bias"}}
    assert all(names == wanted[options] for names in given)
    path = tmp_path / "table.json"
    tune_kernels.write(path, content)
    sizes = [[plan.TILED[128, p][n] for p in range(3)] for n in range(3)]
    forward, keys, queries = (min(found, key=lambda size: sum(size[:3])) for found in sizes)
    assert kernel_table.read(path).attention == {
        (128, number, "forward"): (*forward, loads),
        (128, number, "keys"): keys,
        (128, number, "queries"): queries,
    }


def test_the_plan_takes_the_tiles_of_a_table(tmp_path, forgotten):
    plan = pytest.importorskip("fusedseq.kernels.attention.plan")
    assert kernel_table.TILED_KERNELS == plan.TILED_KERNELS
    before = plan.tiled(1000, 64, plan.PLAIN)
    table = kernel_table.read(written(tmp_path, TABLE))
    forgotten.append(table)
    kernel_table.use(table)
    found = plan.tiled(1000, 64, plan.PLAIN)
    assert found.forward == plan.tiles(64, 32, 64, 4, 2, 64) | {"loads": 0}
    assert found.backward == plan.tiles(32, 128, 64, 8, 2, 64)
    assert found.queries == before.queries
    assert "loads" not in plan.tiled(1000, 64, plan.RICH).forward  # tiles of plain calls alone
