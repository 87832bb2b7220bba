"""Operators with dropout and the regularizers of AWD-LSTM, by their published formulas.

The formulas are written in PyTorch with the mask of `dropout_mask`, and compared with the fused
operators and their oracles, results and gradients. Further: gradients of the embedding (dense,
sparse, tied), AR and TAR at their limits, modules in training and evaluation mode, residual layer
norm, and activations.
"""

import pytest
import torch
from fusedseq import fused, nn
from fusedseq.reference import dropout_mask
from torch.nn import functional as F

SEED = 2**35 + 1
PROBABILITIES = pytest.mark.parametrize("p", [0.0, 0.25, 0.6, 1.0])


def scaled_mask(shape, p, like):
    """bernoulli(1 - p) / (1 - p), which the published code draws; zeros for p = 1."""
    if p == 1:
        return like.new_zeros(shape)
    return dropout_mask(SEED, p, shape, like.device).to(like) / (1 - p)


def assert_equal(function, formula, x):
    """Compares results and gradients of x."""
    results = []
    for f in (function, formula):
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape)
        (grad,) = torch.autograd.grad(y, leaf, dy)
        results.append((y, grad.to_dense() if grad.is_sparse else grad))
    torch.testing.assert_close(*results)


@PROBABILITIES
def test_dropout(ops, p, device):
    x = torch.randn(3, 4, 5, device=device)
    assert_equal(lambda x: ops.dropout(x, p, SEED), lambda x: x * scaled_mask(x.shape, p, x), x)


@PROBABILITIES
def test_locked_dropout(ops, p, device):
    """salesforce/awd-lstm-lm: a (1, B, D) mask, expanded over time."""
    x = torch.randn(6, 4, 5, device=device)
    assert_equal(
        lambda x: ops.locked_dropout(x, p, SEED),
        lambda x: scaled_mask((1, 4, 5), p, x).expand_as(x) * x,
        x,
    )


@PROBABILITIES
def test_weight_drop(ops, p, device):
    W = torch.randn(12, 3, device=device)
    assert_equal(lambda W: ops.weight_drop(W, p, SEED), lambda W: W * scaled_mask(W.shape, p, W), W)


@PROBABILITIES
def test_variational_weight_drop(ops, p, device):
    """One random value for each row: `mask = dropout(ones(rows, 1)); w = mask.expand_as(raw) *
    raw`.
    """
    W = torch.randn(12, 3, device=device)

    def formula(W):
        return W * scaled_mask((12,), p, W)[:, None].expand_as(W)

    assert_equal(lambda W: ops.weight_drop(W, p, SEED, variational=True), formula, W)
    keep = (ops.weight_drop(torch.ones_like(W), 0.5, SEED, True) != 0).float().mean(1)
    assert set(keep.tolist()) == {0.0, 1.0}


@PROBABILITIES
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_embedding_dropout(ops, p, sparse, device):
    """salesforce/awd-lstm-lm: one random value for each word of the table, then the gather."""
    ids = torch.tensor([[0, 3, 3], [6, 0, 5]], device=device)
    W = torch.randn(7, 4, device=device)

    def formula(W):
        return F.embedding(ids, W * scaled_mask((7,), p, W)[:, None].expand_as(W))

    assert_equal(lambda W: ops.embedding(ids, W, p, SEED, sparse), formula, W)


def test_a_dropped_word_is_dropped_at_all_its_positions(ops, device):
    ids = torch.arange(20, device=device).repeat(3)
    y = ops.embedding(ids, torch.ones(20, 2, device=device), 0.5, SEED).reshape(3, 20, 2)
    assert torch.equal(y[0], y[1])
    assert torch.equal(y[0], y[2])
    assert 0 < (y[0] == 0).all(-1).sum() < 20


def test_embedding_gradient_of_words_not_used_is_zero(ops, device):
    W = torch.randn(1000, 3, device=device, requires_grad=True)
    ids = torch.tensor([5, 999, 5, 17], device=device)
    (grad,) = torch.autograd.grad(ops.embedding(ids, W).sum(), W)
    expected = torch.zeros(1000, 1, device=device)
    expected[ids.unique()] = torch.tensor([[2.0], [1.0], [1.0]], device=device)
    assert torch.equal(grad, expected.expand(1000, 3))


@pytest.mark.cpu
@pytest.mark.parametrize("tokens", [5, 5000], ids=["few rows used", "many rows used"])
@pytest.mark.parametrize("rows", [70_000, 530_000], ids=["68 MiB", "518 MiB"])
def test_embedding_gradient_of_a_large_table(rows, tokens):
    """A gradient of more than 64 MiB is in fresh memory if few rows are used. If many are used,
    one of at most 512 MiB is in memory that is reused: the second gradient here may be where the
    first one was, whose rows must not stay.
    """
    W = torch.empty(rows, 256, requires_grad=True)  # its values do not matter
    for _ in range(2):
        ids, dy = torch.randint(rows, (tokens,)), torch.randn(tokens, 256)
        (dW,) = torch.autograd.grad(fused.embedding(ids, W), W, dy)
        used, inverse = ids.unique(return_inverse=True)
        torch.testing.assert_close(dW[used], torch.zeros(len(used), 256).index_add_(0, inverse, dy))
        dW[used] = 0
        assert not dW.any()


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_sparse_gradient_has_the_rows_of_the_words_used(ops, p, device):
    W = torch.randn(1000, 3, device=device, requires_grad=True)
    ids = torch.tensor([[5, 999], [5, 17]], device=device)
    (sparse,) = torch.autograd.grad(ops.embedding(ids, W, p, SEED, sparse=True).square().sum(), W)
    assert sparse.layout == torch.sparse_coo
    assert sparse.shape == W.shape
    assert sparse.coalesce().indices().flatten().tolist() == [5, 17, 999]
    (dense,) = torch.autograd.grad(ops.embedding(ids, W, p, SEED).square().sum(), W)
    torch.testing.assert_close(sparse.to_dense(), dense)


def test_sparse_embedding_trains_with_sparse_adam(ops, device):
    module = nn.Embedding(50, 4, dropout=0.3, sparse=True, ops=ops).to(device)
    before = module.weight.detach().clone()
    optimizer = torch.optim.SparseAdam(module.parameters())
    module(torch.tensor([[3, 7]], device=device)).square().sum().backward()
    optimizer.step()
    changed = (module.weight != before).any(-1).nonzero().flatten().tolist()
    assert set(changed) <= {3, 7}


def test_gradients_of_a_tied_weight_accumulate(ops, device):
    """The decoder reads the weight without dropout; its gradient and the embedding's are summed."""
    module = nn.Embedding(11, 4, dropout=0.5, ops=ops).to(device)
    ids = torch.tensor([1, 2, 2], device=device)
    y = module(ids)
    logits = y.detach() @ module.weight.T
    (from_embedding,) = torch.autograd.grad(y.sum(), module.weight, retain_graph=True)
    (from_decoder,) = torch.autograd.grad(logits.square().sum(), module.weight, retain_graph=True)
    (y.sum() + logits.square().sum()).backward()
    torch.testing.assert_close(module.weight.grad, from_embedding + from_decoder)


def test_embedding_equals_torch_without_dropout(ops, device, dtype):
    W = torch.randn(7, 4, device=device, dtype=dtype)
    for shape in ((), (5,), (2, 3, 2), (0,)):
        ids = torch.randint(7, shape, device=device)
        assert torch.equal(ops.embedding(ids, W), F.embedding(ids, W))


def test_activation_regularization(ops, device):
    """salesforce/awd-lstm-lm's main.py: alpha scales the dropped output of the last layer, beta the
    raw.
    """
    dropped, raw = torch.randn(2, 6, 3, 5, device=device)
    expected = 2.0 * dropped.pow(2).mean() + 1.5 * (raw[1:] - raw[:-1]).pow(2).mean()
    torch.testing.assert_close(ops.activation_regularization(dropped, raw, 2.0, 1.5), expected)


def test_temporal_regularization_of_one_step_is_zero(ops, device):
    x = torch.randn(1, 3, 5, device=device, requires_grad=True)
    loss = ops.activation_regularization(x, x, 0.0, 1.0)
    assert loss == 0
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.zeros_like(x))


def test_regularization_of_the_same_tensor_twice(ops, device):
    """Without output dropout, `dropped` is `raw`: its gradient is the sum of both."""
    x = torch.randn(4, 3, 5, device=device, requires_grad=True)
    (both,) = torch.autograd.grad(ops.activation_regularization(x, x, 2.0, 1.0), x)
    (first,) = torch.autograd.grad(ops.activation_regularization(x, x.detach(), 2.0, 1.0), x)
    (second,) = torch.autograd.grad(ops.activation_regularization(x.detach(), x, 2.0, 1.0), x)
    torch.testing.assert_close(both, first + second)


MODULES = {
    "dropout": lambda ops: nn.Dropout(0.5, ops=ops),
    "locked_dropout": lambda ops: nn.LockedDropout(0.5, ops=ops),
    "weight_drop": lambda ops: nn.WeightDrop(0.5, ops=ops),
    "variational": lambda ops: nn.WeightDrop(0.5, variational=True, ops=ops),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_draw_a_mask_in_each_call_and_none_in_eval_mode(name, ops, device):
    module = MODULES[name](ops)
    x = torch.ones((64, 5) if name in ("weight_drop", "variational") else (4, 8, 5), device=device)
    assert not torch.equal(module(x), module(x))
    outputs = []
    for _ in range(2):
        torch.manual_seed(4)
        outputs.append(module(x))
    assert torch.equal(*outputs)
    assert torch.equal(module.eval()(x), x)


def test_embedding_module_in_eval_mode(ops, device):
    module = nn.Embedding(50, 3, dropout=0.5, ops=ops).to(device)
    ids = torch.arange(50, device=device)
    assert (module(ids) == 0).any()
    assert torch.equal(module.eval()(ids), module.weight)


@PROBABILITIES
def test_the_norm_has_the_mask_of_dropout(ops, p, device):
    """Bit for bit: with prenorm and without a residual, the second result is dropout(x)."""
    x = torch.randn(5, 3, 17, device=device)
    _, s = ops.residual_layer_norm(x, p=p, prenorm=True, seed=SEED)
    assert torch.equal(s, ops.dropout(x, p, SEED))


@PROBABILITIES
@pytest.mark.parametrize("prenorm", [False, True], ids=["post", "pre"])
def test_residual_layer_norm(ops, p, prenorm, device):
    residual = torch.randn(4, 6, device=device)
    weight, bias = torch.randn(2, 6, device=device)

    def formula(x):
        s = residual + x * scaled_mask(x.shape, p, x)
        centered = s - s.mean(-1, keepdim=True)
        y = centered / (centered.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight + bias
        return torch.cat([y, s]) if prenorm else y

    def operator(x):
        options = {"p": p, "eps": 1e-3, "prenorm": prenorm, "seed": SEED}
        y = ops.residual_layer_norm(x, residual, weight, bias, **options)
        return torch.cat(y) if prenorm else y

    assert_equal(operator, formula, torch.randn(4, 6, device=device))


def test_the_norm_of_constant_infinite_or_nan_rows_equals_torchs(ops, device):
    x = torch.ones(4, 9, device=device)
    x[1, 4], x[2, 3] = torch.nan, torch.inf
    x[3] = 1e20  # x^2 overflows, but not (x - mean)^2
    torch.testing.assert_close(ops.residual_layer_norm(x), F.layer_norm(x, (9,)), equal_nan=True)
    flat = ops.residual_layer_norm(x[:1], eps=0.0)
    torch.testing.assert_close(flat, F.layer_norm(x[:1], (9,), eps=0.0), equal_nan=True)


def test_the_norm_is_precise_far_from_zero(ops, device):
    x = (torch.randn(3, 700, device=device, dtype=torch.float64) + 1000).float()
    y = ops.residual_layer_norm(x)
    ulp_of_1000 = 2**-14
    expected = F.layer_norm(x.double(), (700,))
    torch.testing.assert_close(y.double(), expected, atol=ulp_of_1000, rtol=0)


def test_sums_over_rows_do_not_depend_on_threads(threads, device):
    """The gradients of weight, bias and b have the same bits with any number of threads."""
    x, w, b = torch.randn(5003, 33), torch.randn(33), torch.randn(33)

    def grads():
        leaves = [t.to(device).clone().requires_grad_() for t in (x, w, b)]
        y = fused.residual_layer_norm(leaves[0], None, *leaves[1:], p=0.2, seed=SEED)
        z = fused.bias_activation_dropout(y, leaves[2], "gelu", 0.3, SEED)
        return torch.autograd.grad(z.square().sum(), leaves)

    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(grads())
    assert all(torch.equal(a, b) for more in found[1:] for a, b in zip(found[0], more, strict=True))


@PROBABILITIES
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "tanh"])
def test_bias_activation_dropout(ops, p, activation, device):
    """gelu by the cumulative normal distribution, gelu_tanh by its published formula."""
    formulas = {
        "relu": lambda x: x.clamp(min=0),
        "gelu": lambda x: x * torch.special.ndtr(x),
        "gelu_tanh": lambda x: (
            0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
        ),
        "tanh": torch.tanh,
    }
    x, b = torch.randn(6, 7, device=device) * 3, torch.randn(7, device=device)
    assert_equal(
        lambda x: ops.bias_activation_dropout(x, b, activation, p, SEED),
        lambda x: formulas[activation](x + b) * scaled_mask(x.shape, p, x),
        x,
    )


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "tanh"])
def test_activations_of_extreme_values(ops, activation, device):
    values = [-1e30, -200.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 200.0, 1e30, torch.nan]
    x = torch.tensor(values, device=device)
    y = ops.bias_activation_dropout(x, None, activation)
    functions = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "tanh": torch.tanh,
    }
    torch.testing.assert_close(y, functions[activation](x), equal_nan=True)


def test_autocast_accepts_mixed_dtypes_as_torch_does(device):
    """Under autocast x, a product, is bf16; residual and parameters are fp32.

    The norm is then computed in fp32; bias_activation_dropout converts b to the dtype of x.
    """
    x = torch.randn(4, 6, dtype=torch.bfloat16, device=device)
    wide, b = torch.randn(4, 6, device=device), torch.randn(6, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = fused.residual_layer_norm(x, wide, b, b)
        z = fused.bias_activation_dropout(x, b)
    torch.testing.assert_close(y, F.layer_norm(x.float() + wide, (6,), b, b))
    assert torch.equal(z, fused.bias_activation_dropout(x, b.bfloat16()))
