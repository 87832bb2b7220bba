"""The kernels have the instructions that the programs of exchange.py assume: in the source, and,
where nvcc is found, in this order on every path through the compiled kernels.
"""

import re

import pytest

from tests.memory_model.compiled import RULES, WORD_RULES, broken, counts, kernels
from tests.memory_model.exchange import INSTRUCTIONS, SOURCE, Handover
from tests.memory_model.words import WORD_INSTRUCTIONS
from tests.ptx import build

RECURRENCE = SOURCE.parent
PTX_HEADER = RECURRENCE.parent / "ptx.cuh"
FILES = {path.stem: path for path in build.SOURCES if path.stem.startswith(("persistent", "wave"))}
needs_nvcc = pytest.mark.skipif(not build.nvcc(), reason="nvcc is not found")


def code(name):
    """A file of csrc/cuda/recurrence without comments, and with single spaces."""
    text = re.sub(r"//[^\n]*", "", (RECURRENCE / name).read_text())
    return re.sub(r"\s+", " ", text)


def opcode(name):
    return INSTRUCTIONS[name].split()[0]


# ---- the source


def test_the_header_has_these_instructions():
    used = {
        found.rsplit(".global", 1)[0] for found in re.findall(r'"((?:ld|st)\.[\w.]+)', header())
    }
    report = "st.relaxed.sys"  # of a lost block, to the host
    assert used == {report, *(opcode(name) for name in ("store", "release", "acquire", "load"))}
    assert re.findall(r'"(bar[\w.]+)', header()) == [opcode("publish barrier")]
    assert re.findall(r'"(fence[\w.]+)', header()) == [WORD_INSTRUCTIONS["fence"]]
    for name in ("membar", "atom", "red."):
        assert f'"{name}' not in header()


def header():
    return PTX_HEADER.read_text()


def test_a_group_publishes_with_a_barrier_and_one_release():
    assert "{ sync(); if (thread == 0) ptx::store_release(flags + block, epoch); }" in code(
        "persistent_group.cuh"
    )


def test_a_group_waits_for_a_flag_of_each_block_and_synchronizes_its_warp():
    text = code("persistent_group.cuh")
    loop = (
        "{ uint32_t polls = 0, shown; #pragma unroll 1 "
        "while (int32_t((shown = ptx::load_acquire(a.flags + p)) - epoch) < 0) { "
        "if (++polls == MAX_POLLS) give_up(lost, V::THREADS, a.first_block + p, epoch, shown); "
        "ptx::pause(); } } "
        "__syncwarp(); }"
    )
    lanes = "for (int p = a.begin / a.columns + lane; p <= (a.end - 1) / a.columns; p += 32)"
    assert f"{lanes} {loop}" in text


def test_the_other_layer_waits_for_this_epoch():
    """Handover in exchange.py has the same arithmetic."""
    wait = "uint32_t(steps) * link.epochs + epochs_before + 1"
    assert wait in code("persistent_group.cuh")
    assert "int(a.rounds) + 1" in code("wavefront.cu")  # LayerLink.epochs
    # The first layer has no flags to wait for: its x is no layer's output.
    forward_wait = "if (LINKED && p.link.flags && t < r.steps) g.wait(p.link, columns_x, t + 1, 1);"
    backward_wait = "g.wait(p.link, columns_h, r.steps - t, 0); const S* from = step_of<S>(p.link."
    assert forward_wait in code("persistent_forward.cuh")
    assert backward_wait in code("persistent_backward_step.cuh")
    for forward, before in ((True, 1), (False, 0)):
        consumer = Handover(forward, rounds=3, steps=1).consumer(0, 0)
        assert f"until >= {1 * (3 + 1) + before + 1}" in consumer


def test_the_flags_are_zeroed_before_every_launch():
    assert "cudaMemsetAsync(memory, 0, size_t(bytes.total), stream)" in code(
        "persistent_launch.cuh"
    )


def test_every_vector_of_a_kind_has_its_own_slots():
    slots = "bytes += int64_t(l.words ? WORD_SLOTS : SLOTS) * l.tiles"
    assert slots in code("persistent_launch.cuh")
    group = code("persistent_group.cuh")
    assert "constexpr uint32_t MANY = V::WORDS ? WORD_SLOTS : SLOTS;" in group
    assert "int64_t(number % MANY) * V::TILES" in group


def test_words_are_stored_emptied_and_polled_as_the_programs_assume():
    group = code("persistent_group.cuh")
    assert "{ sync(); if (epoch % plan::FENCE_PERIOD == 0) ptx::fence(); }" in group
    stores = re.findall(
        r"store_words\(reinterpret_cast<uint32_t\*>\(slot\(v, ([^)]*)\) \+ at\)", group
    )
    assert stores == ["use", "use - RESET_AFTER"]
    exchange = code("persistent_exchange.cuh")
    assert "return w ? w : ZEROS;" in exchange
    assert "reinterpret_cast<uint2*>(old + at), uint2{0, 0});" in exchange
    backward = code("persistent_backward_step.cuh")
    assert "g.slot(p.gates, uses_gates), g.slot(p.gates, uses_gates - RESET_AFTER)" in backward
    loop = code("persistent_products.cuh")
    assert "while (!least(a[0][0] = ptx::load_words(from[0]))) poll(); } __syncwarp();" in loop
    assert "all = least(all, least(a[u][m])); return all != 0; };" in loop
    again = "if (!least(a[u][m])) a[u][m] = ptx::load_words(from[m] + u * 32); } __syncwarp(); }"
    assert "while (!complete()) { poll();" in loop
    assert again in loop


# ---- the compiled kernels


@needs_nvcc
@pytest.mark.parametrize("file", FILES)
def test_every_path_keeps_the_rules(file):
    """For sm_90a; test_ptx_mutants.py compares the PTX for sm_80 with it."""
    found = kernels(build.ptx(FILES[file], "sm_90a"))
    by_words = {name: graph for name, graph in found.items() if "word load" in counts(graph)}
    assert len(by_words) == {"wavefront": 0, "persistent_cells": 0}.get(file, 4)
    for name, graph in by_words.items():
        has = counts(graph)
        assert not {"UNKNOWN", "release", "acquire", "load", "store"} & set(has), name
        assert has["fence"] >= 2, name
        for rule in WORD_RULES:
            assert not list(broken(graph, rule)), (name, rule)
    exchanging = {name: graph for name, graph in found.items() if "release" in counts(graph)}
    assert len(exchanging) >= {"wavefront": 2}.get(file, 10)
    for name, graph in exchanging.items():
        has = counts(graph)
        assert not {"UNKNOWN", "fence", "word load", "word store"} & set(has), name
        # nvcc may peel the first poll of a wait.
        assert has["acquire"] % has["syncwarp"] == 0, name
        for rule in RULES:
            assert not list(broken(graph, rule)), (name, rule)


MUTANTS = {
    "a barrier stands between the stores and the release": (
        r"bar\.sync[^;]*;((?:(?!bar\.sync).)*?st\.release)",
        r"\1",
    ),
    "a barrier stands between the loads and the release": (r"bar\.sync[^;]*;", ""),
    "the warp synchronizes after an acquire": (r"bar\.warp\.sync[^;]*;", ""),
    "every load follows a wait of its warp": (r"bar\.warp\.sync[^;]*;", ""),
    "a barrier stands between partial sums and their reads": (r"bar\.sync[^;]*;", ""),
    "a report of a lost block ends the kernel": (r"\btrap;", ""),
}


@needs_nvcc
@pytest.mark.parametrize("rule", RULES)
def test_a_removed_instruction_breaks_its_rule(rule):
    old, new = MUTANTS[rule]
    text = re.sub(old, new, build.ptx(FILES["wavefront"], "sm_90a"), flags=re.S)
    for graph in kernels(text).values():
        if "release" in counts(graph):
            assert list(broken(graph, rule))


WORD_MUTANTS = {
    rule: (r"bar\.sync[^;]*;", "") if "barrier" in rule else MUTANTS[rule] for rule in WORD_RULES
}


@needs_nvcc
@pytest.mark.parametrize("rule", WORD_RULES)
def test_a_removed_instruction_breaks_its_rule_of_words(rule):
    text = re.sub(*WORD_MUTANTS[rule], build.ptx(FILES["persistent_forward"], "sm_90a"))
    for graph in kernels(text).values():
        if "word load" in counts(graph):
            assert list(broken(graph, rule))


@needs_nvcc
@pytest.mark.parametrize(
    ("old", "new"), [("st.release.gpu", "st.release.cta"), ("ld.acquire.gpu", "ld.acquire.sys")]
)
def test_another_scope_is_unknown(old, new):
    text = build.ptx(FILES["wavefront"], "sm_90a")
    assert old in text
    assert any("UNKNOWN" in counts(graph) for graph in kernels(text.replace(old, new)).values())
