"""What `explain` must know of a call on any device."""

from collections.abc import Mapping
from typing import Any

# The operators with matrix products, which on the CPU may multiply bfloat16 numbers. Autocast casts
# their operands.
PRODUCTS = (
    "attention",
    "attention_varlen",
    "bidirectional_lstm",
    "gru",
    "layer_norm_gru",
    "layer_norm_lstm",
    "linear",
    "linear_cross_entropy",
    "lstm",
    "mogrifier_lstm",
    "mogrifier_lstm_pair",
    "peephole_lstm",
    "projected_lstm",
    "rnn",
    "split_cross_entropy",
)
IN_HALF = ("attention", "attention_varlen", "linear")  # operators that take fp16 on the CPU
# Public functions that call another operator.
CALLS = {
    "attention_varlen": "attention",
    "mogrifier_lstm_pair": "mogrifier_lstm",
    "split_cross_entropy": "linear_cross_entropy",
}
WITHOUT_ROUNDS = "by the operator mogrifier_lstm without rounds, which has zoneout"


def is_with_zoneout(name: str, given: Mapping[str, Any]) -> bool:
    """Whether a call is one of `lstm` with a zoneout, which mogrifier_lstm computes."""
    return name == "lstm" and bool(given.get("zoneout_h") or given.get("zoneout_c"))
