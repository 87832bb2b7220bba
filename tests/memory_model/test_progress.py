"""No schedule of a resident grid leaves a block waiting for ever, and one that is not resident can
do so.
"""

import random

import pytest

from tests.memory_model.progress import Layer, Machine, run, stuck, words_stuck
from tests.memory_model.words import RESET_AFTER

# One layer: blocks, warps, steps, rounds. Every interleaving of these is visited.
GRIDS = [
    (1, 2, 3, 2),
    (2, 1, 3, 3),
    (2, 2, 2, 1),
    (3, 1, 2, 2),
    (4, 1, 3, 2),
    (3, 2, 1, 1),
    (4, 2, 1, 0),
]


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize(("blocks", "warps", "steps", "rounds"), GRIDS)
def test_a_resident_layer_finishes(blocks, warps, steps, rounds, forward):
    layer = Layer(blocks, warps, steps, rounds, forward)
    assert stuck(Machine([layer]))[0] is None


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_a_layer_finishes_whose_last_block_owns_no_columns_of_x(forward):
    layer = Layer(3, 1, 2, 3, forward, columns={"x": 2}, widths={"x": 4})
    assert list(layer.owners("x", 0, 4)) == [0, 1]
    assert stuck(Machine([layer]))[0] is None


def wavefront(forward, blocks=(1, 1), warps=1, steps=2, rounds=(1, 1), last_epoch=True):
    """Forward the second layer reads the first, backward the first reads the second. A block owns
    one column of h; the second layer's x is as wide as the first layer's h.
    """
    return [
        Layer(
            blocks[n],
            warps,
            steps,
            rounds[n],
            forward,
            reads=None if (n == 0) == forward else 1 - n,
            columns={"x": -(-blocks[0] // blocks[n])},
            widths={"x": blocks[0]},
            last_epoch=last_epoch,
        )
        for n in range(2)
    ]


WAVEFRONTS = [
    {"blocks": (1, 1), "warps": 2},
    {"blocks": (2, 2), "steps": 1},
    {"blocks": (1, 2), "rounds": (2, 1)},
    {"blocks": (2, 1), "rounds": (1, 2)},
]


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("sizes", WAVEFRONTS, ids=str)
def test_a_resident_wavefront_finishes(sizes, forward):
    assert stuck(Machine(wavefront(forward, **sizes)))[0] is None


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_without_the_last_epoch_the_other_layer_never_finishes(forward):
    assert stuck(Machine(wavefront(forward, last_epoch=False)))[0] is not None


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_a_grid_that_is_not_resident_can_be_stuck(forward):
    assert stuck(Machine([Layer(2, 1, 1, 1, forward)], resident=1))[0] is not None
    assert stuck(Machine(wavefront(forward), resident=1))[0] is not None


def test_a_wait_for_the_layer_that_waits_would_be_stuck():
    layers = [Layer(1, 1, 2, 1, reads=1), Layer(1, 1, 2, 1, reads=0)]
    assert stuck(Machine(layers))[0] is not None


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_large_grids_finish_under_random_schedules(forward):
    """What a warp waits for stays true, so no step takes another warp's step away: a grid that
    finishes under one schedule finishes under all. So few schedules are enough.
    """
    rng = random.Random(0)
    layer = Layer(13, 4, 3, 5, forward, columns={"x": 3}, widths={"x": 35})
    for machine in (
        Machine([layer]),
        Machine(wavefront(forward, blocks=(7, 7), warps=2, steps=3, rounds=(5, 4))),
    ):
        for choose in (rng.choice, lambda after: after[0], lambda after: after[-1]):
            assert machine.is_final(run(machine, choose))


# ---- words that carry their own validity

H = ("h",)
WORDS = [
    {"kinds": H * 6},
    {"kinds": H * 4, "warps": 2},
    {"kinds": H * 4, "blocks": 3},
    {"kinds": ("h", "x") * 4, "owners": {"x": (0,)}},
    {"kinds": ("h", "x", "h") * 3, "owners": {"x": (0,)}},
    {"kinds": ("h", "x") * 3, "owners": {"x": (0, 1)}, "blocks": 3},
    {"kinds": ("gates", "h", "x") * 3, "owners": {"x": (0,)}},
]


@pytest.mark.parametrize("grid", WORDS, ids=str)
def test_no_word_is_emptied_before_it_is_read(grid):
    assert words_stuck(reset_after=RESET_AFTER, **grid) is None


def test_a_word_that_is_emptied_one_use_later_would_be_missed():
    assert words_stuck(H * 3, reset_after=1) is not None
