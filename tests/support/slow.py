"""Which tests of tests/tasks are `slow`: `make test` leaves them out, `make test-all` runs them.

Tests that are slow for a reason of their own carry the marker in their file. Here is the rule for
the documented experiments, which many tests are parametrized with: `make test` runs one experiment
of each task, the default one.
"""

import re

import pytest

EXPERIMENT = re.compile(r"(words|ptb|reverse|en-es|en-fr)/[\w-]+")
FAST = {"words/base", "ptb/mogrifier-awd", "reverse/base", "en-es/base", "en-fr/base"}


def mark(items):
    for item in items:
        params = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if item.path.parent.name == "tasks" and any(is_slow(value) for value in params):
            item.add_marker(pytest.mark.slow)


def is_slow(value):
    return isinstance(value, str) and bool(EXPERIMENT.fullmatch(value)) and value not in FAST
