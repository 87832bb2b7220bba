"""The gains asked for in fp32 over baselines with MKL unthrottled, of operators and training steps.

The targets in bench.suite.case_list and bench.training.speed are over baselines as installed.
"""

LEAST = 1.0  # of every operator
OPERATORS = {
    "attention": 1.5,
    "attention_varlen": 1.3,
    "bidirectional_lstm": 1.1,
    "encoder_layer": 1.6,
    "gru": 1.1,
    "layer_norm_lstm": 3.0,
}
CASES = {
    "mogrifier_lstm-T70-B70-650-r5": 1.65,
    "mogrifier_lstm-T35-B20-650-r5": 2.6,
    "linear_cross_entropy-2048-256-100000": 1.3,
    "linear_cross_entropy-4900-650-10000": 1.3,
    "linear_cross_entropy-64-512-32000": 1.05,
    "attention-L6-B2048-N8-D32": 5.0,
    "attention-L6-B2048-N8-D32-lengths-dropout.1": 5.0,
    # The smallest calls measure what a call costs: there is no work to do faster.
    "attention-L1-B1-N1-D4": LEAST,
    "attention-L1-S1-B1-N1-D4-forward": LEAST,
    "attention-L1-S200-B1-N8-D64-forward": 1.2,
    "attention-L1-S50-B1-N8-D64-forward": 1.2,
    "attention-L1-S200-B32-N8-D64-forward": 1.2,
    "attention-L1-S1024-B1-N12-D64-forward": 1.2,
    "attention-L1-S1024-B8-N12-D64-forward": 1.2,
}
PRESETS = {
    "words/base": 2.1,
    "en-fr/base": 1.9,
    "en-es/base": 1.5,
    "ptb/mogrifier-awd": 1.4,
    "reverse/base": 1.6,
    "reverse/tuned": 1.6,
}


def of_entry(entry):
    """Returns the gain asked for of an entry of a result, over the faster of eager and torch."""
    return CASES.get(entry["name"], OPERATORS.get(entry["op"], LEAST))
