"""The command line: version, help, demo, messages, and the clone that `fusedseq bench` runs."""

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

import fusedseq
import pytest
from fusedseq import _load, cli, machine
from fusedseq.tasks import catalog
from fusedseq.tasks.commands import bench, demo, ensemble, train, translate
from fusedseq.tasks.evaluation import translation_options
from fusedseq.tasks.training import packages

ROOT = Path(__file__).parents[2]


def test_version_prints_the_package_and_torch(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    expected = f"fusedseq {fusedseq.__version__}, torch {metadata.version('torch')}\n"
    assert capsys.readouterr().out == expected


def test_version_and_help_do_not_import_torch():
    for option in ("--version", "--help"):
        code = (
            "import sys\nfrom fusedseq import cli\n"
            f"try: cli.main([{option!r}])\nexcept SystemExit: print('torch' in sys.modules)"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main([command, "--help"])
    assert exit.value.code == 0
    assert f"usage: fusedseq {command}" in capsys.readouterr().out


def test_bench_outside_a_clone_says_where_to_run_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench"]) == 2
    error = capsys.readouterr().err
    assert "run this command in the root of a clone" in error
    assert error.count("\n") == 1


def test_bench_measures_the_package_that_runs_it():
    path = bench.environment()["PYTHONPATH"].split(os.pathsep)
    assert (Path(path[0]) / "fusedseq").samefile(Path(fusedseq.__file__).parent)


def test_the_revision_is_that_of_the_clone_of_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "tests")
    assert machine.clone().samefile(ROOT)
    commit = machine.facts("cpu")["commit"]
    assert commit is None or re.fullmatch("[0-9a-f]{40}", commit)
    monkeypatch.chdir(tmp_path)
    assert machine.clone() is None
    facts = machine.facts("cpu")
    assert facts["commit"] is None
    assert not facts["dirty"]


def test_a_clone_of_another_package_is_not_described(tmp_path, monkeypatch):
    (tmp_path / "pyext/fusedseq").mkdir(parents=True)
    (tmp_path / "pyext/fusedseq/machine.py").touch()
    monkeypatch.chdir(tmp_path)
    assert machine.clone() is None


def test_the_demo_trains_writes_translates_times_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    pytest.importorskip("nltk")
    for name in ("here", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "POINTS", 2)
    assert cli.main(["demo", "--steps", "8"]) == 0
    out = capsys.readouterr().out
    # torch may leave the folder of its compiler.
    left = [p.name for p in tmp_path.glob("*/*") if not p.name.startswith("torchinductor")]
    assert left == []
    model, translator, operators = re.split(r"^[23]\. ", out, flags=re.M)
    for part in (model, translator):
        losses = [float(x) for x in re.findall(r"^   step +\d+   loss +([\d.]+)", part, re.M)]
        assert len(losses) == 3
        assert losses[-1] < losses[0]
    assert len(model.partition("It writes:\n")[2].strip().splitlines()) == 4
    assert len(re.findall(r"^      ours .*\n      reference \S+", translator, re.M)) == 4
    rows = re.findall(r"^   (\w+) +([\d.]+) +([\d.]+) +[\d.]+×  +\S+", operators, re.M)
    assert len(rows) == 5
    assert all(hasattr(fusedseq.fused, name) for name, *_ in rows)


def test_the_demo_wants_a_step(capsys):
    assert cli.main(["demo", "--steps", "0"]) == 2
    assert capsys.readouterr().err == "fusedseq demo: --steps must be at least 1, got 0\n"


def test_every_missing_package_is_reported_at_once(monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [*extras["train"], *(p for p in extras["tasks"] if not p.startswith("fusedseq"))]
    assert [re.match(r"[\w-]+", name)[0] for name in named] == [*cli.PACKAGES]
    for name in ("nltk", "sacrebleu", "rich"):
        monkeypatch.setitem(sys.modules, name, None)
    error = ModuleNotFoundError("No module named 'nltk'", name="nltk.tokenize")
    assert cli.sentence(error) == (
        "needs the Python package nltk; of those that the tasks use, 3 are not installed: "
        "pip install rich nltk sacrebleu"
    )
    assert packages.remark({"nltk": "no BLEU", "sacrebleu": "no BLEU"}) == (
        "no progress bar, no BLEU: that needs packages that are not installed: "
        "pip install rich nltk sacrebleu"
    )


def test_a_clone_whose_operators_are_not_built_says_how(tmp_path, monkeypatch):
    package = tmp_path / "pyext/fusedseq"
    package.mkdir(parents=True)
    monkeypatch.setattr(_load, "PACKAGE", package)
    assert "--no-build-isolation ." in _load.how_to_build()
    (tmp_path / "setup.py").touch()
    assert f"pip install -v --no-build-isolation -e '{tmp_path}[test]'" in _load.how_to_build()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("info", "FUSEDSEQ_AUTOGRAD"),
        ("info", "FUSEDSEQ_RECURRENCE"),
        ("info", "FUSEDSEQ_TRACEBACK"),
        ("info", "FUSEDSEQ_CACHE_MB"),
        ("info", "FUSEDSEQ_ISA"),
        ("train ptb --data synthetic --steps 1 --out run", "FUSEDSEQ_CACHE_MB"),
        ("train ptb --data synthetic --steps 1 --out run", "FUSEDSEQ_ISA"),
    ],
)
def test_a_wrong_variable_is_one_sentence(command, name, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), name: "nonsense"}
    done = subprocess.run(
        [sys.executable, "-m", "fusedseq", *command.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert re.fullmatch(rf"fusedseq.*: {name} must be .*, got '?nonsense'?.*\n", done.stderr)
    assert not list(tmp_path.iterdir())


def test_all_variables_are_on_one_page():
    """The quoted names in Python and C++, and those that shell and make expand or set."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    used = re.compile(r"""["'$](FUSEDSEQ_[A-Z_]+)["' ]|\b(FUSEDSEQ_[A-Z_]+)=""")
    found = set()
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and (path.suffix in (".py", ".h", ".cpp", ".cu") or name == "Makefile"):
            text = re.sub(r"-DFUSEDSEQ_\w+", "", path.read_text())
            found |= {a or b for a, b in used.findall(text)}
    page = (ROOT / "docs/variables.md").read_text()
    assert {"FUSEDSEQ_CUDA", "FUSEDSEQ_CACHE_MB", "FUSEDSEQ_DATA", "FUSEDSEQ_FAKE_GPU"} <= found
    assert [name for name in sorted(found) if f"| `{name}` |" not in page] == []


def test_an_operator_set_of_other_tasks_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in ("train ptb", "tune reverse", "grid reverse", "eval words run"):
        assert cli.main([*command.split(), "--ops", "torch_mha"]) == 2
        task = command.split()[1]
        message = f": --ops must be fused or reference for {task}, got torch_mha\n"
        assert capsys.readouterr().err.endswith(message)
    with pytest.raises(SystemExit):
        cli.main(["generate", "run", "--ops", "torch_mha"])
    assert "choose from 'fused', 'reference'" in capsys.readouterr().err


def test_an_ensemble_is_offered_for_its_tasks_alone(capsys):
    for task in catalog.TASKS:
        has = hasattr(catalog.task_module(task), "ENSEMBLE")
        assert has == (task in ensemble.ENSEMBLES)
    with pytest.raises(SystemExit):
        cli.main(["ensemble", "ptb"])
    assert "invalid choice: 'ptb' (choose from 'words')" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "assignment", "message"),
    [
        ("ptb", "model.dropout=2", "model.dropout must be in [0, 1], got 2.0"),
        ("ptb", "weight_drop=-1", "model.weight_drop must be in [0, 1], got -1.0"),
        ("ptb", "layers=0", "model.layers must be at least 1, got 0"),
        ("ptb", "cell=qrnn", "model.cell must be lstm, gru or rnn, got 'qrnn'"),
        ("ptb", "output=first", "model.output must be "),
        ("en-fr", "heads=7", "model.heads must divide embedding = 300, got 7"),
        ("en-es", "positions=none2", "model.positions must be "),
        ("words", "pooling=min", "model.pooling must be sum, mean or max, got 'min'"),
        ("words", "masking=1", "model.masking must be in [0, 1), got 1.0"),
        ("reverse", "model.scale=none", "model.scale must be embedding or head, got 'none'"),
        ("reverse", "training.lr=-1", "training.lr must be at least 0, got -1.0"),
        ("reverse", "training.beta2=1", "training.beta2 must be in [0, 1), got 1.0"),
        ("reverse", "anneal_factor=-1", "training.anneal_factor must be in (0, 1], got -1.0"),
        ("reverse", "anneal_factor=2", "training.anneal_factor must be in (0, 1], got 2.0"),
        ("reverse", "clip=0", "training.clip must be above 0, or none for no clipping, got 0.0"),
        ("reverse", "tail_after=0", "training.tail_after must be at least 1, got 0"),
        ("reverse", "tail_from=-3", "training.tail_from must be at least 1, got -3"),
        ("reverse", "data.limit=0", "data.limit must be at least 1, got 0"),
        ("reverse", "data.sizes=()", "data.sizes must have at least one number, none below 0"),
        ("reverse", "data.sizes=4,-5", "data.sizes must have at least one number, none below 0"),
        ("ptb", "init_range=-1", "model.init_range must be at least 0, got -1.0"),
        ("ptb", "alpha=-1", "model.alpha must be at least 0, got -1.0"),
        ("ptb", "beta=-1", "model.beta must be at least 0, got -1.0"),
        ("ptb", "model.splits=50,20", "model.splits must ascend in (0, V) = (0, 93), got (50, 20)"),
        ("ptb", "model.splits=500", "model.splits must ascend in (0, V) = (0, 93), got (500,)"),
        ("en-es", "data.max_length=2", "data.max_length must be at least 3, a word between"),
    ],
)
def test_a_wrong_setting_is_named(task, assignment, message, tmp_path, capsys):
    command = ["train", task, "--data", "synthetic", "--out", str(tmp_path / "run"), "--steps", "1"]
    assert cli.main([*command, "--set", assignment]) == 2
    assert capsys.readouterr().err.startswith(f"fusedseq train: {message}")
    assert not (tmp_path / "run").exists()


def test_a_line_that_is_not_utf_8_is_named(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo \xff\n")
    lines = translate.opened(path)
    assert next(lines) == "one\n"
    with pytest.raises(ValueError, match=r"text, line 2: byte 5 is not UTF-8 \(invalid start"):
        next(lines)
    with pytest.raises(ValueError, match="the standard input, line 1: byte 1 is not UTF-8"):
        list(translate.decoded(io.BytesIO(b"\xff\n"), "the standard input"))


def test_a_place_where_a_table_cannot_be_written_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        translation_options.check_writable(tmp_path / "nowhere/table.csv")
    assert cli.sentence(error.value) == f"{tmp_path}/nowhere: --csv: there is no such directory"
    with pytest.raises(IsADirectoryError) as error:
        translation_options.check_writable(tmp_path)
    assert cli.sentence(error.value).startswith(f"{tmp_path}: --csv must be a file")
    translation_options.check_writable(tmp_path / "table.csv")


def test_the_command_that_goes_on_after_ctrl_c(tmp_path):
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    words = ["ptb", "--data", "my texts", "--steps", "9", "--device", "cpu", "--skip-test"]
    expected = (
        f"fusedseq train ptb --data 'my texts' --out {tmp_path} --resume --steps 9 --skip-test"
        " --device cpu"
    )
    assert train.continuation(parser.parse_args(words), tmp_path) == expected
    by_two = train.continuation(parser.parse_args(words), tmp_path, processes=2)
    assert by_two == f"torchrun --nproc-per-node 2 -m {expected}"
    again = parser.parse_args(train.shlex.split(expected)[2:])
    assert again.resume
    assert again.data == "my texts"
