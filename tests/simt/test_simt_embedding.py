"""CUDA kernels of embedding and activation_regularization on the simulated GPU.

They are compared with their oracles in both builds and in several orders of threads; the sums must
have the same bits in every order. Kernels with one changed line must be reported or give wrong
numbers.
"""

import platform
import shutil

import pytest
import torch
from fusedseq import reference
from fusedseq.testing import budget, plain_dtype

from tests.simt import build
from tests.simt.memory import Simulated

pytestmark = [
    pytest.mark.sampled_files("simulated GPU", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(build.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
]
SEEDS = pytest.mark.parametrize("seed", [0, 1, 2])
# In the order of the enum in csrc/cuda/type.h.
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Constants made smaller, so that small tensors need several blocks, tiles and steps of a thread.
SMALL = {
    "embedding.cu": {
        "TILE_TOKENS = 16": "TILE_TOKENS = 4",
        "THREADS = 256": "THREADS = 64",
        "LOADS = 4": "LOADS = 3",
    },
    "regularization.cu": {"TARGET_THREADS = 1 << 17": "TARGET_THREADS = 300"},
}
KEY, P = -7, 0.4


@pytest.fixture(params=["plain", "checked"])
def mode(request):
    return request.param


@pytest.fixture
def kernels(mode):
    with Simulated(build.library(mode, SMALL)) as simulated:
        yield simulated


@pytest.fixture
def changed(mode):
    """A function that compiles the kernels with one text in one source replaced."""
    used = []

    def change(source, old, new):
        used.append(Simulated(build.library(mode, {**SMALL, source: {**SMALL[source], old: new}})))
        return used[-1]

    yield change
    for simulated in used:
        simulated.__exit__()


def mask_arguments(p):
    return round(p * 2**32), 1 / (1 - p) if p < 1 else 0.0


def gather(kernels, ids, W, p, seed, misaligned=0):
    here, y = (
        kernels.copy(W, misaligned),
        kernels.empty((*ids.shape, W.size(1)), W.dtype, misaligned),
    )
    pointers = [
        t.data_ptr() for t in (kernels.copy(ids), here, y, kernels.copy(torch.tensor([KEY])))
    ]
    kernels.run(
        "embedding",
        TYPES.index(W.dtype),
        len(ids),
        *W.shape,
        *pointers,
        *mask_arguments(p),
        seed=seed,
    )
    return y.clone()


def scatter(kernels, ids, dy, V, p, seed, keys=None, misaligned=0):
    """The gradient of W as csrc/ops/embedding.cpp computes it.

    The ids are checked and converted to int32, sorted, and the rows of dy are summed by word.
    """
    N, E = dy.shape
    narrow = kernels.empty((N,), torch.int32)
    kernels.run("embedding_ids", N, V, kernels.copy(ids).data_ptr(), narrow.data_ptr(), seed=seed)
    words, order = (kernels.copy(t) for t in narrow.clone().sort(stable=True))
    keys = None if keys is None else kernels.copy(keys).data_ptr()
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    dW = kernels.copy(dy.new_zeros(V, E), misaligned)
    partial = kernels.empty((kernels.library.embedding_tiles(N), 2, E), wide)
    pointers = (
        words.data_ptr(),
        order.data_ptr(),
        keys,
        kernels.copy(dy, misaligned).data_ptr(),
        dW.data_ptr(),
    )
    more = partial.data_ptr(), kernels.copy(torch.tensor([KEY])).data_ptr(), *mask_arguments(p)
    kernels.run("embedding_backward", TYPES.index(dy.dtype), N, V, E, *pointers, *more, seed=seed)
    return dW.clone()


def oracle_gradient(ids, dy, V, p, dtype):
    W = torch.zeros(V, dy.size(1), dtype=dtype).requires_grad_()
    return torch.autograd.grad(reference.embedding(ids, W, p, KEY), W, dy.to(dtype))[0]


# N, V, E: rows whose size is a multiple of 16 bytes, of 2 elements, of neither; and more columns
# than a block has threads
SIZES = [
    (1, 1, 1),
    (5, 3, 4),
    (70, 9, 6),
    (33, 40, 17),
    (40, 4, 80),
    (9, 2, 330),
    (25, 1, 3),
    (3, 50, 131),
]


@SEEDS
@pytest.mark.parametrize("own", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gather_equals_its_oracle(kernels, size, own, seed):
    N, V, E = size
    ids, W = torch.arange(N).square() % V, torch.randn(V, E).to(own)
    for p, misaligned in ((0.0, 0), (P, 0), (P, 1), (1.0, 0)):
        assert torch.equal(
            gather(kernels, ids, W, p, seed, misaligned), reference.embedding(ids, W, p, KEY)
        )


@SEEDS
@pytest.mark.parametrize("own", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_scatter_computes_the_gradient(kernels, size, own, seed):
    N, V, E = size
    ids, dy = torch.arange(N).square() % V, torch.randn(N, E).to(own)
    for p, misaligned in ((0.0, 0), (P, 0), (P, 1), (1.0, 0)):
        exact = oracle_gradient(ids, dy, V, p, torch.float64)
        plain = oracle_gradient(ids, dy, V, p, plain_dtype(own))
        found = scatter(kernels, ids, dy, V, p, seed, misaligned=misaligned)
        assert ((found.double() - exact).abs() <= budget(exact, plain, own, N)).all()
        assert not found[exact == 0].any()  # the rows of dropped words and of words not in ids


@SEEDS
@pytest.mark.parametrize("own", TYPES, ids=str)
def test_compact_gradient(kernels, own, seed):
    """The gradient of the used words only; a word's mask depends on its number in the table."""
    ids, dy = torch.arange(37).square() % 90, torch.randn(37, 10).to(own)
    used, place = ids.unique(return_inverse=True)
    found = scatter(kernels, place, dy, len(used), P, seed, keys=used)
    assert torch.equal(found, scatter(kernels, ids, dy, 90, P, seed)[used])


def test_gradient_is_the_same_in_every_order_of_execution(kernels):
    ids, dy = torch.randint(5, (200,)), torch.randn(200, 7)
    found = [scatter(kernels, ids, dy, 6, 0.2, seed) for seed in range(6)]
    assert all(torch.equal(found[0], other) for other in found)


def test_dropped_words_may_be_nan(kernels):
    ids, nan = torch.arange(20) % 7, torch.full((20, 5), torch.nan)
    dropped = ~reference.dropout_mask(KEY, P, (7,))
    assert dropped.any()
    assert torch.equal(gather(kernels, ids, nan[:7], P, 1).isnan().any(1), ~dropped[ids])
    assert torch.equal(scatter(kernels, ids, nan, 7, P, 1).isnan().any(1), ~dropped)


@SEEDS
@pytest.mark.parametrize("bad", [-1, 7, 2**40])
def test_an_id_outside_of_the_table_stops_the_kernel(kernels, bad, seed):
    ids = torch.arange(40) % 7
    ids[23] = bad
    message = r"line \d+: assertion .*embedding: ids must be in \[0, V\)"
    with pytest.raises(RuntimeError, match=message):
        gather(kernels, ids, torch.zeros(7, 5), 0.5, seed)
    with pytest.raises(RuntimeError, match=message):
        scatter(kernels, ids, torch.zeros(40, 5), 7, 0.5, seed)


def test_sizes_too_large_for_the_grid_are_an_error(kernels):
    with pytest.raises(RuntimeError, match="more rows"):
        kernels.run("embedding", 0, 2**45, 4, 4, *[None] * 4, 0, 1.0, seed=0)
    with pytest.raises(RuntimeError, match="more ids or words"):
        kernels.run("embedding_ids", 4, 2**31, None, None, seed=0)


def regularized(kernels, dropped, raw, alpha, beta, seed, misaligned=0, dloss=0.7):
    """The loss, and its gradients with respect to `dropped` and `raw`, times `dloss`."""
    own, T = TYPES.index(dropped.dtype), len(dropped)
    N = dropped.numel() // T
    d, x = (kernels.copy(t, misaligned) for t in (dropped, raw))
    sizes = (
        own,
        T,
        N,
        d.data_ptr(),
        x.data_ptr(),
        alpha / (T * N),
        beta / ((T - 1) * N) if T > 1 else 0.0,
    )
    loss, upstream = (
        kernels.empty((1,), d.dtype),
        kernels.copy(torch.tensor([dloss], dtype=d.dtype)),
    )
    partial = kernels.empty(
        (2, kernels.library.activation_regularization_blocks(own, T, N)), torch.float64
    )
    kernels.run("activation_regularization", *sizes, loss.data_ptr(), partial.data_ptr(), seed=seed)
    grads = [kernels.empty(dropped.shape, dropped.dtype, misaligned) for _ in range(2)]
    pointers = upstream.data_ptr(), *(t.data_ptr() for t in grads)
    kernels.run("activation_regularization_backward", *sizes, *pointers, seed=seed)
    return [loss[0].clone(), *(t.clone() for t in grads)]


def oracle_regularized(dropped, raw, alpha, beta, dtype, dloss=0.7):
    given = [t.to(dtype).requires_grad_() for t in (dropped, raw)]
    loss = reference.activation_regularization(*given, alpha, beta)
    upstream = torch.tensor(dloss, dtype=dropped.dtype).to(dtype)
    return [loss.detach(), *torch.autograd.grad(loss, given, upstream)]


@SEEDS
@pytest.mark.parametrize("own", TYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (1, 3, 5), (2, 1, 1), (5, 3, 17), (7, 4, 300), (90, 1, 9), (3, 20, 130)],
    ids=str,
)
def test_activation_regularization_equals_its_oracle(kernels, shape, own, seed):
    dropped, raw = (torch.randn(shape).to(own) for _ in range(2))
    for misaligned in (0, 1):
        found = regularized(kernels, dropped, raw, 2.0, 1.0, seed, misaligned)
        plain, exact = (
            oracle_regularized(dropped, raw, 2.0, 1.0, t) for t in (plain_dtype(own), torch.float64)
        )
        for got, p, e in zip(found, plain, exact, strict=True):
            assert ((got.double() - e).abs() <= budget(e, p, own, dropped.numel())).all()


def test_the_loss_is_the_same_in_every_order_of_execution(kernels):
    dropped, raw = torch.randn(2, 9, 5, 77)
    found = [regularized(kernels, dropped, raw, 2.0, 1.0, seed) for seed in range(6)]
    assert all(torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))


# (source, old text, new text): the changed kernel gives wrong numbers, or fails
WORD_CUT_IN_TWO = (
    "embedding.cu",
    "from_before = begin > 0 && b.ids[begin - 1] == b.ids[begin]",
    "from_before = false",
)
PART_LOST = "embedding.cu", "k = tile + 1; k <= last", "k = tile + 1; k < last"
NO_CHECK = "embedding.cu", "  check_id(id, e.V);\n", ""
WRONG_WIDTH = "embedding.cu", "return E % N == 0 && ", "return "
NEIGHBOUR_LOST = (
    "regularization.cu",
    "double ar = 0, tar = 0;\n  if (s.n > 0) {\n    C before[N] = {};\n    if (s.begin > 0)",
    "double ar = 0, tar = 0;\n  if (s.n > 0) {\n    C before[N] = {};\n    if (s.begin > 1)",
)
REMOVED_BARRIER = (
    "regularization.cu",
    "  __syncthreads();\n  tar = block_sum<THREADS>(tar);\n  const int64_t block =",
    "  tar = block_sum<THREADS>(tar);\n  const int64_t block =",
)


@SEEDS
@pytest.mark.parametrize("mutation", [WORD_CUT_IN_TWO, PART_LOST], ids=["cut", "lost"])
def test_a_wrong_sum_is_reported(changed, mutation, seed):
    ids, dy = torch.zeros(30, dtype=torch.int64), torch.ones(30, 5)
    try:
        found = scatter(changed(*mutation), ids, dy, 2, 0.0, seed)
    except RuntimeError:  # the checked build reports that two threads write one row
        return
    assert not torch.equal(found[0], torch.full((5,), 30.0))


@SEEDS
def test_a_removed_check_is_reported(changed, mode, seed):
    ids = torch.tensor([1, 2, 8])
    try:
        found = gather(changed(*NO_CHECK), ids, torch.ones(7, 5), 0.0, seed)
    except RuntimeError:  # the checked build reports an access outside of a buffer
        return
    assert mode == "plain"
    assert not torch.equal(found, torch.ones(3, 5))


@pytest.mark.parametrize("mode", ["checked"])  # x86 allows misaligned accesses
def test_a_wide_access_to_ragged_rows_is_reported(changed, mode):
    with pytest.raises(RuntimeError, match=r"needs alignment to 16 bytes|outside of a buffer"):
        gather(changed(*WRONG_WIDTH), torch.tensor([1, 2, 6]), torch.ones(7, 5), 0.0, 0)


@SEEDS
def test_a_missing_neighbour_in_time_gives_wrong_numbers(changed, seed):
    raw = torch.ones(9, 1, 40)
    assert regularized(changed(*NEIGHBOUR_LOST), raw, raw, 0.0, 1.0, seed)[0] != 0


@pytest.mark.parametrize("mode", ["checked"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_removed_barrier_is_reported(changed, mode, seed):
    with pytest.raises(RuntimeError, match=r"race on shared memory.*block_sum\.cuh:\d+"):
        regularized(changed(*REMOVED_BARRIER), *torch.randn(2, 9, 1, 300), 1.0, 1.0, seed)


def test_a_gpu_without_code_in_this_build_is_an_error(kernels):
    kernels.device(capability=75)
    try:
        with pytest.raises(
            RuntimeError, match=r"compute capability 7\.5, only for 8\.0 9\.0 10\.0"
        ):
            gather(kernels, torch.tensor([1]), torch.ones(7, 5), 0.0, 0)
    finally:
        kernels.device()
