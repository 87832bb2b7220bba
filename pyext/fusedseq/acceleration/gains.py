"""How many times as fast a kind of module was in training, for the report of `accelerate`."""

import json
from functools import cache
from importlib import resources


@cache
def measured() -> dict[str, list[float]]:
    """Returns {kind: [the least gain, the greatest]} of docs/benchmarks.md.

    `python -m bench.suite.pages` writes gains.json from the results in bench/results.
    """
    return json.loads(resources.files(__package__).joinpath("gains.json").read_text())


def of(kind: str) -> str:
    """Returns the range of a kind of module as "1.00x to 4.10x", or "unknown"."""
    ends = dict.fromkeys(f"{gain:.2f}x" for gain in measured().get(kind, ()))
    return " to ".join(ends) or "unknown"
