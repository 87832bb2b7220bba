"""Every operator with a dimension of size zero: its results and gradients are the oracle's, also
where memory that it does not write holds NaN, or it refuses the size in a sentence of its own.
"""

import math

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.testing import check
from fusedseq.testing.cases.mogrifier_lstm_pair import LAYER_ARGUMENTS

pytestmark = pytest.mark.usefixtures("_filled_with_nan")


def linear(M, K, N):
    return (torch.randn(M, K), torch.randn(N, K), torch.randn(N)), {}


def lstm(T, B, X, H):
    state = torch.randn(B, H), torch.randn(B, H)
    W_ih, W_hh, b = torch.randn(4 * H, X), torch.randn(4 * H, H), torch.randn(4 * H)
    return (torch.randn(T, B, X), W_ih, W_hh, b, *state), {}


def bidirectional_lstm(T, B, X, H):
    forward, reverse = lstm(T, B, X, H)[0], lstm(T, B, X, H)[0]
    return (*forward, *reverse[1:]), {}


def projected_lstm(T, B, X, H, P):
    x, W_ih, _, b, _, c0 = lstm(T, B, X, H)[0]
    return (x, W_ih, torch.randn(4 * H, P), torch.randn(P, H), b, torch.randn(B, P), c0), {}


def mogrifier_lstm(T, B, X, H, rounds):
    Q, R = torch.randn((rounds + 1) // 2, X, H), torch.randn(rounds // 2, H, X)
    weights = (Q if rounds > 0 else None, R if rounds > 1 else None, None, None)
    return (*lstm(T, B, X, H)[0], *weights), {"rounds": rounds}


def attention(B, N, L, S, D):
    return (torch.randn(B, N, L, D), torch.randn(B, N, S, D), torch.randn(B, N, S, D)), {}


def attention_with_options(B, N, L, S, D):
    options = {"bias": torch.randn(N, L, S), "relative_keys": torch.randn(3, D), "causal": True}
    return attention(B, N, L, S, D)[0], options


def residual_layer_norm(M, D):
    return (torch.randn(M, D), torch.randn(M, D), torch.randn(D), torch.randn(D)), {}


def bias_activation_dropout(M, D):
    return (torch.randn(M, D), torch.randn(D), "gelu", 0.5, 1), {}


def dropout(M, D):
    return (torch.randn(M, D), 0.5, 1), {}


def locked_dropout(T, B, H):
    return (torch.randn(T, B, H), 0.5, 1), {}


def embedding(M, V, E):
    return (torch.zeros(M, dtype=torch.int64), torch.randn(V, E)), {"p": 0.5, "seed": 1}


def linear_cross_entropy(N, E, V):
    return (torch.randn(N, E), torch.randn(V, E), torch.zeros(N, dtype=torch.int64)), {}


def mogrifier_lstm_pair(T, B, X, H, H_2):
    calls = mogrifier_lstm(T, B, X, H, 3), mogrifier_lstm(T, B, H, H_2, 2)
    layers = [dict(zip(LAYER_ARGUMENTS, args[1:], strict=True)) | more for args, more in calls]
    return (calls[0][0][0], *layers), {}


def split_cross_entropy(N, E, V, K):
    splits = tuple(range(1, V))[:K]
    tombstones = torch.randn(K, E) if K else None
    target = torch.arange(N) % max(V, 1)
    return (torch.randn(N, E), torch.randn(V, E), target, tombstones, splits, torch.randn(V)), {}


def weight_drop(M, D):
    return (torch.randn(M, D), 0.5, 1), {}


def activation_regularization(T, B, H):
    return (torch.randn(T, B, H), torch.randn(T, B, H), 2.0, 1.0), {}


# The sizes of a call of each builder; every one in turn becomes zero.
SIZES = {
    linear: {"M": 20, "K": 16, "N": 7},
    lstm: {"T": 2, "B": 3, "X": 4, "H": 5},
    bidirectional_lstm: {"T": 2, "B": 3, "X": 4, "H": 5},
    projected_lstm: {"T": 2, "B": 3, "X": 4, "H": 5, "P": 6},
    mogrifier_lstm: {"T": 2, "B": 3, "X": 4, "H": 5, "rounds": 5},
    attention: {"B": 2, "N": 2, "L": 3, "S": 4, "D": 8},
    attention_with_options: {"B": 1, "N": 2, "L": 20, "S": 40, "D": 8},
    residual_layer_norm: {"M": 3, "D": 5},
    bias_activation_dropout: {"M": 3, "D": 5},
    dropout: {"M": 3, "D": 5},
    locked_dropout: {"T": 2, "B": 3, "H": 5},
    embedding: {"M": 4, "V": 6, "E": 5},
    linear_cross_entropy: {"N": 4, "E": 5, "V": 6},
    mogrifier_lstm_pair: {"T": 2, "B": 3, "X": 4, "H": 5, "H_2": 6},
    split_cross_entropy: {"N": 4, "E": 5, "V": 6, "K": 2},
    weight_drop: {"M": 3, "D": 5},
    activation_regularization: {"T": 2, "B": 3, "H": 5},
}
# The sizes that an operator refuses.
REFUSED = {
    ("linear_cross_entropy", "E"),
    ("linear_cross_entropy", "V"),
    ("embedding", "V"),  # an id has no row
    ("lstm", "T"),
    ("lstm", "X"),
    ("lstm", "H"),
    ("bidirectional_lstm", "T"),
    ("bidirectional_lstm", "X"),
    ("bidirectional_lstm", "H"),
    *(("projected_lstm", size) for size in "TXHP"),
    ("mogrifier_lstm", "T"),
    ("mogrifier_lstm", "X"),
    ("mogrifier_lstm", "H"),
    ("mogrifier_lstm_pair", "T"),
    ("mogrifier_lstm_pair", "X"),
    ("mogrifier_lstm_pair", "H"),
    ("mogrifier_lstm_pair", "H_2"),
    ("split_cross_entropy", "E"),
    ("split_cross_entropy", "V"),
    ("activation_regularization", "T"),
}


@pytest.fixture
def _filled_with_nan():
    """Memory that torch allocates is filled with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def fill_freed_memory_with_nan(*sizes):
    """Allocates blocks of many sizes, and of `sizes` elements, writes NaN to them and frees them
    again, so that the allocators hand them out next."""
    blocks = [torch.full((n,), math.nan) for n in (*range(1, 600, 8), *sizes) for _ in range(6)]
    assert torch.stack([block[0] for block in blocks]).isnan().all()
    del blocks


@pytest.mark.parametrize(
    ("build", "name"),
    [(build, name) for build in SIZES for name in SIZES[build]],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_size_of_zero(build, name):
    args, kwargs = build(**(SIZES[build] | {name: 0}))
    op = build.__name__.removesuffix("_with_options")
    if (op, name) in REFUSED:
        checked = op.removesuffix("_pair")  # the operator that checks the layers of a pair
        with pytest.raises((ValueError, IndexError), match=rf"^{checked}: \w+ must"):
            getattr(fused, op)(*args, **kwargs)
        return
    fill_freed_memory_with_nan()
    if op == "activation_regularization":
        # Means over no elements: NaN, as the oracle's.
        loss = getattr(fused, op)(*args, **kwargs)
        assert loss.isnan()
        assert getattr(reference, op)(*args, **kwargs).isnan()
        return
    check(op, args, kwargs)


def test_a_linear_map_of_no_features_is_its_bias(dtype, device):
    x, W = (
        torch.randn(3, 0, dtype=dtype, device=device),
        torch.randn(4, 0, dtype=dtype, device=device),
    )
    b = torch.randn(4, dtype=dtype, device=device)
    assert torch.equal(fused.linear(x, W, b), b.expand(3, 4))
    assert torch.equal(fused.linear(x, W), torch.zeros_like(b).expand(3, 4))
    assert "fusedseq.reference.linear" in fused.explain("linear", x, W, b)


@pytest.mark.parametrize("residual", [False, True], ids=["x alone", "residual"])
def test_a_norm_of_no_features_is_empty(residual, device):
    x, weight = torch.randn(3, 0, device=device), torch.ones(0, device=device)
    options = {"residual": x if residual else None, "p": 0.5, "seed": 1, "prenorm": True}
    y, s = fused.residual_layer_norm(x, weight=weight, bias=weight, **options)
    assert y.shape == s.shape == (3, 0)
    assert "fusedseq.reference" in fused.explain("residual_layer_norm", x)


@pytest.mark.cpu
def test_a_linear_map_to_no_features_has_an_exact_gradient():
    """The gradient of x is a sum of no terms: zero, on every path of the product."""
    for M in (1, 5, 20, 300):
        for K in (7, 64):
            x, W, dy = torch.randn(M, K), torch.randn(0, K), torch.randn(M, 0)
            fill_freed_memory_with_nan(M * K)
            dx, dW, db = torch.ops.fusedseq.linear_backward(dy, x, W, 7)
            assert torch.equal(dx, torch.zeros(M, K))
            assert dW.shape == (0, K)
            assert db.shape == (0,)
