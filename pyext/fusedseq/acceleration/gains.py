"""How many times as fast a kind of module was in training, for the report of `accelerate`."""

import json
from functools import cache
from importlib import resources

BERT, GPT2 = "BERT layer", "GPT-2 layer"
# {the kind of module: the whole block or model that was measured with all of its modules replaced}
MEASURED_WITHIN = {
    "MultiheadAttention": "TransformerEncoderLayer",
    "TransformerDecoderLayer": "Transformer",
    "Conv1D": GPT2,
    "GPT2MLP": GPT2,
    "GPT2Block": GPT2,
    "attention of gpt2": GPT2,
    "BertIntermediate": BERT,
    "BertSelfOutput": BERT,
    "BertOutput": BERT,
    "attention of bert": BERT,
}


@cache
def measured() -> dict[str, list[float]]:
    """Returns {kind: [the least gain, the greatest]} of docs/benchmarks.

    `python -m bench.suite.pages` writes gains.json from the results in bench/results.
    """
    return json.loads(resources.files(__package__).joinpath("gains.json").read_text())


def of(kind: str) -> str:
    """Returns the range of a kind of module as "1.00x to 4.10x", "1.26x of a whole BERT layer", or
    "unknown".
    """
    whole = MEASURED_WITHIN.get(kind)
    ends = dict.fromkeys(f"{gain:.2f}x" for gain in measured().get(whole or kind, ()))
    if not ends:
        return "unknown"
    return " to ".join(ends) + (f" of a whole {whole}" if whole else "")
