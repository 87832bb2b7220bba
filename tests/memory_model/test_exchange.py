"""The exchange of the persistent kernels under the PTX memory model: no block reads an old or a
newer vector, no access races, and without any link of the protocol one of these happens.

`violations` enumerates all executions of small programs; `unproved` also covers larger ones.
docs/gpu-proofs.md explains both.
"""

import re

import pytest

from tests.memory_model.enumerate_executions import executions
from tests.memory_model.exchange import (
    INSTRUCTIONS,
    SLOTS,
    Exchange,
    Handover,
    partial_sums,
    unproved,
    violations,
)

ALL = ("h",) * 6


def vectors(direction, rounds, epochs):
    """The kinds of the vectors of each epoch: persistent_forward.cuh, persistent_backward.cuh"""
    on = ["xh"[k % 2] for k in range(rounds)]
    step = [*on, "h"] if direction == "forward" else ["gates", *reversed(on)]
    first = ["h"] if direction == "forward" else []
    return tuple((first + step * epochs)[:epochs])


def start(exchange):
    return {f"f{block}": exchange.initial for block in range(exchange.blocks)}


def is_proved(exchange):
    return not any(unproved(exchange.threads(), start(exchange)))


def found(exchange):
    """The first thing that goes wrong in any execution: its kind, or None."""
    return next((kind for kind, _ in violations(exchange.threads(), start(exchange))), None)


# ---- the protocol as it is


@pytest.mark.parametrize("x_owners", [(0, 1), (0,)], ids=["every block owns x", "not every"])
@pytest.mark.parametrize("rounds", range(6))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_vector_arrives_and_none_is_overwritten_early(direction, rounds, x_owners):
    """Enough epochs for every kind of vector to use a slot twice."""
    kinds = vectors(direction, rounds, SLOTS * (rounds + 1) + 2)
    lanes = 2 if rounds < 3 else 1
    assert is_proved(Exchange(warps=2, lanes=lanes, vectors=kinds, owners={"x": x_owners}))


def test_three_blocks():
    owners = {"x": (0, 1)}
    assert is_proved(Exchange(blocks=3, warps=2, vectors=vectors("forward", 3, 10), owners=owners))


@pytest.mark.parametrize(
    "exchange",
    [
        Exchange(lanes=1, vectors=ALL),
        Exchange(lanes=2, vectors=ALL[:4]),
        Exchange(warps=2, lanes=2, vectors=ALL[:4]),
        Exchange(warps=2, lanes=1, vectors=("h", "x") * 3, owners={"x": (0,)}),
        Exchange(blocks=3, lanes=2, vectors=ALL[:2]),
    ],
    ids=repr,
)
def test_no_execution_of_a_small_program_goes_wrong(exchange):
    assert is_proved(exchange)
    assert found(exchange) is None


# ---- slots


@pytest.mark.parametrize("rounds", range(6))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_three_slots_would_be_enough(direction, rounds):
    kinds = vectors(direction, rounds, 3 * (rounds + 1) + 2)
    assert is_proved(Exchange(warps=2, lanes=1, vectors=kinds, owners={"x": (0,)}, slots=3))
    assert SLOTS >= 3


def test_two_slots_would_be_too_few():
    """Nobody waits for a block that owns no columns of x when x is exchanged. So block 0 may be two
    epochs ahead of block 1, and overwrites the h that block 1 still reads.
    """
    kinds = vectors("forward", 1, 4)
    exchange = Exchange(vectors=kinds, owners={"x": (0,)}, slots=2)
    assert any(kind == "early" for kind, _ in violations(exchange.threads()))
    assert is_proved(Exchange(vectors=kinds, slots=2))


def test_one_slot_would_be_too_few():
    assert any(
        kind == "early" for kind, _ in violations(Exchange(vectors=ALL[:3], slots=1).threads())
    )


# ---- each link


def changed(name, old, new):
    assert old in INSTRUCTIONS[name]
    return {name: INSTRUCTIONS[name].replace(old, new)}


NECESSARY = {
    "publish barrier": {"publish barrier": ""},
    "release": changed("release", "release", "relaxed"),
    "release of scope gpu": changed("release", "gpu", "cta"),
    "acquire": changed("acquire", "acquire", "relaxed"),
    "acquire of scope gpu": changed("acquire", "gpu", "cta"),
    "__syncwarp": {"syncwarp": ""},
    "wait for the epoch": changed("acquire", "{epoch}", "1"),
}
REDUNDANT = {
    "store relaxed": changed("store", "relaxed.gpu", "weak"),
    "load relaxed": changed("load", "relaxed.gpu", "weak"),
    "barrier before the sums, as far as the exchange goes": {"sum barrier": ""},
}


@pytest.mark.parametrize("link", NECESSARY)
def test_without_a_link_a_vector_is_stale(link):
    exchange = Exchange(warps=2, lanes=2, vectors=ALL[:2], instructions=NECESSARY[link])
    assert not is_proved(exchange)
    assert any(kind == "stale" for kind, _ in violations(exchange.threads(), start(exchange)))


def test_flags_of_an_earlier_launch_would_be_believed():
    """Hence the memset before every launch."""
    assert found(Exchange(vectors=ALL[:2], initial=7)) == "stale"


@pytest.mark.parametrize("link", REDUNDANT)
def test_links_that_the_memory_model_does_not_need(link):
    owners = {"x": (0,)}
    for rounds in range(4):
        kinds = vectors("forward", rounds, SLOTS * (rounds + 1) + 2)
        exchange = Exchange(warps=2, vectors=kinds, owners=owners, instructions=REDUNDANT[link])
        assert is_proved(exchange)


def test_guaranteed_order_needs_flags_of_a_wide_enough_scope():
    """Fences of scope gpu do not help where the flag itself has the scope of a block."""
    fences = {
        "release": "fence.acq_rel.gpu; st.relaxed.cta [{flag}], {epoch}",
        "acquire": "ld.relaxed.gpu {register}, [{flag}] until >= {epoch}; fence.acq_rel.gpu",
    }
    exchange = Exchange(vectors=ALL[:2], instructions=fences)
    assert not is_proved(exchange)
    assert found(exchange) == "stale"


def test_with_the_fewest_slots_the_barrier_before_the_sums_orders_reuse():
    kinds = vectors("forward", 0, 4)
    without = {"sum barrier": ""}
    assert is_proved(Exchange(warps=2, vectors=kinds, slots=2))
    assert found(Exchange(warps=2, vectors=kinds, slots=2, instructions=without))


def test_fences_beside_relaxed_flags_would_do_the_same():
    fences = {
        "release": "fence.acq_rel.gpu; " + INSTRUCTIONS["release"].replace("release", "relaxed"),
        "acquire": INSTRUCTIONS["acquire"].replace("acquire", "relaxed") + "; fence.acq_rel.gpu",
    }
    assert is_proved(Exchange(warps=2, vectors=ALL, instructions=fences))
    for name in fences:
        instructions = fences | {name: fences[name].replace("fence.acq_rel.gpu", "")}
        assert found(Exchange(vectors=ALL[:2], instructions=instructions)) == "stale"


# ---- two layers


@pytest.mark.parametrize("rounds", range(6))
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_the_other_layer_reads_what_was_handed_over(forward, rounds):
    assert not any(unproved(Handover(forward, rounds, steps=3).threads()))


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_no_execution_of_a_small_wavefront_goes_wrong(forward):
    assert not any(violations(Handover(forward, rounds=0).threads()))


HANDOVER_LINKS = {name: NECESSARY[name] for name in NECESSARY if name != "wait for the epoch"}


@pytest.mark.parametrize("link", HANDOVER_LINKS)
@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_without_a_link_what_is_handed_over_is_stale(forward, link):
    handover = Handover(forward, rounds=0, steps=1, instructions=HANDOVER_LINKS[link])
    assert any(kind == "stale" for kind, _ in violations(handover.threads()))


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_the_epoch_that_the_other_layer_waits_for(forward):
    """One epoch less is too early, and without the last epoch the last wait has no end."""
    early = Handover(forward, rounds=0, early=1)
    assert any(kind == "stale" for kind, _ in violations(early.threads()))
    assert not any(executions(Handover(forward, rounds=0, last_epoch=False).threads()))


# ---- partial sums in shared memory


def test_partial_sums_are_read_whole():
    assert not any(unproved(partial_sums()))
    assert not any(violations(partial_sums()))


@pytest.mark.parametrize("link", ["sum barrier", "publish barrier"])
def test_without_a_barrier_partial_sums_are_wrong(link):
    wanted = {"sum barrier": "stale", "publish barrier": "early"}[link]
    assert any(kind == wanted for kind, _ in violations(partial_sums(without=link)))


def test_every_instruction_of_the_protocol_is_varied():
    varied = {name for change in (*NECESSARY.values(), *REDUNDANT.values()) for name in change}
    assert varied == set(INSTRUCTIONS)
    assert all(re.match(r"(ld|st|bar)\.", text) for text in INSTRUCTIONS.values())
