"""Cached launches of Triton kernels equal uncached ones, checked without a GPU by a driver that
records launches."""

import itertools

import pytest
import torch

triton = pytest.importorskip("triton")
from fusedseq import kernels  # noqa: E402
from fusedseq.kernels import launch  # noqa: E402
from fusedseq.kernels.attention import launch_cache  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import JITFunction, driver  # noqa: E402

LAUNCHES = []  # (the launcher of the compiled kernel, blocks, arguments)


class Utils:
    def load_binary(self, name, binary, shared, device):
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}


class Launcher:
    def __init__(self, source, metadata):
        pass

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *args):
        assert (y, z) == (1, 1)
        LAUNCHES.append((self, x, args))


class Driver:
    """Stands in for Triton's CUDA driver."""

    launcher_cls, utils = Launcher, Utils()

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def clear_caches():
    launch_cache._cache.clear()
    launch._cache.clear()


@pytest.fixture(autouse=True)
def specialized(monkeypatch):
    """Treats CPU tensors as a GPU's. Yields the kernels, one entry for each launch that Triton
    itself specialized."""
    if not isinstance(kernels.module("dropout_mask").mask_kernel, JITFunction):
        pytest.skip("Triton's interpreter compiles nothing")
    specialized, run = [], JITFunction.run

    def counting_run(self, *args, **kwargs):
        specialized.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", counting_run)
    monkeypatch.setattr(launch, "on_gpu", lambda x: True)
    monkeypatch.setattr(launch, "_cache", {})
    monkeypatch.setattr(launch_cache, "_cache", {})
    monkeypatch.setattr(driver, "_active", Driver(), raising=False)
    yield specialized
    LAUNCHES.clear()


def launches(call):
    LAUNCHES.clear()
    call()
    return list(LAUNCHES)


def description(argument):
    """Returns what distinguishes an argument for a launch: of a tensor not its address, but its
    alignment."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.shape, argument.stride(), argument.data_ptr() % 16
    if hasattr(argument, "_fields"):
        return type(argument)(*map(description, argument))
    return argument


def assert_same(first, second, inputs):
    """Asserts that two lists of launches are equal.    inputs: the tensors that both calls
    received"""
    assert len(first) == len(second) > 0
    addresses = {x.data_ptr() for x in inputs}
    for (launcher, blocks, args), (other_launcher, other_blocks, other_args) in zip(
        first, second, strict=True
    ):
        assert launcher is other_launcher
        assert blocks == other_blocks
        assert list(map(description, args)) == list(map(description, other_args))
        for x, y in zip(args, other_args, strict=True):
            if isinstance(x, torch.Tensor) and x.data_ptr() in addresses:
                assert x.data_ptr() == y.data_ptr()


def heads(B, N, L, D, dtype=torch.bfloat16, offset=0):
    """Returns a (B, N, L, D) tensor stored as (B, L, N, D), `offset` elements after an address
    that is a multiple of 16."""
    numbers = torch.randn(B * L * N * D + offset, dtype=dtype)
    return numbers[offset:].view(B, L, N, D).transpose(1, 2)


def attention(
    q,
    k,
    v,
    dout,
    lengths=None,
    alibi=None,
    rope=None,
    rope_interleaved=True,
    bias=None,
    seed=None,
    dropout=0.0,
    scale=0.3,
    causal=False,
    needs=7,
    mask=None,
):
    """A forward and a backward call."""
    module, none = kernels.module("attention"), None
    inputs = q, k, v, bias, mask, lengths, alibi, none, rope, rope_interleaved
    settings = seed, scale, causal, 0, dropout
    out, lse = module.attention(*inputs, none, *settings)
    module.attention_backward(dout, out, lse, *inputs, *settings, needs)


SEED = torch.zeros((), dtype=torch.int64)
GRADIENT_OF_PROJECTION = 64  # the bit QKV of `needs`
CALLS = {
    "packed": ((2, 3, 5, 32), {}),
    "packed-dropout": (
        (2, 3, 5, 32),
        {"seed": SEED, "dropout": 0.1, "lengths": torch.tensor([5, 3])},
    ),
    "packed-projection": ((2, 3, 5, 32), {"needs": 7 | GRADIENT_OF_PROJECTION}),
    "packed-positions": ((2, 3, 5, 32), {"alibi": torch.ones(3), "rope": torch.randn(9, 32)}),
    "packed-bias": ((2, 3, 5, 32), {"bias": torch.randn(3, 5, 5)[None]}),
    "row": ((2, 3, 40, 20), {"causal": True}),
    "row-positions": ((2, 3, 40, 20), {"alibi": torch.ones(3), "rope": torch.randn(40, 20)}),
    "row-dropout": ((2, 3, 40, 20), {"seed": SEED, "dropout": 0.1}),
    "row-mask": ((2, 3, 40, 20), {"mask": torch.ones(2, 1, 1, 40, dtype=torch.bool)}),
    "tiled": ((1, 2, 140, 20), {"causal": True}),
    "tiled-dropout": (
        (2, 2, 140, 20),
        {
            "seed": SEED,
            "dropout": 0.1,
            "lengths": torch.tensor([140, 3]),
            "rope": torch.ones(140, 4),
        },
    ),
    "tiled-bias": ((2, 2, 140, 20), {"bias": torch.randn(2, 140, 140)[None], "needs": 15}),
    "tiled-queries": ((1, 2, 140, 20), {"mask": torch.ones(1, 2, 1, 140) > 0, "needs": 1}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("torch_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_repeated_call_is_cached_and_equals_the_first(specialized, call, torch_dtype):
    size, options = CALLS[call]
    inputs = [heads(*size, dtype=torch_dtype) for _ in range(4)]
    options = {name: x.to(torch_dtype) if name == "bias" else x for name, x in options.items()}
    if options.get("needs", 0) & GRADIENT_OF_PROJECTION:
        B, N, L, D = size
        inputs[:3] = torch.randn(B, L, 3, N, D).to(torch_dtype).permute(2, 0, 3, 1, 4).unbind(0)
    first = launches(lambda: attention(*inputs, **options))
    assert len(launch_cache._cache) == 2  # forward and backward
    count = len(specialized)
    second = launches(lambda: attention(*inputs, **options))
    assert len(specialized) == count == len(first)  # the second call specialized nothing
    assert_same(first, second, inputs)
    clear_caches()
    assert_same(launches(lambda: attention(*inputs, **options)), second, inputs)
    assert len(specialized) == 2 * count


SMALL = 2, 3, 5, 32
CHANGED_TENSORS = {
    "length": lambda: (heads(2, 3, 6, 32), heads(*SMALL), heads(*SMALL), heads(2, 3, 6, 32)),
    "strides": lambda: [torch.randn(SMALL).bfloat16() for _ in range(4)],
    "strides-of-dout": lambda: (*(heads(*SMALL) for _ in range(3)), torch.randn(SMALL).bfloat16()),
    "dtype": lambda: [heads(*SMALL, torch.float16) for _ in range(4)],
    "alignment": lambda: [heads(*SMALL, offset=1) for _ in range(4)],
    "alignment-of-v": lambda: (
        heads(*SMALL),
        heads(*SMALL),
        heads(*SMALL, offset=4),
        heads(*SMALL),
    ),
}
CHANGED_OPTIONS = {
    "causal": {"causal": True},
    "scale": {"scale": 0.5},
    "lengths": {"lengths": torch.tensor([5, 3])},
    "dropout": {"seed": SEED, "dropout": 0.2},
    "needs": {"needs": 3},
    "alibi": {"alibi": torch.ones(3)},
    "alibi-alignment": {"alibi": torch.ones(4)[1:]},
    "alibi-stride": {"alibi": torch.ones(6)[::2]},
    "rope": {"rope": torch.randn(9, 32)},
    "rope-halves": {"rope": torch.randn(9, 32), "rope_interleaved": False},
    "rope-width": {"rope": torch.randn(9, 16)},
    "rope-dtype": {"rope": torch.randn(9, 32).bfloat16()},
    "lengths-alignment": {"lengths": torch.tensor([1, 5, 3])[1:]},
    "seed-alignment": {"seed": torch.zeros(3, dtype=torch.int64)[1], "dropout": 0.2},
}


@pytest.mark.parametrize("change", [*CHANGED_TENSORS, *CHANGED_OPTIONS])
def test_changed_call_is_launched_as_with_empty_caches(change):
    """A difference that the compiled code depends on never hits the cache entry of an earlier
    call."""
    plain = [heads(*SMALL) for _ in range(4)]
    for earlier in (
        {},
        {"lengths": torch.tensor([5, 3])},
        {"seed": SEED, "dropout": 0.1},
        {"alibi": torch.ones(3), "rope": torch.randn(9, 32)},
        {"alibi": torch.ones(3)},
    ):
        attention(*plain, **earlier)
    inputs = CHANGED_TENSORS[change]() if change in CHANGED_TENSORS else plain
    options = CHANGED_OPTIONS.get(change, {})
    after_others = launches(lambda: attention(*inputs, **options))
    clear_caches()
    assert_same(launches(lambda: attention(*inputs, **options)), after_others, inputs)


@pytest.mark.parametrize(
    ("option", "right", "wrong"),
    [
        ("alibi", torch.ones(3), torch.ones(1)),
        ("rope", torch.randn(9, 32), torch.randn(2, 32)),
        ("lengths", torch.tensor([5, 3]), torch.tensor([5])),
    ],
)
def test_a_wrong_shape_is_refused_after_a_right_one(option, right, wrong):
    inputs = [heads(*SMALL) for _ in range(4)]
    attention(*inputs, **{option: right})
    with pytest.raises(RuntimeError, match="key_lengths" if option == "lengths" else option):
        attention(*inputs, **{option: wrong})


LONG = 1, 2, 140, 20
BIAS = torch.randn(2, 2, 140, 140).bfloat16()
CHANGED_BIASES = {
    "mask": {"mask": torch.ones(1, 1, 1, 140) > 0},
    "shape": {"bias": BIAS[:1, :1], "needs": 15},
    "strides": {"bias": BIAS[:1].transpose(2, 3), "needs": 15},
    "alignment": {"bias": torch.randn(2 * 140 * 140 + 3).bfloat16()[3:].view(1, 2, 140, 140)},
    "alignment of 32 bytes": {
        "bias": torch.randn(2 * 140 * 140 + 8).bfloat16()[8:].view(1, 2, 140, 140)
    },
    "dtype": {"bias": BIAS[:1].float()},
    "no gradient": {"bias": BIAS[:1]},
    "gradient of the bias alone": {"bias": BIAS[:1], "needs": 8},
    "dropout": {"bias": BIAS[:1], "seed": SEED, "dropout": 0.1},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", CHANGED_BIASES)
def test_changed_bias_is_launched_as_with_empty_caches(change):
    inputs, options = [heads(*LONG) for _ in range(4)], CHANGED_BIASES[change]
    attention(*inputs)
    attention(*inputs, bias=BIAS[:1], needs=15)
    after_others = launches(lambda: attention(*inputs, **options))
    clear_caches()
    assert_same(launches(lambda: attention(*inputs, **options)), after_others, inputs)


def test_tiles_of_a_table_are_used_after_a_call_with_others(monkeypatch):
    inputs = [heads(*LONG) for _ in range(4)]
    found = [launches(lambda: attention(*inputs))]
    for tiles in ((32, 32, 64, 4, 1), (16, 32, 64, 4, 1)):
        for kernel in ("forward", "keys", "queries"):
            monkeypatch.setitem(kernels.tiles, (64, 0, kernel), tiles)
        found.append(launches(lambda: attention(*inputs)))
    for one, other in itertools.combinations(found, 2):
        differs = [a[1] != b[1] or a[0] is not b[0] for a, b in zip(one, other, strict=True)]
        assert differs == [True, False, True, True]  # all but the kernel for delta


def test_lse_of_another_alignment_is_launched_as_with_empty_caches():
    module, (q, k, v, dout) = kernels.module("attention"), (heads(*LONG) for _ in range(4))
    settings = *[None] * 6, True, None, 0.3, False, 0, 0.0

    def backward(lse):
        return launches(lambda: module.attention_backward(dout, q, lse, q, k, v, *settings, 7))

    backward(torch.zeros(1, 2, 140))
    lse = torch.zeros(281)[1:].view(1, 2, 140)
    after_another = backward(lse)
    clear_caches()
    assert_same(backward(lse), after_another, [q, k, v, dout, lse])


def test_calls_that_need_copies_or_sums_are_not_cached(specialized):
    q, k, v, dout = (heads(2, 4, 5, 32), heads(2, 2, 5, 32), heads(2, 2, 5, 32), heads(2, 4, 5, 32))
    for _ in range(2):
        attention(q, k, v, dout)  # backward sums dk and dv over a group of query heads
    assert len(specialized) == 2
    assert len(launch_cache._cache) == 1  # forward
    transposed = torch.randn(2, 4, 32, 5).bfloat16().transpose(2, 3)
    attention(transposed, transposed, transposed, transposed)  # the launcher copies them first
    assert len(launch_cache._cache) == 1


def test_decoding_step_of_any_length_uses_one_kernel(specialized):
    """A kernel that is compiled for any number is cached for any number: no step of decoding
    specializes again."""
    module, (q, k, v, _) = kernels.module("attention"), (heads(2, 3, 200, 32) for _ in range(4))

    def step(S):
        nothing, settings = [None] * 6, (0.3, False, 0, 0.0)  # the options that are tensors
        tensors = q[:, :, :1], k[:, :, :S], v[:, :, :S], *nothing
        return launches(lambda: module.attention(*tensors, True, None, None, *settings))

    step(130)
    count = len(specialized)
    cached = {S: step(S) for S in (131, 150, 200)}
    assert len(specialized) == count
    for S, found in cached.items():
        clear_caches()
        assert_same(step(S), found, [q, k, v])
    assert len(specialized) > count


def norm(x, w, seed, p):
    """A forward and a backward call of residual_layer_norm."""
    module = kernels.module("residual_layer_norm")
    y, s, mean, rstd = module.residual_layer_norm(x, x, w, w, p, 1e-5, False, seed)
    module.residual_layer_norm_backward(y, None, x, x, w, None, mean, rstd, p, seed, 15)


def test_kernels_without_tuple_arguments_are_cached(specialized):
    x, w = torch.randn(6, 32).bfloat16(), torch.ones(32).bfloat16()
    seed = torch.zeros(1, dtype=torch.int64)
    first = launches(lambda: norm(x, w, seed, 0.1))
    second = launches(lambda: norm(x, w, seed, 0.1))
    assert len(specialized) == 2
    assert_same(first, second, [x, w, seed])
    for other in (
        (x[1:], w, seed, 0.1),
        (x, w, seed, 0.2),
        (x.float(), w.float(), seed, 0.1),
        (x.flatten()[1:161].view(5, 32), w, seed, 0.1),
    ):
        after_others = launches(lambda other=other: norm(*other))
        launch._cache.clear()
        assert_same(launches(lambda other=other: norm(*other)), after_others, [])


def test_cache_size_is_bounded(monkeypatch):
    monkeypatch.setattr(launch, "MAX_CACHED", 3)
    for M in range(1, 9):
        norm(torch.randn(M, 32), torch.ones(32), torch.zeros(1, dtype=torch.int64), 0.0)
        assert len(launch._cache) <= 3
