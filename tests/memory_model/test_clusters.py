"""The exchange in clusters of two blocks under the PTX memory model: no copy takes an old or a
newer vector, no thread reads an old or a newer stage of a ring, no access races, and each link of
the protocol is needed to show this.

The model has neither proxies nor asynchronous copies: clusters.py says what stands for them, and
docs/gpu-proofs.md what is therefore assumed.
"""

import re

import pytest

from tests.memory_model.clusters import CLUSTER_INSTRUCTIONS, Clusters
from tests.memory_model.enumerate_executions import executions
from tests.memory_model.exchange import SLOTS, unproved, violations
from tests.memory_model.test_exchange import vectors


def is_proved(clusters):
    return not any(unproved(clusters.threads()))


def found(clusters):
    """The first thing that goes wrong in any execution: its kind, or None."""
    return next((kind for kind, _ in violations(clusters.threads())), None)


# ---- the protocol as it is


@pytest.mark.parametrize(
    ("x_owners", "stages"), [((0, 1, 2, 3), 2), ((0,), 1)], ids=["every block owns x", "not every"]
)
@pytest.mark.parametrize("rounds", range(3))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_vector_arrives_and_no_stage_is_overwritten_early(
    direction, rounds, x_owners, stages
):
    """Enough epochs for every kind of vector to use a slot twice. With one cluster a block would
    copy its own columns alone; with two it copies those of two blocks.
    """
    kinds = vectors(direction, rounds, SLOTS * (rounds + 1) + 2)
    owners = {"x": x_owners}
    assert is_proved(Clusters(clusters=2, lanes=1, stages=stages, vectors=kinds, owners=owners))


@pytest.mark.parametrize("stages", [1, 2])
def test_two_clusters_with_two_warps(stages):
    """Each warp reads the columns of two blocks, and each block copies those of one."""
    kinds = vectors("forward", 1, 10)
    owners = {"x": (0, 1, 2)}
    assert is_proved(Clusters(clusters=2, warps=2, stages=stages, vectors=kinds, owners=owners))
    assert is_proved(Clusters(clusters=2, stages=stages, vectors=kinds, owners={"x": (0,)}))


@pytest.mark.parametrize(
    "clusters",
    [
        Clusters(vectors=("h",) * 2),
        Clusters(vectors=("h",) * 2, owners={"h": (1,)}),  # block 0 copies what block 1 owns
        Clusters(vectors=("h", "x"), owners={"x": (0,)}),
    ],
    ids=repr,
)
def test_no_execution_of_a_small_program_goes_wrong(clusters):
    assert any(executions(clusters.threads()))
    assert not found(clusters)


# ---- slots


@pytest.mark.parametrize("rounds", range(3))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_three_slots_would_be_enough(direction, rounds):
    """As without clusters, although a block waits for the flags of one half alone."""
    kinds = vectors(direction, rounds, 3 * (rounds + 1) + 2)
    assert is_proved(Clusters(clusters=2, lanes=1, vectors=kinds, owners={"x": (0,)}, slots=3))


def test_one_slot_would_be_too_few():
    assert not is_proved(Clusters(clusters=2, vectors=("h",) * 4, slots=1))


# ---- each link


def changed(name, old, new):
    assert old in CLUSTER_INSTRUCTIONS[name]
    return {name: CLUSTER_INSTRUCTIONS[name].replace(old, new)}


NECESSARY = {  # without it, guaranteed order does not show that every read is right
    "barrier before the flag": {"publish barrier": ""},
    "release": changed("release", "release", "relaxed"),
    "release of scope gpu": changed("release", "gpu", "cluster"),
    "acquire": changed("acquire", "acquire", "relaxed"),
    "acquire of scope gpu": changed("acquire", "gpu", "cluster"),
    "__syncwarp after the wait": {"syncwarp": ""},
    "arrival that releases": changed("arrive", "release", "relaxed"),
    "arrival of scope cluster": changed("arrive", "cluster", "cta"),
    "wait that acquires": changed("wait", "acquire", "relaxed"),
    "wait of scope cluster": changed("wait", "cluster", "cta"),
    "__syncwarp after the reads": {"read syncwarp": ""},
    "release of a stage": changed("free", "release", "relaxed"),
    "release of a stage of scope cluster": changed("free", "cluster", "cta"),
    "wait for the release of a stage": {"free wait": ""},
    "wait for the release of a stage that acquires": changed("free wait", "acquire", "relaxed"),
    "wait for the release of a stage of scope cluster": changed("free wait", "cluster", "cta"),
}
# Some links matter only with two warps in a block, others only with two lanes that wait for flags.
LARGER = {"clusters": 2, "warps": 2, "vectors": ("h",) * 5}


@pytest.mark.parametrize("link", NECESSARY)
def test_without_a_link_guaranteed_order_does_not_show_it(link):
    without = {"instructions": NECESSARY[link]}
    programs = LARGER, {"clusters": 2, "vectors": ("h",) * 4}
    assert all(is_proved(Clusters(**program)) for program in programs)
    assert not all(is_proved(Clusters(**program, **without)) for program in programs)


STALE = (  # in all executions of two blocks and one or two vectors
    "release",
    "acquire",
    "arrival that releases",
    "wait that acquires",
    "arrival of scope cluster",
    "wait of scope cluster",
)


@pytest.mark.parametrize("link", STALE)
def test_without_a_link_an_execution_goes_wrong(link):
    program = {"vectors": ("h",), "owners": {"h": (1,)}}
    assert not found(Clusters(**program))
    assert found(Clusters(**program, instructions=NECESSARY[link])) in ("stale", "race")


def test_every_instruction_of_the_protocol_is_varied():
    varied = {name for change in NECESSARY.values() for name in change}
    accesses = {"store", "copy load", "copy store", "staged load", "sum barrier"}
    assert varied | accesses == set(CLUSTER_INSTRUCTIONS)
    assert all(re.match(r"(ld|st|bar)\.", text) for text in CLUSTER_INSTRUCTIONS.values())
