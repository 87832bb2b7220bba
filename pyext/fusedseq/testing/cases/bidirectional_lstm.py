"""Cases of `bidirectional_lstm`."""

from fusedseq.testing.cases.case import Case
from fusedseq.testing.cases.lstm import lstm_case


def bidirectional_lstm_case(T, B, X, H, *, seed_reverse=0, **options):
    """A case with the x and the options of `lstm_case`, and two sets of parameters and states."""
    case = lstm_case(T, B, X, H, **options)

    def make(randn):
        (x, *forward), kwargs = case.make(randn)
        (_, *reverse), _ = case.make(randn)
        if seed_reverse:
            kwargs["seed_reverse"] = seed_reverse
        if "starts" in kwargs:
            kwargs["starts_reverse"] = kwargs["starts"].roll(1, 0)
        return (x, *forward, *reverse), kwargs

    return Case("bidirectional_lstm", case.id, make)


CASES = [
    bidirectional_lstm_case(1, 1, 1, 1),
    bidirectional_lstm_case(4, 3, 5, 7),
    bidirectional_lstm_case(3, 0, 5, 4),
    bidirectional_lstm_case(4, 3, 5, 7, bias=False),
    bidirectional_lstm_case(3, 2, 5, 7, scale=30.0),  # saturated gates
    bidirectional_lstm_case(3, 2, 5, 7, weight_drop=0.5, seed=5, seed_reverse=-6),
    bidirectional_lstm_case(3, 2, 5, 7, weight_drop=0.5, variational=True, seed=5),
    bidirectional_lstm_case(3, 2, 5, 7, weight_drop=0.5, seed=5, training=False),
    bidirectional_lstm_case(5, 4, 6, 5, lengths=[3, 0, 5, 1]),
    bidirectional_lstm_case(5, 4, 6, 5, starts=[(0, 1), (2, 0), (3, 0), (4, 3)]),
    bidirectional_lstm_case(5, 4, 6, 5, starts=[(0, 1), (1, 0), (4, 2)], lengths=[3, 0, 5, 1]),
    bidirectional_lstm_case(33, 9, 20, 24, lengths=[33, 1, 2, 7, 0, 32, 16, 17, 5]),
    bidirectional_lstm_case(3, 20, 33, 130),  # parts own columns
    bidirectional_lstm_case(3, 70, 33, 40),  # with four threads and more the parts own rows
]
