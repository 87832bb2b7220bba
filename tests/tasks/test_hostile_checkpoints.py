"""Checkpoints that were made to do harm, and too little memory: each ends in one sentence."""

import copy
import json
import os
import struct
import subprocess
import sys
import time

import pytest
import torch
from fusedseq import cli
from fusedseq.tasks.catalog import TASKS, operators, task_module
from fusedseq.tasks.runs.restore import load_run
from fusedseq.tasks.training import (
    CheckpointError,
    TrainingError,
    as_dict,
    load_checkpoint,
    override,
    save_checkpoint,
    tensor_file,
)
from fusedseq.tasks.training.failures import is_out_of_memory
from safetensors import safe_open
from safetensors.torch import save_file

from tests.tasks.test_run_directory import train
from tests.tasks.test_tasks import SMALL


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """The last checkpoint of a run that has an optimizer with a state."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert train(out, "--steps", "3", "--set", "optimizer=adam", "--set", "lr=.01") == 0
    return load_checkpoint(out / "last.safetensors")


def put(state, keys, value):
    """A copy of a state with another value under dotted keys; None removes the key."""
    state = copy.deepcopy(state)
    part = state
    *path, last = keys.split("/")
    for key in path:
        part = part[int(key) if key.isdigit() else key]
    last = int(last) if last.isdigit() else last
    if value is None:
        del part[last]
    else:
        part[last] = value
    return state


WEIGHT = "model/embedding.weight"
MODEL = "description/settings/model"
# {keys: [(value, what the message says)]}, for every command that reads a checkpoint
WRONG = {
    "description": [
        (None, "it has no 'description'"),
        ([], "description must be of the type dict"),
    ],
    "description/task": [(None, "it has no 'task'"), ("\x1b[2J", r"en-fr, got '\x1b[2J'")],
    "description/seed": [("1", "seed must be of the type int")],
    "description/vocabulary": [
        (None, "it has no 'vocabulary'"),
        (["a"] * 30, "vocabulary must consist of distinct words"),
        ([1, 2], "vocabulary must consist of texts"),
        (["<eos>"], "its model does not fit its settings: decoder_bias must be (1,), got (93,)"),
    ],
    "description/settings": [(None, "it has no 'settings'"), ({"x": 1}, "unknown key x")],
    MODEL: [(5, "LanguageModelSettings: must be a JSON object, got 5")],
    f"{MODEL}/layers": [
        (100, "model.layers must be at most 6, for a model of 6 tensors, got 100"),
        (-1, ""),
        ("1", "layers must be a whole number, got '1'"),
    ],
    f"{MODEL}/hidden": [
        (10**6, "tied needs the last hidden size to be embedding = 8, got 1000000"),
        (10**12, "model.hidden must be at most 10,000,000"),
        ([1] * 10**4, "model.hidden has 10,000 entries, for 6 tensors"),
    ],
    f"{MODEL}/rounds": [(5 * 10**5, ""), (10**9, "model.rounds must be at most")],
    "model": [(None, "it has no 'model'"), ([], "model must be of the type dict")],
    WEIGHT: [
        (None, "its model does not fit its settings: embedding.weight must be (93, 8), got none"),
        (torch.zeros(3, 3), "embedding.weight must be (93, 8), got (3, 3)"),
        (torch.full((93, 8), torch.nan), "embedding.weight has values that are not finite"),
        (torch.zeros(93, 8, dtype=torch.int64), "embedding.weight must be torch.float32, got"),
        ("weight", "must be of the type Tensor"),
    ],
    "model/more": [(torch.zeros(3), "more is not a parameter of it")],
}
# The same for what only a run that is resumed reads.
WRONG_TO_RESUME = {
    "label": [(None, "it has no 'label'")],
    "label/ops": [("os", "ops must be one of fused, reference, torch_mha, got 'os'")],
    "optimization": [(None, "it has no 'optimization'")],
    "optimization/lr": [("fast", "lr must be a number, got 'fast'")],
    "optimization/optimizer/state/0/exp_avg": [
        (torch.zeros(1), "optimizer's exp_avg must have a parameter's shape (93,), got (1,)")
    ],
    "optimization/optimizer/state/0/step": [("x", "step must be a number")],
    "optimization/optimizer/param_groups": [([], "")],
    "schedule/losses": [([1.0, "x"], "1 must be a number, got 'x'")],
    "schedule/best": [(-1.0, "best must be the lowest of the")],
    "position/step": [(-5, "step must be a natural number, got -5"), (None, "it has no 'step'")],
    "rng/cpu": [(torch.zeros(3, dtype=torch.uint8), ""), (7, "")],
    "train/loss_sum": [("x", "loss_sum must be a number")],
}


def cases(wrong):
    return [
        pytest.param(keys, value, message, id=f"{keys}-{i}")
        for keys, values in wrong.items()
        for i, (value, message) in enumerate(values)
    ]


@pytest.mark.parametrize(("keys", "value", "message"), cases(WRONG))
def test_a_hostile_checkpoint_is_refused_before_anything_is_built(
    state, tmp_path, keys, value, message
):
    save_checkpoint(tmp_path / "best.safetensors", put(state, keys, value))
    before = time.process_time()
    with pytest.raises(CheckpointError) as error:
        load_run(tmp_path / "best.safetensors")
    assert time.process_time() - before < 60
    assert str(error.value).startswith(f"checkpoint {tmp_path / 'best.safetensors'} ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("keys", "value", "message"), [*cases(WRONG_TO_RESUME), *cases({WEIGHT: WRONG[WEIGHT][2:3]})]
)
def test_a_hostile_checkpoint_is_not_resumed(state, tmp_path, capsys, keys, value, message):
    save_checkpoint(tmp_path / "last.safetensors", put(state, keys, value))
    before = (tmp_path / "last.safetensors").read_bytes()
    sets = ["--set", "optimizer=adam", "--set", "lr=.01"]
    assert train(tmp_path, "--resume", "--steps", "9", *sets) == 2
    error = capsys.readouterr().err
    assert f"checkpoint {tmp_path / 'last.safetensors'} " in error
    assert message in error
    assert error.count("\n") == 1
    assert (tmp_path / "last.safetensors").read_bytes() == before


def test_every_command_refuses_a_hostile_checkpoint(state, tmp_path, capsys):
    path = tmp_path / "best.safetensors"
    save_checkpoint(path, put(state, f"{MODEL}/layers", 100))
    for command in (
        ["eval", "ptb", str(path), "--data", "synthetic"],
        ["generate", str(path)],
        ["vectors", str(path), "--near", "the"],
        ["translate", str(path)],
        ["train", "ptb", "--data", "synthetic", "--from", str(path), "--out", str(tmp_path / "o")],
    ):
        assert cli.main(command) == 2
        error = capsys.readouterr().err
        assert f"checkpoint {path} cannot be used: model.layers must be at most 6" in error
        assert error.count("\n") == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("task", TASKS)
def test_a_checkpoint_of_every_preset_is_accepted(task, tmp_path):
    """Their widths are made small: presets differ in more than sizes."""
    module = task_module(task)
    words = [f"word {i}" for i in range(20)]
    for preset, settings in module.PRESETS.items():
        settings = override(settings, SMALL[task])
        description = {
            "task": task,
            "settings": as_dict(settings),
            "seed": 0,
            "vocabulary": words if task[:2] != "en" else {"source": words, "target": words[:9]},
            "fingerprint": 1,
        }
        built = module.restore(description, ops=operators("fused"))
        state = {"description": description, "model": built.state_dict()}
        save_checkpoint(tmp_path / "c", state)
        before = torch.get_rng_state()
        found = load_run(tmp_path / "c")
        assert torch.equal(torch.get_rng_state(), before), preset
        assert found["model"].keys() == state["model"].keys()


# The file.


def test_files_are_those_of_the_safetensors_library(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "half": torch.ones(3, dtype=torch.bfloat16),
        "wide": torch.randn(2, 3, dtype=torch.float64),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(True),
        "byte": torch.arange(7, dtype=torch.uint8),
    }
    with (tmp_path / "ours").open("wb") as file:
        tensor_file.write(file, tensors, {"a": "é"})
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == {"a": "é"}
        assert {*file.keys()} == {*tensors}  # it is no dict
        assert all(torch.equal(file.get_tensor(name), t) for name, t in tensors.items())
    save_file(tensors, tmp_path / "theirs", {"a": "é"})
    with (tmp_path / "theirs").open("rb") as file:
        found, metadata = tensor_file.read(file)
    assert metadata == {"a": "é"}
    assert all(torch.equal(found[name], t) for name, t in tensors.items())


HEADERS = {
    "nested too deeply": b'{"a":' + b"[" * 100_000,
    "not JSON": b'{"a":' + b"1" * 5000 + b"}",
    "not a JSON object": b"[]",
    "metadata": b'{"__metadata__": {"a": 1}}',
    "is not described": b'{"a": {"dtype": "F32", "shape": [4611686018427387904, 4], '
    b'"data_offsets": [0, 4]}}',
    "a natural number": b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
    "KeyError": b'{"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}',
    "begins at 4, not at 0": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
    "begins at 0, not at 4": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
    b'"b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    "it must have 4,000,000,000 bytes": b'{"a": {"dtype": "F32", "shape": [1000000000], '
    b'"data_offsets": [0, 4000000000]}}',
}


@pytest.mark.parametrize("message", HEADERS)
def test_a_hostile_header_is_one_sentence(tmp_path, message):
    path = tmp_path / "c"
    path.write_bytes(struct.pack("<Q", len(HEADERS[message])) + HEADERS[message] + bytes(8))
    with pytest.raises(CheckpointError, match="c is truncated or not a checkpoint") as error:
        load_checkpoint(path)
    assert message in str(error.value)


def hostile_state(path, text):
    """A checkpoint with a state of any text and the checksum that belongs to it."""
    from fusedseq.tasks.training import checkpoint

    metadata = {"format": checkpoint.FORMAT, "state": text}
    metadata["crc32"] = str(checkpoint._checksum(text, {}))
    with path.open("wb") as file:
        tensor_file.write(file, {}, metadata)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 20_000 + "1" + "}" * 20_000,
        "{",
        '{"a": {"": "tensor", "name": "none"}}',
        '{"": "tuple"}',
        '{"": "dict", "items": [[[], 1]]}',
        '{"": "dict", "items": 5}',
        '{"description": {"settings": []}}',
        "1" * 5000,
    ],
    ids=range(9),
)
def test_a_hostile_state_is_one_sentence(tmp_path, text):
    hostile_state(tmp_path / "c", text)
    with pytest.raises(CheckpointError, match="c is damaged: it"):
        load_checkpoint(tmp_path / "c")


# Too little memory.


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate mem"
                     "ory: you tried to allocate 4 bytes. Error code 12 (Cannot allocate memory)"),
        RuntimeError("unable to mmap 100 bytes from file <c>: Cannot allocate memory (12)"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("bad allocation"),
        OSError(12, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    ],
    ids=str,
)  # fmt: skip
def test_a_failed_allocation_is_recognized(error):
    assert is_out_of_memory(error)
    wrapper = SystemError("<built-in method> returned a result with an exception set")
    wrapper.__cause__ = error
    assert is_out_of_memory(wrapper)
    assert not is_out_of_memory(RuntimeError("shapes"))
    assert not is_out_of_memory(OSError(2, "No such file or directory"))


LIMITED = """
import resource, sys, torch
from fusedseq.tasks.training import load_checkpoint, save_checkpoint, TrainingError
from fusedseq.tasks.training.failures import is_out_of_memory
path = sys.argv[1]
torch.set_num_threads(1)
save_checkpoint(path, {"small": torch.ones(3)})
much = {"much": torch.ones(64 << 18), "turned": torch.ones(64 << 9, 1 << 9).t()}  # 64 MiB each
save_checkpoint(path + "2", much)

def limit(megabytes):
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (megabytes << 20),) * 2)

limit(32 + 64)  # the copy of the tensor that is not contiguous, and no more
save_checkpoint(path + "3", much)
print("streamed")
"""
AND_NOW_LESS = """
limit(32)
for act in (lambda: save_checkpoint(path, much), lambda: load_checkpoint(path + "2")):
    try:
        act()
    except TrainingError as error:
        print(error)
try:
    torch.ones(64 << 20)
except Exception as error:
    print(is_out_of_memory(error))
print(load_checkpoint(path)["small"].sum().item())
"""


def test_too_little_memory_for_a_checkpoint_is_one_sentence(tmp_path):
    path = tmp_path / "c"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", LIMITED + AND_NOW_LESS, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.splitlines() == [
        "streamed",
        f"checkpoint {path} could not be written (out of memory); "
        "the previous checkpoint is unchanged",
        f"out of memory while reading checkpoint {path}2",
        "True",
        "3.0",
    ], found.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "c2", "c3"]


def test_a_command_without_memory_is_one_sentence(state, tmp_path, capsys, monkeypatch):
    save_checkpoint(tmp_path / "best.safetensors", state)
    from fusedseq.tasks import ptb

    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        monkeypatch.setattr(
            ptb.Task, "evaluate", lambda *_, error=error: (_ for _ in ()).throw(error)
        )
        assert cli.main(["eval", "ptb", str(tmp_path), "--data", "synthetic"]) == 1
        assert capsys.readouterr().err == "fusedseq eval: out of memory\n"
    monkeypatch.setattr(tensor_file, "read", lambda _: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(TrainingError, match="out of memory while reading checkpoint"):
        load_run(tmp_path / "best.safetensors")


def test_a_state_that_is_too_long_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "LONGEST_HEADER", 1000)
    with pytest.raises(TrainingError, match="must have at most 1,000 bytes, got"):
        save_checkpoint(tmp_path / "c", {"words": ["word"] * 1000})
    assert json.dumps([p.name for p in tmp_path.iterdir()]) == "[]"
