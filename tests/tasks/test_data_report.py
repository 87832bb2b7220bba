"""The command `fusedseq data TASK`."""

import sys

import pytest
from fusedseq.cli import main
from fusedseq.data import en_es, en_fr
from fusedseq.data.report import TASKS
from fusedseq.data.statistics import Side
from fusedseq.data.vocabulary import Vocabulary

for package in ("rich", "tokenizers", "nltk"):
    pytest.importorskip(package)


def test_statistics_of_sentences():
    sentences = {"train": [["a", "b", "a"], ["c"]], "valid": [["a", "new", "new"]], "test": []}
    statistics = Side("text", Vocabulary(["a", "b", "c"]), sentences).statistics()
    assert statistics["train"][:-1] == (2, 4, 3, 1, 2.0, 3, 0, 0)
    assert statistics["valid"][:-1] == (1, 3, 2, 3, 3.0, 3, 1, 2)
    assert statistics["test"][:-1] == (0, 0, 0, 0, 0.0, 0, 0, 0)
    assert statistics["train"].counts.most_common(1) == [("a", 2)]


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_a_table(task, capsys):
    assert main(["data", task, "--data", "synthetic", "--top", "3"]) == 0
    out = capsys.readouterr().out
    for word in (
        task,
        "vocabulary of",
        "sentences",
        "mean",
        "OOV",
        "train",
        "valid",
        "test",
        "most frequent",
        "rank",
    ):
        assert word in out
    assert ("padding by length" in out) == task.startswith("en-")


def test_the_numbers_of_a_small_corpus(tmp_path, capsys):
    for split, text in (("train", "a b <unk>\na\n"), ("valid", "a [x]\n"), ("test", "b\n")):
        (tmp_path / f"{split}.txt").write_text(text)
    assert main(["data", "ptb", "--data", str(tmp_path)]) == 0
    rows = {
        row[0]: row[1:] for line in capsys.readouterr().out.splitlines() if (row := line.split())
    }
    assert rows["train"] == ["2", "4", "3", "1", "2.00", "3", "0", "0", "0.00%"]
    assert rows["valid"] == ["1", "2", "2", "2", "2.00", "2", "0", "0", "0.00%"]


def test_errors_are_one_sentence(tmp_path, capsys):
    assert main(["data", "en-es", "--data", str(tmp_path)]) == 2
    assert "fusedseq data: en-es: data files not found, looked for" in capsys.readouterr().err
    assert main(["data", "ptb", "--data", "synthetic", "--top", "-1"]) == 2
    assert "--top must be at least 0, got -1" in capsys.readouterr().err
    assert main(["data", "en-fr", "--data", "synthetic", "--batch", "0"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "fusedseq data: --batch must be at least 1, got 0\n"
    assert not printed.out
    with pytest.raises(SystemExit, match="2"):
        main(["data", "nothing"])
    assert "choose from" in capsys.readouterr().err


@pytest.mark.parametrize("task", [task for task in TASKS if task != "reverse"])
def test_a_directory_that_is_none_is_named(task, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.delenv("FUSEDSEQ_DATA", raising=False)
    for name, why in (("file", "is not one"), ("nowhere", "does not exist")):
        path = tmp_path / name
        assert main(["data", task, "--data", str(path)]) == 2
        error = f"fusedseq data: --data must be a directory, got {path}, which {why}\n"
        assert capsys.readouterr().err == error
    monkeypatch.setenv("FUSEDSEQ_DATA", str(path))
    assert main(["data", task]) == 2
    assert f": FUSEDSEQ_DATA must be a directory, got {path}, which" in capsys.readouterr().err
    monkeypatch.setenv("FUSEDSEQ_DATA", str(tmp_path))
    assert main(["data", task, "--data", ""]) == 2
    assert "no data given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "package"), [("en-fr", "nltk"), ("en-es", "tokenizers"), ("ptb", "rich")]
)
def test_a_missing_package_is_named(task, package, monkeypatch, capsys):
    en_fr._tokenizers.cache_clear()
    en_es._whitespace.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["data", task, "--data", "synthetic"]) == 2
    assert (
        f"fusedseq data: needs the Python package {package}, which is not installed"
        in capsys.readouterr().err
    )
