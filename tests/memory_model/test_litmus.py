"""The model of ptx_model.py gives the published verdicts of litmus tests, and the same verdict as
the ASPLOS paper's formulas for every candidate execution of them.
"""

import itertools
import random
from collections import Counter

import pytest

from tests.memory_model import asplos_model
from tests.memory_model.enumerate_executions import allows, candidates, parse, write_orders
from tests.memory_model.litmus import LITMUS
from tests.memory_model.ptx_model import Execution


@pytest.mark.parametrize("litmus", LITMUS, ids=str)
def test_published_verdict(litmus):
    assert allows(litmus.threads, litmus.outcome) == litmus.allowed


def test_names_are_distinct():
    assert len({litmus.name for litmus in LITMUS}) == len(LITMUS)


@pytest.mark.parametrize(
    "axioms",
    [["_reads_follow_causality"], ["_coherence"], ["_is_atomic", "_is_sequential_per_location"]],
    ids=" ".join,
)
def test_without_an_axiom_a_verdict_is_wrong(axioms, monkeypatch):
    """An atomic operation is one event here, so that sequential consistency per location implies
    atomicity. _fences_agree changes no outcome: the Fence-SC order only adds to causality order,
    and where it agrees with causality order it adds least.
    """

    def holds(self):
        return True

    def nothing(self, write_order):
        return [0] * len(self.program.events)

    for axiom in axioms:
        monkeypatch.setattr(Execution, axiom, nothing if axiom == "_coherence" else holds)
    assert [x.name for x in LITMUS if allows(x.threads, x.outcome) != x.allowed]


def every_candidate(threads):
    """All choices at run time, consistent or not."""
    program, effects = parse(threads)
    for sources, _ in candidates(program, effects, prune=False):
        for fences in itertools.permutations([e.index for e in program.fences]):
            for order in write_orders(program):
                yield program, sources, fences, order


def verdicts(threads):
    """How many candidate executions are consistent, and how many are not, in both models."""
    counts = Counter()
    for choice in every_candidate(threads):
        verdict = Execution(*choice).is_consistent()
        assert asplos_model.is_consistent(*choice) == verdict, threads
        counts[verdict] += 1
    return counts


@pytest.mark.parametrize("litmus", LITMUS, ids=str)
def test_every_candidate_gets_the_verdict_of_the_paper(litmus):
    assert verdicts(litmus.threads)[True]


def random_program(rng):
    """Two or three threads of two blocks with two or three instructions each, on two locations."""
    threads, registers = {}, itertools.count()
    for number, block in enumerate(rng.choice(["ab", "aab", "abc"])):
        instructions = []
        for _ in range(rng.choice([2, 2, 3])):
            scope, location = rng.choice(["cta", "gpu"]), rng.choice("xy")
            kind = rng.choice(["ld", "ld", "st", "st", "atom", "fence", "bar"])
            order = {
                "ld": ["weak", f"relaxed.{scope}", f"acquire.{scope}"],
                "st": ["weak", f"relaxed.{scope}", f"release.{scope}"],
                "atom": [f"acq_rel.{scope}.add", f"relaxed.{scope}.add"],
                "fence": [f"sc.{scope}", f"acq_rel.{scope}"],
                "bar": ["sync 1"],
            }[kind]
            opcode = f"{kind}.{rng.choice(order)}"
            instructions.append(
                {
                    "ld": f"{opcode} r{next(registers)}, [{location}]",
                    "st": f"{opcode} [{location}], {rng.randint(1, 9)}",
                    "atom": f"{opcode} r{next(registers)}, [{location}], 1",
                }.get(kind, opcode)
            )
        threads[f"{block}.{number}"] = "; ".join(instructions)
    return threads


def test_random_programs_get_the_verdicts_of_the_paper():
    rng, counts = random.Random(0), Counter()
    for _ in range(300):
        counts += verdicts(random_program(rng))
    assert min(counts[True], counts[False]) > 1000
