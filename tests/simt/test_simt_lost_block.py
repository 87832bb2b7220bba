"""Waits that come to no end, on the simulated GPU: a block that loses one of its epochs.

The kernel must end itself, and the error must name the waiting block, the awaited one and the
epochs (csrc/cuda/recurrence/lost_wait.h). The bound on polls is made smaller here, so that the
kernel ends before the simulation reports a loop without end.
"""

import platform
import re
import shutil

import pytest
import torch

from tests.simt import build
from tests.simt.memory import Simulated
from tests.simt.recurrence import operators
from tests.simt.test_simt_persistent import SMALL
from tests.simt.test_simt_recurrence import mogrifier
from tests.simt.test_simt_wavefront import pair

pytestmark = [
    pytest.mark.sampled_files("simulated GPU", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(build.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
]
# {direction: (source, what publishes an epoch there, the same without epoch 3 of block 1)}
LOST = {
    "forward": (
        "persistent_forward.cuh",
        "    } else {\n      g.publish(epoch);",
        "    } else if (epoch != 3 || g.block != 1) {\n      g.publish(epoch);",
    ),
    "backward": (
        "persistent_backward_step.cuh",
        "  publish();\n\n  // After the release: dz",
        "  if (epoch != 3 || g.block != 1) publish();\n\n  // After the release: dz",
    ),
}
FEW_POLLS = {"lost_wait.h": {"MAX_POLLS = 1u << 26": "MAX_POLLS = 5000"}}
MESSAGE = (
    r"block \d+ \(warp group \d\) read the flag of block {} 5000 times for epoch 3, and it shows "
    r"epoch 2\. .*the CUDA context of this process is gone.* must be restarted"
)


def lost_in(direction):
    """The library in which block 1 of a layer does not publish its epoch 3."""
    source, old, new = LOST[direction]
    return build.library("plain", {**SMALL, **FEW_POLLS, source: {old: new}})


def run(kernels, op, order, args, kwargs, engine="persistent"):
    """Runs an operator forward and backward."""
    leaves = [t.requires_grad_() for t in args if isinstance(t, torch.Tensor)]
    found = operators(kernels, order, engine)[op](*args, **kwargs)
    y = found[0][0] if op == "mogrifier_lstm_pair" else found[0]
    return torch.autograd.grad(y.float().square().sum(), leaves, allow_unused=True)


@pytest.fixture(params=["forward", "backward"])
def lost(request):
    with Simulated(lost_in(request.param)) as kernels:
        yield kernels
        kernels.forget_lost_wait()


@pytest.mark.parametrize("order", range(4))
def test_a_lost_block_is_an_error_that_names_it(lost, order):
    lost.device(sms=4)
    with pytest.raises(RuntimeError, match=MESSAGE.format(1)):
        run(lost, "mogrifier_lstm", order, *mogrifier((4, 5, 9, 17), torch.bfloat16, rounds=5))


def test_the_group_that_waits_is_named(lost):
    lost.device(sms=6)
    with pytest.raises(RuntimeError, match=r"warp group [01]\) read the flag of block 1 "):
        run(lost, "mogrifier_lstm", 1, *mogrifier((2, 33, 20, 33), torch.bfloat16, rounds=3))


@pytest.mark.parametrize("order", range(3))
def test_a_lost_block_of_a_wavefront(lost, order):
    """Any wait may be the first to give up: for block 1, or for a block that waits for it."""
    lost.device(sms=8)
    with pytest.raises(RuntimeError, match=r"waited without end.* must be restarted"):
        run(lost, "mogrifier_lstm_pair", order, *pair((4, 5, 9, 17, 12), torch.bfloat16))


# Blocks of the first layer (H 17) on half of 8 multiprocessors: 5 or 6 columns each.
FIRST_LAYER = {"forward": 4, "backward": 4}
# {direction: (the layer that is left out, the epoch for which the other one waits first)}
OTHER_LAYER = {"forward": (0, 6), "backward": (1, 4)}


@pytest.mark.parametrize("direction", OTHER_LAYER)
def test_blocks_of_the_other_layer_have_their_numbers_in_the_grid(direction):
    """The blocks of one layer end at once, so that the other layer waits for them alone."""
    left_out, epoch = OTHER_LAYER[direction]
    name = f"{direction.title()}Block<S, WavefrontVariant"
    changes = {"wavefront.cu": {f"  {name}": f"  if (l != {left_out}) {name}"}}
    path = build.library("plain", {**SMALL, **FEW_POLLS, **changes})
    with Simulated(path) as kernels:
        kernels.device(sms=8)
        with pytest.raises(RuntimeError, match=f"for epoch {epoch}, and it shows epoch 0") as error:
            run(kernels, "mogrifier_lstm_pair", 0, *pair((4, 5, 9, 17, 12), torch.bfloat16))
        kernels.forget_lost_wait()
    numbers = re.search(r"block (\d) .* of block (\d)", str(error.value)).groups()
    waiting, awaited = (int(number) >= FIRST_LAYER[direction] for number in numbers)
    assert (waiting, awaited) == (left_out == 0, left_out == 1)


def test_later_calls_give_the_reason(lost):
    """As on a GPU, every call after the lost one fails."""
    lost.device(sms=4)
    args, kwargs = mogrifier((4, 5, 9, 17), torch.bfloat16, rounds=5)
    with pytest.raises(RuntimeError, match="without end"):
        run(lost, "mogrifier_lstm", 1, args, kwargs)
    # Without lost.run, which stands in for a new process.
    tensors = [lost.empty((4, 5), torch.float32).data_ptr() for _ in range(2)]
    key = lost.copy(torch.tensor([1]))
    error = lost.library.dropout(0, 4, 5, 1, *tensors, key.data_ptr(), 1, 1.0, False)
    assert "must be restarted" in error.decode()
