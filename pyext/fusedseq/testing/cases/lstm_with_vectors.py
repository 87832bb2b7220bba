"""Cases of `peephole_lstm` and `layer_norm_lstm`."""

import torch

from fusedseq.testing.cases.case import Case, join, option_words
from fusedseq.testing.cases.lstm import ORDERS, SIZES, recurrent_inputs, with_order, zoneout_cases


def lstm_with_vectors_case(
    op, T, B, X, H, *, bias=True, lengths=None, starts=None, scale=1.0, **options
):
    """A case of `peephole_lstm` or `layer_norm_lstm`; its arguments are those of `lstm_case`."""

    def make(randn):
        *gates, h0, c0 = recurrent_inputs(randn, T, B, X, H, bias, scale)
        if op == "peephole_lstm":
            vectors = [scale * randn(3 * H)]
        else:
            gammas = [1 + 0.3 * randn(n * H) for n in (4, 4, 1)]
            vectors = [*gammas, 0.3 * randn(H)]
        return (*gates, *vectors, h0, c0), with_order(options, T, B, lengths, starts)

    name = join(
        f"T{T}-B{B}-X{X}-H{H}",
        "nobias" * (not bias),
        "lengths" * (lengths is not None),
        "starts" * (starts is not None),
        f"scale{scale:g}" * (scale != 1),
        *option_words(options),
    )
    return Case(op, name, make)


def cases(op, sizes):
    def case(*size, **options):
        return lstm_with_vectors_case(op, *size, **options)

    yield from (case(*size) for size in sizes)
    yield case(4, 3, 5, 7, bias=False)
    yield case(5, 4, 6, 5, lengths=[3, 0, 5, 1])
    yield case(33, 9, 20, 24, lengths=[33, 1, 2, 7, 0, 32, 16, 17, 5])
    yield case(3, 5, 40, 200)  # several tiles of columns
    yield case(3, 70, 33, 40)  # the threads share the rows
    yield case(9, 70, 33, 40, reverse=True)
    yield from (case(5, 4, 6, 5, **order) for order in ORDERS)
    for variational in (False, True):
        yield case(3, 2, 5, 7, weight_drop=0.5, variational=variational, seed=5)
    yield case(3, 2, 5, 7, weight_drop=0.5, seed=5, training=False)
    options = {"lengths": [3, 0, 5, 1], "weight_drop": 0.3, "seed": torch.tensor(2**63 - 2)}
    yield case(5, 4, 6, 5, bias=False, **options)
    yield from zoneout_cases(case, zoneout_h=0.25, zoneout_c=0.75)


CASES = [
    *cases("peephole_lstm", SIZES),
    # With one input or one unit, gradients through a norm are only rounding errors.
    *cases("layer_norm_lstm", [(1, 1, 3, 2), *(s for s in SIZES if s[2] > 1 and s[3] > 1)]),
    lstm_with_vectors_case("peephole_lstm", 3, 2, 5, 7, scale=30.0),  # saturated gates
    lstm_with_vectors_case("layer_norm_lstm", 3, 2, 5, 7, eps=0.5),
]
