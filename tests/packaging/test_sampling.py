"""The cases that `--sample` leaves of a test marked `sampled(n)`."""

from types import SimpleNamespace

import pytest

from tests.support import sampling


def item(nodeid, n=None):
    mark = n and SimpleNamespace(args=(n,))
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: mark)


ITEMS = [item(f"a.py::test[{i}]") for i in range(5)]
ITEMS += [item(f"b.py::test[{i}]", 4) for i in range(17)] + [item("b.py::other[0]", 4)]


def names(checksum):
    return [found.nodeid for found in sampling.sample(ITEMS, checksum)]


def test_every_unmarked_test_and_one_case_in_n_run():
    found = names(1)
    assert found[:5] == [item.nodeid for item in ITEMS[:5]]
    assert len(found[5:-1]) == 5  # 17 / 4, rounded up
    assert found[-1] == "b.py::other[0]"


def test_other_sources_choose_other_cases():
    assert names(1) == names(1)
    assert {name for checksum in range(40) for name in names(checksum)} == {
        item.nodeid for item in ITEMS
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
