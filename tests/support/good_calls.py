"""Good calls of every operator, of which the tests of errors change one argument."""

import inspect

from fusedseq import fused, reference
from fusedseq.testing import (
    activation_regularization_case,
    attention_case,
    bias_activation_dropout_case,
    bidirectional_lstm_case,
    dropout_case,
    embedding_case,
    linear_case,
    linear_cross_entropy_case,
    lstm_case,
    mogrifier_lstm_case,
    mogrifier_lstm_pair_case,
    projected_lstm_case,
    residual_layer_norm_case,
    split_cross_entropy_case,
)

T, B, X, H = 3, 2, 5, 4
GOOD = {
    "lstm": lstm_case(T, B, X, H, weight_drop=0.5),
    "bidirectional_lstm": bidirectional_lstm_case(T, B, X, H, weight_drop=0.5),
    "projected_lstm": projected_lstm_case(T, B, X, H, weight_drop=0.5),
    "mogrifier_lstm": mogrifier_lstm_case(T, B, X, H, 3),
    "mogrifier_lstm of low rank": mogrifier_lstm_case(T, B, X, H, 3, rank=2),
    "mogrifier_lstm_pair": mogrifier_lstm_pair_case(T, B, X, H, 6),
    "dropout": dropout_case("dropout", (3, 5), 0.5),
    "locked_dropout": dropout_case("locked_dropout", (3, 2, 5), 0.5),
    "weight_drop": dropout_case("weight_drop", (6, 5), 0.5),
    "embedding": embedding_case((3, 2), 7, 4, 0.5),
    "activation_regularization": activation_regularization_case(3, 2, 4),
    "attention": attention_case(
        2,
        2,
        4,
        5,
        6,
        "biasNLS",
        "mask",
        "lengths",
        "alibi",
        "relative2",
        "rope",
        dropout=0.5,
        scale=1.0,
    ),
    "bias_activation_dropout": bias_activation_dropout_case((3, 5), "gelu", 0.5),
    "linear": linear_case(3, 5, 4),
    "residual_layer_norm": residual_layer_norm_case((3, 5), p=0.5),
    "linear_cross_entropy": linear_cross_entropy_case(3, 5, 4, weighted=True),
    "split_cross_entropy": split_cross_entropy_case(3, 5, 4, (1, 2)),
}


def call(good, **changed):
    """Calls the operator of a good case with changed arguments.

    changed: {name: value}; a function is applied to the good argument
    """
    case = GOOD[good]
    args, kwargs = case.inputs()
    bound = inspect.signature(getattr(reference, case.op)).bind(*args, **kwargs)
    bound.apply_defaults()
    for name, value in changed.items():
        bound.arguments[name] = value(bound.arguments[name]) if inspect.isfunction(value) else value
    return getattr(fused, case.op)(*bound.args, **bound.kwargs)
