"""Cases of `projected_lstm`."""

import torch

from fusedseq.testing.cases.case import Case, join, option_words
from fusedseq.testing.cases.lstm import ORDERS, recurrent_inputs, with_order, zoneout_cases


def projected_lstm_case(
    T, B, X, H, *, P=3, bias=True, lengths=None, starts=None, scale=1.0, **options
):
    """A case of H hidden units that are projected to P; its arguments are those of `lstm_case`."""

    def make(randn):
        x, W_ih, _, b, _, c0 = recurrent_inputs(randn, T, B, X, H, bias, scale)
        W_hh, W_hr = scale * P**-0.5 * randn(4 * H, P), H**-0.5 * randn(P, H)
        inputs = x, W_ih, W_hh, W_hr, b, randn(B, P).tanh(), c0
        return inputs, with_order(options, T, B, lengths, starts)

    name = join(
        f"T{T}-B{B}-X{X}-H{H}-P{P}",
        "nobias" * (not bias),
        "lengths" * (lengths is not None),
        "starts" * (starts is not None),
        f"scale{scale:g}" * (scale != 1),
        *option_words(options),
    )
    return Case("projected_lstm", name, make)


CASES = [
    projected_lstm_case(1, 1, 1, 1, P=1),
    projected_lstm_case(3, 2, 3, 2, P=1),
    projected_lstm_case(1, 3, 17, 3, P=2),
    projected_lstm_case(1, 9, 17, 40, P=20),
    projected_lstm_case(5, 1, 5, 17, P=16),
    projected_lstm_case(4, 3, 3, 7, P=19),  # wider than the cell
    projected_lstm_case(3, 0, 5, 4),
    projected_lstm_case(4, 3, 5, 7, bias=False),
    projected_lstm_case(5, 4, 6, 5, lengths=[3, 0, 5, 1]),
    projected_lstm_case(3, 2, 5, 7, scale=30.0),  # saturated gates
    projected_lstm_case(33, 9, 20, 24, P=10, lengths=[33, 1, 2, 7, 0, 32, 16, 17, 5]),
    projected_lstm_case(2, 5, 100, 300, P=130),  # several tiles of columns
    projected_lstm_case(3, 70, 33, 40, P=18),  # the threads share the rows
    projected_lstm_case(9, 70, 33, 40, P=18, reverse=True),
    *(projected_lstm_case(5, 4, 6, 5, **order) for order in ORDERS),
    *(
        projected_lstm_case(3, 2, 5, 7, weight_drop=0.5, variational=variational, seed=5)
        for variational in (False, True)
    ),
    projected_lstm_case(3, 2, 5, 7, weight_drop=0.5, seed=5, training=False),
    projected_lstm_case(
        5, 4, 6, 5, bias=False, lengths=[3, 0, 5, 1], weight_drop=0.3, seed=torch.tensor(2**63 - 2)
    ),
    *zoneout_cases(projected_lstm_case, zoneout_c=0.75),
]
