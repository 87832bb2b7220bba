"""Cases of `mogrifier_lstm_pair`."""

from typing import Any

from fusedseq.testing.cases.case import Case
from fusedseq.testing.cases.mogrifier_lstm import mogrifier_lstm_case

# The arguments of one layer after x, in the order of mogrifier_lstm.
LAYER_ARGUMENTS = ("W_ih", "W_hh", "b", "h0", "c0", "Q", "R", "Q_bias", "R_bias")


def mogrifier_lstm_pair_case(T, B, X, H, H_2, rounds=3, rounds_2=2, *, first=None, **second):
    """A case with a first layer as in `mogrifier_lstm_case`, and a second one above it.

    H_2, rounds_2: of the second layer    first, second: options of `mogrifier_lstm_case`
    """
    cases = (
        mogrifier_lstm_case(T, B, X, H, rounds, **(first or {})),
        mogrifier_lstm_case(T, B, H, H_2, rounds_2, **second),
    )

    def make(randn):
        inputs, layers = [], []
        for case in cases:
            args, kwargs = case.make(randn)
            inputs.append(args[0])
            layers.append(dict(zip(LAYER_ARGUMENTS, args[1:], strict=False)) | kwargs)
        return (inputs[0], *layers), {}

    return Case("mogrifier_lstm_pair", "-then-".join(case.id for case in cases), make)


def many_options_cases():
    first: dict[str, Any] = {"rank": 2, "shared": True}
    second: dict[str, Any] = {"input_dropout": 0.4, "locked_input": True, "seed": -9}
    yield mogrifier_lstm_pair_case(4, 3, 7, 5, 3, 5, 4, first=first, **second)

    first = {"input_dropout": 0.3, "bias": False}
    yield mogrifier_lstm_pair_case(3, 2, 5, 4, 3, 0, 1, first=first, mogrifier_bias=False)

    first = {"training": False, "zoneout_h": 0.3}
    yield mogrifier_lstm_pair_case(3, 2, 5, 4, 3, first=first, input_dropout=0.5, training=False)

    first = {
        "lengths": [5, 0, 2],
        "state_dropout": 0.2,
        "zoneout_h": 0.1,
        "input_dropout": 0.2,
        "seed": 4,
    }
    second = {
        "lengths": [5, 0, 2],
        "cap_input_gate": True,
        "zoneout_c": 0.4,
        "weight_drop": 0.3,
        "input_dropout": 0.3,
        "seed": 2**40 + 7,
    }
    yield mogrifier_lstm_pair_case(5, 3, 17, 9, 6, 5, 2, first=first, **second)


CASES = [
    mogrifier_lstm_pair_case(1, 1, 1, 1, 1),
    mogrifier_lstm_pair_case(2, 0, 3, 4, 5),
    mogrifier_lstm_pair_case(3, 2, 5, 4, 7, input_dropout=0.5, seed=3),
    *many_options_cases(),
    mogrifier_lstm_pair_case(11, 33, 20, 24, 20, 4, 3, input_dropout=0.5, seed=11),
]
