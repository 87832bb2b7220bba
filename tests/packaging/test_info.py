"""`fusedseq info`, and the errors of the command line.

`fusedseq info` must find operators with wrong results, gradients or exceptions, and GPUs that this
build has no code for. Errors of all commands are one line and exit code 2, without a traceback.
"""

import os
import re
import subprocess
import sys

import pytest
import torch
from fusedseq import _load, cli, fused, info, reference
from fusedseq.first_use import verdicts


def run(*words, **variables):
    env = os.environ | {"PYTHONPATH": str(_load.PACKAGE.parent)} | variables
    process = subprocess.run(
        [sys.executable, "-m", "fusedseq", *words], env=env, capture_output=True, text=True
    )
    assert "Traceback" not in process.stderr
    return process


def error_line(process):
    """The only line of output of a command that failed with exit code 2."""
    assert process.returncode == 2
    assert process.stdout == ""
    (line,) = process.stderr.splitlines()
    return line


@pytest.mark.parametrize("isa", _load.isa("found").split())
def test_every_operator_agrees_on_every_instruction_set(isa):
    process = run("info", FUSEDSEQ_ISA=isa)
    assert process.returncode == 0, process.stdout
    assert re.search(rf"CPU kernels used +{isa}, by FUSEDSEQ_ISA\n", process.stdout)
    for op in reference.__all__:
        (line,) = re.findall(
            rf"^{op} +(.*)$", process.stdout.partition("operators on cpu")[2], re.M
        )
        assert int(line.split()[0]) > 0
        assert isa in line


def test_an_instruction_set_that_the_machine_lacks_is_an_error():
    process = run("info", FUSEDSEQ_ISA="avx1024")
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert "FUSEDSEQ_ISA must be one of those this machine runs" in line
    assert "got avx1024" in line
    assert "operators on cpu" not in process.stdout


def test_the_operators_are_compared_in_every_dtype_that_is_named():
    process = run("info", "--dtype", "bfloat16", "float64")
    assert process.returncode == 0, process.stdout
    for dtype in ("bfloat16", "float64"):
        found = process.stdout.partition(f"operators on cpu, {dtype}, compared")[2]
        (line,) = re.findall(r"^linear +(.*)$", found.partition("\noperators")[0], re.M)
        assert f"on cpu, {dtype}: " in line
    assert "float32, compared" not in process.stdout


def report_on_cpu(capsys):
    report = info.Report()
    info.operators(report, "cpu")
    return report.close(), capsys.readouterr().out


def test_a_wrong_result_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(
        fused, "dropout", lambda *args, **kwargs: 1.001 * reference.dropout(*args, **kwargs)
    )
    code, out = report_on_cpu(capsys)
    assert code == 1
    assert re.search(r"^dropout on cpu +WRONG: .*error", out, re.M)
    assert "1 wrong" in out


def test_a_wrong_gradient_is_reported(monkeypatch, capsys):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return 1.001 * dy

    monkeypatch.setattr(
        fused, "lstm", lambda x, *args, **kwargs: reference.lstm(Wrong.apply(x), *args, **kwargs)
    )
    code, out = report_on_cpu(capsys)
    assert code == 1
    assert re.search(r"^lstm on cpu +WRONG: .*gradient of x", out, re.M)


def test_an_operator_that_raises_is_reported(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise NotImplementedError("no kernel for this device")

    monkeypatch.setattr(fused, "embedding", broken)
    code, out = report_on_cpu(capsys)
    assert code == 1
    assert "no kernel for this device" in out


@pytest.mark.parametrize(
    ("code", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 6), True),  # machine code runs on newer GPUs of the same major version
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("compute_90a", (10, 0), False),
        ("compute_80", (12, 1), True),  # PTX runs on any newer GPU
        ("compute_100", (9, 0), False),
        ("sm_100", (10, 3), True),
    ],
)
def test_which_gpu_runs_which_code(code, capability, runs):
    assert info.runs_on(code, capability) == runs


def test_a_gpu_without_kernels_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    for codes, wrong in (["sm_80"], True), ([], True), (["sm_80", "sm_90a"], False):
        monkeypatch.setattr(_load, "build_info", lambda codes=codes: {"cuda_codes": codes})
        report = info.Report()
        assert info.gpus(report) == ["cuda:0"]
        assert report.close() == wrong
        assert ("WRONG" in capsys.readouterr().out) == wrong


def test_a_missing_or_unknown_command_is_one_line():
    assert "COMMAND" in error_line(run())
    assert "'inf'" in error_line(run("inf"))
    assert "--wrong" in error_line(run("info", "--wrong"))
    assert run("--help").returncode == 0


def test_every_command_has_help():
    for name in cli.COMMANDS:
        process = run(name, "--help")
        assert process.returncode == 0
        assert process.stdout.startswith(f"usage: fusedseq {name}")


def test_a_closed_pipe_gives_no_traceback():
    command = f"'{sys.executable}' -m fusedseq info --no-check | head -n 1"
    process = subprocess.run(
        command,
        shell=True,
        env=os.environ | {"PYTHONPATH": str(_load.PACKAGE.parent)},
        capture_output=True,
        text=True,
    )
    assert process.stdout.startswith("fusedseq")
    assert process.stderr == ""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("preset: must be small,\n got big"), "preset: must be small, got big"),
        (
            FileNotFoundError(2, "No such file or directory", "ptb.txt"),
            "ptb.txt: No such file or directory",
        ),
        (
            ModuleNotFoundError("No module named 'rich'", name="rich"),
            "needs the Python package rich",
        ),
        (ImportError("fusedseq: the library is lost"), "the library is lost"),
    ],
)
def test_an_error_is_one_line_and_code_2(error, message, monkeypatch, capsys):
    def fail(args):
        raise error

    monkeypatch.setattr(info, "run", fail)
    monkeypatch.delenv("FUSEDSEQ_TRACEBACK", raising=False)
    assert cli.main(["info"]) == 2
    assert capsys.readouterr().err.startswith(f"fusedseq info: {message}")
    monkeypatch.setenv("FUSEDSEQ_TRACEBACK", "1")
    with pytest.raises(type(error)):
        cli.main(["info"])


def test_verdicts_of_the_first_use_are_reported(capsys):
    found = {
        "lstm": verdicts.Verdict(verdicts.AGREES),
        "attention": verdicts.Verdict(verdicts.DISAGREES, "case a: error 3 > budget 1"),
    }
    report = info.Report()
    info.first_use(report, "cuda:0", False, "verdicts/1.json", found)
    assert report.close() == 1
    printed = capsys.readouterr().out
    assert re.search("first use, cuda:0 .*agree: lstm\n", printed)
    assert "WRONG: disagrees: case a: error 3 > budget 1; cached in verdicts/1.json" in printed


def test_a_verified_gpu_is_not_compared(capsys):
    report = info.Report()
    info.first_use(report, "cuda:0", True, "verdicts/1.json", {})
    assert report.close() == 0
    assert "not compared" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "", "{", "[]"])
def test_a_build_without_a_readable_record_has_none(content, tmp_path, monkeypatch):
    monkeypatch.setattr(_load, "PACKAGE", tmp_path)
    if content is not None:
        (tmp_path / "build_info.json").write_text(content)
    _load.build_info.cache_clear()
    try:
        assert _load.build_info() == {}
    finally:
        _load.build_info.cache_clear()


def test_a_torch_without_its_metadata_has_a_version(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text("__version__ = '2.9.1'\n")
    code = "import importlib.metadata as m, sys\n"
    code += "def lost(name): raise m.PackageNotFoundError(name)\nm.version = lost\nimport fusedseq"
    paths = os.pathsep.join([str(tmp_path), str(_load.PACKAGE.parent)])
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert "ImportError: fusedseq: needs torch >= 2.11, found 2.9.1 in " in process.stderr
