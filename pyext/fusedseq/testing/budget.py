"""The error budget: how far a kernel's result may be from the oracle's.

The oracle of an operator is its definition in plain PyTorch, `fusedseq.reference.<op>`. Three
results are compared:

    got      of the kernel, computed in the operator's dtype
    plain    of the oracle, computed in the same dtype
    exact    of the oracle, computed in fp64

`got` is right if its error against `exact` is at most `budget`: twice the error that `plain` itself
has, plus the roundings that no implementation can avoid. Random masks do not depend on the dtype,
so dropout stays on in all three.
"""

import math
from collections.abc import Iterable, Sequence

import torch

# Of the activations of cuDNN's recurrences in fp32, relative to the largest element: its tanh and
# sigmoid have fewer bits. Measured on an H200 with cuDNN 9: results differ by up to 2e-5.
CUDNN_ERROR = 1e-4
# Of a norm of one column: what a fused multiply-add leaves of a product less its rounded self,
# times 1 / sqrt(eps).
ONE_COLUMN_ERROR = 1e-4
RECURRENT = (  # operators of one layer
    "bidirectional_lstm",
    "gru",
    "layer_norm_gru",
    "layer_norm_lstm",
    "lstm",
    "mogrifier_lstm",
    "peephole_lstm",
    "projected_lstm",
    "rnn",
)


def budget(exact: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype, terms: int) -> float:
    """The largest error allowed against `exact` for a result that was computed in `dtype`.

    It is the sum of

    - twice the largest error of `plain` against `exact`, and more in a tensor of n elements where n
      is small: (1 + 2 / n) times that, since the largest of few errors may be small by chance;
    - one rounding of the largest element of `exact` to `dtype`. This is the dtype in which products
      were rounded, even where the result has a wider one;
    - a random walk of `terms` roundings of the largest element in the dtype of the accumulators
      (fp32 or wider). A blocked sum does not round as the oracle's does, and the oracle's own error
      in a small tensor may be zero by luck.

    For fp64, `plain` is computed in fp32 and its error is scaled to the unit roundoff of fp64.
    `exact` is fp64 too and has an error of the same size, so three times that error is allowed
    instead of twice.
    """
    if exact.numel() == 0:
        return 0.0
    eps = torch.finfo(dtype).eps
    accumulator_eps = min(eps, torch.finfo(torch.float32).eps)
    scale = exact.abs().max().item()
    plain_error = (plain.double() - exact).abs().max().item()
    plain_error *= eps / torch.finfo(plain_dtype(dtype)).eps
    factor = (3 if dtype == torch.float64 else 2) * (1 + 2 / exact.numel())
    sums = 2 * accumulator_eps * math.sqrt(terms) * scale
    return factor * plain_error + 2 * eps * scale + sums


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which `plain` is computed for an operator that runs in `dtype`: see `budget`."""
    return torch.float32 if dtype == torch.float64 else dtype


def assert_within_budget(
    name: str,
    got: torch.Tensor,
    plain: torch.Tensor,
    exact: torch.Tensor,
    dtype: torch.dtype,
    terms: int,
    more: float = 0.0,
    spread: torch.Tensor | None = None,
) -> float:
    """Asserts that `got` agrees with the oracle in shape, device, layout and dtype, and in value.

    name: names the tensor in error messages    plain, exact, dtype, terms: as for `budget`
    more: a further error that is allowed, relative to 1 and to the largest element
    spread: a further error that is allowed in each element, see `ties.py`
    returns the largest error as a fraction of the budget
    """
    assert got.layout == plain.layout, f"{name}: layout {got.layout}, the oracle's: {plain.layout}"
    got, plain, exact = (dense(t.detach()) for t in (got, plain, exact))
    shapes = tuple(got.shape), tuple(exact.shape)
    assert shapes[0] == shapes[1], f"{name}: shape {shapes[0]}, the oracle's: {shapes[1]}"
    assert got.device == exact.device, f"{name}: on {got.device}, the oracle's: on {exact.device}"
    if not exact.is_floating_point():
        assert got.dtype == exact.dtype, f"{name}: {got.dtype}, must be {exact.dtype}"
        # Of a prediction, the class with the largest logit: two logits can be equal in 16 bits.
        assert ((got == exact) | (got == plain)).all(), f"{name}: differs from the oracle"
        return 0.0
    required = dtype if dtype == torch.float64 else plain.dtype
    assert got.dtype == required, f"{name}: {got.dtype}, must be {required}"
    if got.numel() == 0:
        return 0.0
    allowed = budget(exact, plain, dtype, terms) + more * (1 + exact.abs().max().item())
    error = (got.double() - exact).abs().nan_to_num(math.inf)
    if spread is not None:
        error = (error - spread).clamp(min=0)
    worst = error.argmax()
    index = tuple(int(i) for i in torch.unravel_index(worst, error.shape))
    assert error.max() <= allowed, (
        f"{name}: error {error.max():.3g} > budget {allowed:.3g}, scale {exact.abs().max():.3g}: "
        f"element {index} of {tuple(error.shape)} is {got.flatten()[worst]:.9g}, "
        f"the oracle's is {exact.flatten()[worst]:.9g}"
    )
    return (error.max() / allowed).item() if allowed else 0.0


def dense(t: torch.Tensor) -> torch.Tensor:
    return t.to_dense() if t.is_sparse else t


def longest_sum(tensors: Iterable[torch.Tensor]) -> int:
    """The most terms in one sum of a matrix product, over a last dimension or over all others."""
    sizes = [(t.size(-1), t.numel() // t.size(-1)) for t in tensors if t.dim() and t.numel()]
    return max((n for pair in sizes for n in pair), default=1)


def roundings(op: str, args: Sequence, leaves: Sequence[torch.Tensor]) -> int:
    """How many roundings may add up in one element of a result or gradient: `terms` of `budget`.

    args: the operator's positional arguments    leaves: its inputs that have a gradient
    """
    if op == "projected_lstm":
        return 2 * longest_sum(leaves) * len(args[0])  # two products of each of T steps
    if op in RECURRENT:
        return longest_sum(leaves) * len(args[0])  # the products of each of T steps
    if op == "mogrifier_lstm_pair":
        return 2 * longest_sum(leaves) * len(args[0])  # the same for two layers
    if op == "linear":
        return longest_sum(leaves)
    if op == "attention":
        (B, N, L, D), S = leaves[0].shape, leaves[1].size(2)
        # The gradients of a bias and of relative keys are sums over batch and heads.
        return (L + S + D) * max(1, B * N if len(leaves) > 3 else 1)
    if op == "attention_varlen":
        return leaves[0].size(0) + leaves[1].size(0) + leaves[0].size(-1)  # as of one sequence
    if op in ("residual_layer_norm", "bias_activation_dropout"):
        return max(leaves[0].numel(), 1)  # sums over one row, or over all of them
    if op in ("linear_cross_entropy", "split_cross_entropy"):
        return longest_sum(leaves) + len(args[1])  # the product, and the sum over V classes
    if op in ("embedding", "activation_regularization"):
        return args[0].numel()  # one sum over the positions of a word, or over the activations
    return 1  # one product
