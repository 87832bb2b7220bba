"""What `--sample` leaves of the tests marked `sampled(n)` and the files marked `sampled_files`."""

from types import SimpleNamespace

import pytest

from tests import conftest
from tests.support import sampling


def item(nodeid, **marks):
    found = {name: SimpleNamespace(args=args) for name, args in marks.items()}
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=found.get)


ITEMS = [item(f"a.py::test[{i}]") for i in range(5)]
ITEMS += [item(f"b.py::test[{i}]", sampled=(4,)) for i in range(17)]
ITEMS += [item("b.py::other[0]", sampled=(4,))]
FILES = [
    item(f"{name}{i}.py::{test}", sampled_files=(name, n))
    for name, count, n in (("x", 9, 5), ("y", 3, 4))
    for i in range(count)
    for test in ("test[0]", "test[1]", "other")
]


def names(checksum, items=ITEMS, factor=1):
    return [found.nodeid for found in sampling.sample(items, checksum, factor)]


def test_every_unmarked_test_and_one_case_in_n_run():
    found = names(1)
    assert found[:5] == [item.nodeid for item in ITEMS[:5]]
    assert len(found[5:-1]) == 5  # 17 / 4, rounded up
    assert found[-1] == "b.py::other[0]"


def test_one_file_in_n_runs_and_all_of_its_tests():
    found = names(1, ITEMS[:5] + FILES)
    assert found[:5] == [item.nodeid for item in ITEMS[:5]]
    files = [name.partition("::")[0] for name in found[5:]]
    assert [file[0] for file in files] == 6 * ["x"] + 3 * ["y"]  # 9 / 5 and 3 / 4, rounded up
    assert all(files.count(file) == 3 for file in files)


def test_in_a_sampled_file_the_cases_are_sampled_too():
    items = [item(f"a.py::test[{i}]", sampled=(4,), sampled_files=("x", 2)) for i in range(8)]
    assert len(names(1, items)) == 2


def test_a_factor_makes_the_sample_smaller():
    assert len(names(1, ITEMS, 2)) == 5 + 3 + 1  # 17 / 8, rounded up
    assert len(names(1, FILES, 3)) == 3 + 3  # a file of each name, with three tests


@pytest.mark.parametrize("items", [ITEMS, FILES], ids=["cases", "files"])
def test_other_sources_choose_others(items):
    assert names(1, items) == names(1, items)
    assert {name for checksum in range(60) for name in names(checksum, items)} == {
        item.nodeid for item in items
    }


@pytest.mark.parametrize("folder", sampling.FOLDERS)
def test_a_changed_source_changes_the_choice(monkeypatch, tmp_path, folder):
    (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(sampling, "ROOT", tmp_path)
    found = []
    for text in ("int a;", "int b;"):
        (tmp_path / folder / "kernel.h").write_text(text)
        found.append(sampling.checksum_of_sources())
    assert found[0] != found[1]


@pytest.mark.parametrize("marks", [{"sampled": (4,)}, {"sampled_files": ("x", 2)}, {}])
@pytest.mark.parametrize(("until", "now"), [(None, 9.0), (5.0, 4.0), (5.0, 6.0)])
def test_a_sampled_test_does_not_start_after_the_time_of_until(monkeypatch, marks, until, now):
    found = item("a.py::test", **marks)
    found.config = SimpleNamespace(getoption={"until": until}.get)
    monkeypatch.setattr(conftest.time, "time", lambda: now)
    if marks and now == 6.0:
        with pytest.raises(pytest.skip.Exception, match="--until"):
            conftest.pytest_runtest_setup(found)
    else:
        conftest.pytest_runtest_setup(found)
