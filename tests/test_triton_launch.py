"""Launches of Triton's kernels that are like one before: without a GPU, by a driver whose launches are only written down."""

import pytest
import torch

triton = pytest.importorskip("triton")
from fusedseq import kernels  # noqa: E402
from fusedseq.kernels import attention_kept, launch  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import JITFunction, driver  # noqa: E402

LAUNCHES = []  # (the launcher of what was compiled, blocks, arguments)


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
    launcher_cls, utils = Launcher, Utils()

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture(autouse=True)
def written_down(monkeypatch):
    """CPU tensors as a GPU's; yields how many kernels Triton looked at anew."""
    if not isinstance(kernels.module("dropout_mask").mask_kernel, JITFunction):
        pytest.skip("under Triton's interpreter nothing is compiled")
    looked, run = [], JITFunction.run

    def counted(self, *args, **kwargs):
        looked.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", counted)
    monkeypatch.setattr(launch, "on_gpu", lambda x: True)
    monkeypatch.setattr(launch, "_kept", {})
    monkeypatch.setattr(attention_kept, "_kept", {})
    monkeypatch.setattr(driver, "_active", Driver(), raising=False)
    yield looked
    LAUNCHES.clear()


def launches(call):
    LAUNCHES.clear()
    call()
    return list(LAUNCHES)


def look(tree):
    """What a launch shows of an argument."""
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tree.shape, tree.stride(), tree.data_ptr() % 16
    return type(tree)(*map(look, tree)) if hasattr(tree, "_fields") else tree


def assert_same(first, second, inputs):
    """inputs: tensors that both calls were given"""
    assert len(first) == len(second) > 0
    addresses = {x.data_ptr() for x in inputs}
    for (launcher, blocks, args), (again, blocks_again, args_again) in zip(first, second, strict=True):
        assert launcher is again
        assert blocks == blocks_again
        assert list(map(look, args)) == list(map(look, args_again))
        for x, y in zip(args, args_again, strict=True):
            if isinstance(x, torch.Tensor) and x.data_ptr() in addresses:
                assert x.data_ptr() == y.data_ptr()


def heads(B, N, L, D, dtype=torch.bfloat16, offset=0):
    """(B, N, L, D) in memory as (B, L, N, D), so many elements behind an address that is a multiple of 16."""
    return torch.randn(B * L * N * D + offset, dtype=dtype)[offset:].view(B, L, N, D).transpose(1, 2)


def attention(
    q, k, v, dout, lengths=None, alibi=None, rope=None, bias=None, seed=None, dropout=0.0, scale=0.3, causal=False, needs=7
):  # fmt: skip
    """A forward and a backward call."""
    module, none = kernels.module("attention"), None
    out, lse = module.attention(q, k, v, bias, none, lengths, alibi, none, rope, none, seed, scale, causal, 0, dropout)
    module.attention_backward(
        dout, out, lse, q, k, v, bias, none, lengths, alibi, none, rope, seed, scale, causal, 0, dropout, needs
    )


SEED = torch.zeros((), dtype=torch.int64)
CALLS = {
    "packed": ((2, 3, 5, 32), {}),
    "packed, dropped": ((2, 3, 5, 32), {"seed": SEED, "dropout": 0.1, "lengths": torch.tensor([5, 3])}),
    "packed, a projection's gradient": ((2, 3, 5, 32), {"needs": 7 | 32}),
    "packed, positions": ((2, 3, 5, 32), {"alibi": torch.ones(3), "rope": torch.randn(9, 32)}),
    "packed, a bias": ((2, 3, 5, 32), {"bias": torch.randn(3, 5, 5)[None]}),
    "row": ((2, 3, 40, 20), {"causal": True}),
    "row, positions": ((2, 3, 40, 20), {"alibi": torch.ones(3), "rope": torch.randn(40, 20)}),
    "row, dropped": ((2, 3, 40, 20), {"seed": SEED, "dropout": 0.1}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32], ids=str)
def test_a_call_like_one_before(written_down, call, own):
    size, options = CALLS[call]
    inputs = [heads(*size, dtype=own) for _ in range(4)]
    options = {name: x.to(own) if name == "bias" else x for name, x in options.items()}
    if options.get("needs", 0) & 32:
        B, N, L, D = size
        inputs[:3] = torch.randn(B, L, 3, N, D).to(own).permute(2, 0, 3, 1, 4).unbind(0)
    first = launches(lambda: attention(*inputs, **options))
    looked = len(written_down)
    second = launches(lambda: attention(*inputs, **options))
    assert len(written_down) == looked == len(first)  # what it found was kept
    assert_same(first, second, inputs)
    attention_kept._kept.clear()
    launch._kept.clear()
    assert_same(launches(lambda: attention(*inputs, **options)), second, inputs)
    assert len(written_down) == 2 * looked


CHANGES = {
    "length": lambda: (heads(2, 3, 6, 32), heads(2, 3, 5, 32), heads(2, 3, 5, 32), heads(2, 3, 6, 32)),
    "strides": lambda: [torch.randn(2, 3, 5, 32).bfloat16() for _ in range(4)],
    "strides of the gradient": lambda: (*(heads(2, 3, 5, 32) for _ in range(3)), torch.randn(2, 3, 5, 32).bfloat16()),
    "dtype": lambda: [heads(2, 3, 5, 32, torch.float16) for _ in range(4)],
    "address": lambda: [heads(2, 3, 5, 32, offset=1) for _ in range(4)],
    "address of v alone": lambda: (heads(2, 3, 5, 32), heads(2, 3, 5, 32), heads(2, 3, 5, 32, offset=4), heads(2, 3, 5, 32)),
}  # fmt: skip
OPTIONS = {
    "causal": {"causal": True}, "scale": {"scale": 0.5}, "lengths": {"lengths": torch.tensor([5, 3])},
    "dropout": {"seed": SEED, "dropout": 0.2}, "gradients": {"needs": 3}, "slopes": {"alibi": torch.ones(3)},
    "slopes elsewhere": {"alibi": torch.ones(4)[1:]}, "slopes apart": {"alibi": torch.ones(6)[::2]},
    "a rope": {"rope": torch.randn(9, 32)}, "a narrow rope": {"rope": torch.randn(9, 32).bfloat16()},
    "lengths elsewhere": {"lengths": torch.tensor([1, 5, 3])[1:]}, "seed elsewhere": {"seed": torch.zeros(3, dtype=torch.int64)[1], "dropout": 0.2},
}  # fmt: skip


@pytest.mark.parametrize("change", [*CHANGES, *OPTIONS])
def test_a_call_unlike_those_before(change):
    """It is launched as it is where nothing has been kept."""
    plain = [heads(2, 3, 5, 32) for _ in range(4)]
    rich = {"alibi": torch.ones(3), "rope": torch.randn(9, 32)}
    for more in ({}, {"lengths": torch.tensor([5, 3])}, {"seed": SEED, "dropout": 0.1}, rich, {"alibi": torch.ones(3)}):
        attention(*plain, **more)
    inputs, options = CHANGES[change]() if change in CHANGES else plain, OPTIONS.get(change, {})
    after_others = launches(lambda: attention(*inputs, **options))
    attention_kept._kept.clear()
    launch._kept.clear()
    assert_same(launches(lambda: attention(*inputs, **options)), after_others, inputs)


def test_other_calls_are_not_kept(written_down):
    q, k, v, dout = (heads(2, 4, 5, 32), heads(2, 2, 5, 32), heads(2, 2, 5, 32), heads(2, 4, 5, 32))
    for _ in range(2):
        attention(q, k, v, dout)  # dk and dv are summed over a group
    assert len(written_down) == 2
    assert len(attention_kept._kept) == 1  # forward
    turned = torch.randn(2, 4, 32, 5).bfloat16().transpose(2, 3)
    attention(turned, turned, turned, turned)  # which is copied first
    assert len(attention_kept._kept) == 1


def test_any_length_of_a_cache(written_down):
    """What is compiled for any number is kept for any: a step of decoding looks at nothing anew."""
    module, (q, k, v, _) = kernels.module("attention"), (heads(2, 3, 200, 32) for _ in range(4))

    def step(S):
        nothing = [None] * 8  # no option that is a tensor
        return launches(lambda: module.attention(q[:, :, :1], k[:, :, :S], v[:, :, :S], *nothing, 0.3, False, 0, 0.0))

    step(130)
    looked = len(written_down)
    kept = {S: step(S) for S in (131, 150, 200)}
    assert len(written_down) == looked
    for S, found in kept.items():
        launch._kept.clear()
        assert_same(step(S), found, [q, k, v])
    assert len(written_down) > looked


def norm(x, w, seed, p):
    module = kernels.module("residual_layer_norm")
    y, s, mean, rstd = module.residual_layer_norm(x, x, w, w, p, 1e-5, False, seed)
    module.residual_layer_norm_backward(y, None, x, x, w, None, mean, rstd, p, seed, 15)


def test_launches_without_tuples(written_down):
    x, w, seed = torch.randn(6, 32).bfloat16(), torch.ones(32).bfloat16(), torch.zeros(1, dtype=torch.int64)
    first = launches(lambda: norm(x, w, seed, 0.1))
    second = launches(lambda: norm(x, w, seed, 0.1))
    assert len(written_down) == 2
    assert_same(first, second, [x, w, seed])
    for other in (
        (x[1:], w, seed, 0.1),
        (x, w, seed, 0.2),
        (x.float(), w.float(), seed, 0.1),
        (x.flatten()[1:161].view(5, 32), w, seed, 0.1),
    ):
        after_others = launches(lambda other=other: norm(*other))
        launch._kept.clear()
        assert_same(launches(lambda other=other: norm(*other)), after_others, [])


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(launch, "MOST", 3)
    for M in range(1, 9):
        norm(torch.randn(M, 32), torch.ones(32), torch.zeros(1, dtype=torch.int64), 0.0)
        assert len(launch._kept) <= 3
