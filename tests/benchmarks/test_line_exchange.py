"""The time of a cache line from core to core, and the mark of cases without a common cache."""

import pytest

from bench.suite import metrics
from bench.suite.line_exchange import LineExchange


@pytest.fixture
def exchange():
    """A LineExchange where it can measure: on two CPUs and with a compiler."""
    exchange = LineExchange()
    if exchange.function is None:
        pytest.skip("needs two CPUs and a C++ compiler")
    return exchange


def test_a_line_takes_time_but_no_microseconds_at_best(exchange):
    times = [exchange.nanoseconds() for _ in range(20)]
    assert all(time > 0 for time in times)
    assert min(times) < 10_000


def test_samples_are_apart(exchange):
    rare, always = exchange.every(3600), exchange.every(0)
    assert [rare.measure() for _ in range(3)] == [True, False, False]
    assert [always.measure() for _ in range(3)] == [True] * 3
    assert (len(rare.times), len(always.times)) == (1, 3)


def test_a_cpu_that_is_not_allowed_gives_no_time(exchange):
    exchange.cpus = [exchange.cpus[0], 1023]
    assert exchange.nanoseconds() is None


def test_without_a_compiler_there_is_no_time(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    exchange = LineExchange()
    assert exchange.nanoseconds() is None
    assert not exchange.every(0).measure()


@pytest.mark.parametrize(
    ("times", "marks"),
    [([40.0, 30.0, 190.0], ""), ([40.0, 180.0, 190.0], " ‡"), ([], ""), (None, "")],
)
def test_the_mark_follows_most_rounds(times, marks):
    entry = {"others busy": 0.0} | ({} if times is None else {"line exchange": times})
    assert metrics.marked(entry) == marks


def test_a_case_can_have_both_marks():
    assert metrics.marked({"others busy": 0.5, "line exchange": [200.0]}) == " * ‡"


def test_the_mark_is_that_of_both_runs_of_a_line():
    near, far = ({"others busy": 0.0, "line exchange": [time]} for time in (30.0, 200.0))
    assert metrics.marked(near, far) == metrics.marked(far, near) == " ‡"
    assert metrics.marked(near, near) == ""
