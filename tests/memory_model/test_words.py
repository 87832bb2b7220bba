"""The exchange by words that carry their own validity, under the PTX memory model: no block reads
an old or a newer word, no access races, and without any link of the protocol one of these happens.

`violations` enumerates all executions of small programs; `unproved_words` also covers larger ones.
docs/gpu-proofs.md explains both.
"""

import re

import pytest

from tests.memory_model.enumerate_executions import executions
from tests.memory_model.exchange import violations
from tests.memory_model.test_exchange import vectors
from tests.memory_model.words import (
    FENCE_PERIOD,
    RESET_AFTER,
    SLOTS,
    WORD_INSTRUCTIONS,
    Words,
    unproved_words,
)

ENOUGH_SLOTS = 9  # persistent_exchange.cuh says so


def is_proved(words):
    return not any(unproved_words(words.threads()))


def found(words):
    """The kinds of what goes wrong in any execution."""
    return {kind for kind, _ in violations(words.threads())}


def epochs(direction, rounds, slots):
    """Enough epochs for every kind of vector to use every slot twice, and two more steps."""
    of_step = vectors(direction, rounds, 2 * (rounds + 1) + 2)[2 : rounds + 3]
    fewest = min(of_step.count(kind) for kind in set(of_step))
    return vectors(direction, rounds, (-(-(slots + 2) // fewest) + 2) * (rounds + 1))


# ---- the protocol as it is


@pytest.mark.parametrize("x_owners", [(0, 1), (0,)], ids=["every block owns x", "not every"])
@pytest.mark.parametrize("rounds", range(6))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_word_arrives_and_none_is_overwritten_early(direction, rounds, x_owners):
    kinds = epochs(direction, rounds, SLOTS)
    assert is_proved(Words(warps=2, vectors=kinds, owners={"x": x_owners}))


@pytest.mark.parametrize("first", range(FENCE_PERIOD))
def test_the_first_epoch_may_stand_anywhere_between_two_fences(first):
    """A kind that comes into use later, while only another kind was exchanged."""
    kinds = ("g",) * first + epochs("forward", 1, SLOTS)
    assert is_proved(Words(warps=2, vectors=kinds, owners={"x": (0,)}))


def test_three_blocks():
    owners = {"x": (0, 1)}
    kinds = epochs("forward", 1, SLOTS)
    assert is_proved(Words(blocks=3, warps=2, vectors=kinds, owners=owners))


SMALL = {"slots": 4, "fence_period": 1}


@pytest.mark.parametrize(
    "words",
    [
        Words(vectors=("h",) * 12, **SMALL),
        Words(vectors=("h",) * 8, warps=2, **SMALL),
        Words(vectors=("h",) * 6, lanes=2, **SMALL),
        Words(vectors=("h",) * 6, blocks=3, **SMALL),
        Words(vectors=("h", "x") * 5, owners={"x": (0,)}, **SMALL),
        Words(vectors=("h",) * 12, slots=5, fence_period=2),
        Words(vectors=("h",) * 2 * ENOUGH_SLOTS, slots=ENOUGH_SLOTS),
    ],
    ids=repr,
)
def test_no_execution_of_a_small_program_goes_wrong(words):
    assert is_proved(words)
    assert any(executions(words.threads()))
    assert not found(words)


# ---- slots


@pytest.mark.parametrize("rounds", range(6))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_so_many_slots_would_be_enough(direction, rounds):
    kinds = epochs(direction, rounds, ENOUGH_SLOTS)
    assert is_proved(Words(warps=2, vectors=kinds, owners={"x": (0,)}, slots=ENOUGH_SLOTS))
    assert SLOTS >= ENOUGH_SLOTS
    text = (SLOTS, RESET_AFTER, FENCE_PERIOD)
    assert text == (16, 2, 4)  # the header's comment is about these


@pytest.mark.parametrize(
    ("slots", "fence_period"), [(3, 1), (4, 2), (ENOUGH_SLOTS - 1, FENCE_PERIOD)]
)
def test_one_slot_less_would_be_too_few(slots, fence_period):
    """A consumer polls the slot before the reset of its old word must have arrived."""
    words = Words(vectors=("h",) * 2 * slots, slots=slots, fence_period=fence_period)
    assert not is_proved(words)
    assert "stale" in found(words)
    assert is_proved(Words(vectors=("h",) * 3 * slots, slots=slots + 1, fence_period=fence_period))


# ---- each link


def changed(name, old, new):
    assert old in WORD_INSTRUCTIONS[name]
    return {name: WORD_INSTRUCTIONS[name].replace(old, new)}


NECESSARY = {  # what becomes possible without it
    "reset": ("stale", {"reset": ""}),
    "fence": ("stale", {"fence": ""}),
    "fence of scope gpu": ("stale", changed("fence", "gpu", "cta")),
    "fence that acquires": ("stale", changed("fence", "acq_rel", "release")),
    "fence that releases": ("stale", changed("fence", "acq_rel", "acquire")),
    "strong store": ("stale", changed("store", "relaxed.gpu", "weak")),
    "store of scope gpu": ("stale", changed("store", "gpu", "cta")),
    "strong load": ("stale", changed("load", "relaxed.gpu", "weak")),
    "load of scope gpu": ("stale", changed("load", "gpu", "cta")),
    "strong reset": ("race", changed("reset", "relaxed.gpu", "weak")),
}
REDUNDANT = {"barrier after the stores": {"publish barrier": ""}, "__syncwarp": {"syncwarp": ""}}


@pytest.mark.parametrize("link", NECESSARY)
@pytest.mark.parametrize("warps", [1, 2])
def test_without_a_link_a_word_is_wrong(link, warps):
    kind, instructions = NECESSARY[link]
    words = Words(vectors=("h",) * 5, warps=warps, instructions=instructions, **SMALL)
    assert kind in found(words)
    assert kind == "race" or not is_proved(words)


@pytest.mark.parametrize("link", REDUNDANT)
def test_links_that_the_memory_model_does_not_need(link):
    """The barrier after the stores keeps the partial sums; __syncwarp is of no use to the words."""
    for rounds in range(3):
        kinds = epochs("forward", rounds, SLOTS)
        owners = {"x": (0,)}
        words = Words(warps=2, vectors=kinds, owners=owners, instructions=REDUNDANT[link])
        assert is_proved(words)


def test_guaranteed_order_needs_the_barrier_before_the_sums():
    """It joins what the warps of a block have read, before the block stores its next words."""
    without = {"sum barrier": "", "publish barrier": ""}
    assert not is_proved(Words(vectors=("h",) * 8, warps=2, instructions=without, **SMALL))
    assert is_proved(Words(vectors=("h",) * 8, warps=2, **SMALL))


def test_every_instruction_of_the_protocol_is_varied():
    varied = {name for _, change in NECESSARY.values() for name in change}
    varied |= {name for change in REDUNDANT.values() for name in change} | {"sum barrier"}
    assert varied == set(WORD_INSTRUCTIONS)
    assert all(re.match(r"(ld|st|bar|fence)\.", text) for text in WORD_INSTRUCTIONS.values())
