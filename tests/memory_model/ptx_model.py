"""The memory consistency model of PTX: the relations and axioms that decide whether an execution is
possible.

Transcribed from NVIDIA's Parallel Thread Execution ISA, chapter 8 "Memory Consistency Model"
(version 9; the numbers in comments are its sections). Its first formal version is Lustig,
Sahasrabuddhe and Giroux, "A Formal Analysis of the NVIDIA PTX Memory Consistency Model", ASPLOS
2019; asplos_model.py has that version, and the tests compare both.

Not modelled: proxies (8.6), so every access is generic; aliases and multimem addresses (8.2.2,
8.2.3); asynchronous operations (8.9.1.1); clusters. An operation accesses one location; a vector
access is several operations (8.2.4). Two accesses of a location that differ in width overlap
partially.

A relation is a list of integers: bit j of relation[i] says that event i precedes event j.
"""

from dataclasses import dataclass
from itertools import pairwise, permutations

SCOPES = ("cta", "gpu", "sys")


@dataclass(frozen=True)
class Thread:
    """A thread and the scopes around it."""

    name: str
    block: str
    gpu: str = "gpu0"


@dataclass(frozen=True)
class Event:
    """An operation that a thread performs. The write that initializes a location has no thread."""

    index: int
    thread: Thread | None
    reads: bool = False
    writes: bool = False
    location: str = ""
    width: int = 4  # bytes
    order: str = "weak"  # weak, relaxed, acquire, release, acq_rel, sc
    scope: str = ""  # empty if weak
    fence: bool = False
    reduction: bool = False  # `red`: its read is not part of an acquire pattern
    barrier: tuple = ()  # (name, number of its use): which barrier the event waits at

    @property
    def accesses(self):
        return self.reads or self.writes

    @property
    def strong(self):  # 8.4, table of operation types
        return self.fence or (self.accesses and self.order != "weak")

    @property
    def acquires(self):
        return self.order in ("acquire", "acq_rel", "sc") and (self.fence or self.reads)

    @property
    def releases(self):
        return self.order in ("release", "acq_rel", "sc") and (self.fence or self.writes)


def overlap(a, b):  # 8.2.1
    return a.accesses and b.accesses and a.location == b.location


def before_in_program(a, b):  # 8.9.1; the events of a thread have ascending indices
    return a.thread is not None and a.thread == b.thread and a.index < b.index


def includes(a, thread):
    """Whether the scope of `a` includes a thread. 8.5"""
    if a.scope == "cta":
        return a.thread.block == thread.block and a.thread.gpu == thread.gpu
    return a.scope == "sys" or (a.scope == "gpu" and a.thread.gpu == thread.gpu)


def morally_strong(a, b):  # 8.7
    if a.index == b.index or a.thread is None or b.thread is None:
        return False
    if a.accesses and b.accesses and not (a.location == b.location and a.width == b.width):
        return False
    if a.thread == b.thread:
        return True
    return a.strong and b.strong and includes(a, b.thread) and includes(b, a.thread)


def bits(mask):
    """The numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def add_edge(reach, i, j):
    """Adds i -> j to a transitive relation, and what follows from it."""
    if reach[i] >> j & 1:
        return
    new, bit = reach[j] | 1 << j, 1 << i
    for p, row in enumerate(reach):
        if p == i or row & bit:
            reach[p] = row | new


def transitive(size, pairs):
    reach = [0] * size
    for i, j in pairs:
        add_edge(reach, i, j)
    return reach


def is_acyclic(reach):
    return not any(row >> i & 1 for i, row in enumerate(reach))


class Program:
    """What is the same in all executions of a list of events."""

    def __init__(self, events):
        self.events = events
        self.fences = [e for e in events if e.fence and e.order == "sc"]
        self.of_thread = _grouped((e.thread, e) for e in events)
        self.of_location = _grouped((e.location, e) for e in events if e.accesses)
        self.overlapping = [_mask(self.of_location.get(e.location, ())) for e in events]
        self.strong_pairs = [
            _mask(other for other in self._related(e) if morally_strong(e, other)) for e in events
        ]
        self.base = transitive(len(events), self._base_pairs())
        self._synchronization = {}

    def _related(self, event):
        """The operations that can be morally strong relative to this one, and for which it matters:
        memory operations that overlap, and fences.
        """
        if event.accesses:
            return [*self.of_location[event.location], *(e for e in self.events if e.fence)]
        return self.events if event.fence else ()

    def _base_pairs(self):
        """The part of base causality order that does not depend on values. 8.9.5"""
        for thread, events in self.of_thread.items():
            if thread is None:
                continue
            # 8.2.6: the initial write is executed before any thread starts. 8.9.4, API
            # synchronization: so is what precedes the kernel in its stream.
            yield from ((w.index, events[0].index) for w in self.of_thread.get(None, ()))
            yield from ((a.index, b.index) for a, b in pairwise(events))  # program order
        # 8.9.4 (2); and the section on bar.warp.sync, which guarantees memory ordering among the
        # threads that participate.
        for waits in _grouped((e.barrier, e) for e in self.events if e.barrier).values():
            yield from ((a.index, b.index) for a, b in permutations(waits, 2))

    def morally_strong(self, a, b):
        return bool(self.strong_pairs[a.index] >> b.index & 1)

    def synchronization(self, write, read):
        """The pairs of operations that synchronize because `read` observes `write`. 8.9.4 (4)"""
        key = write.index, read.index
        if key not in self._synchronization:
            self._synchronization[key] = [
                (first.index, last.index)
                for first in self.releases_of(write)
                for last in self.acquires_of(read)
                if self.morally_strong(first, last)
            ]
        return self._synchronization[key]

    def releases_of(self, write):
        """The first operations of the release patterns that have this write. 8.8"""
        if not write.strong:
            return
        for e in self.of_thread[write.thread]:
            precedes = before_in_program(e, write) and (e.fence or overlap(e, write))
            if e.releases and (e.index == write.index or precedes):
                yield e

    def acquires_of(self, read):
        """The last operations of the acquire patterns that have this read. 8.8, 8.11.1"""
        if not read.strong or read.reduction:
            return
        for e in self.of_thread[read.thread]:
            follows = before_in_program(read, e) and (e.fence or overlap(e, read))
            if e.acquires and (e.index == read.index or follows):
                yield e


class Execution:
    """A candidate: which write each read reads, and the orders that are chosen at run time.

    sources: {index of a read: index of the write}    fence_order: the fence.sc in their order
    write_order: {location: indices of its writes}, of which only morally strong pairs count
    """

    def __init__(self, program, sources, fence_order=(), write_order=None):
        self.program, self.sources = program, sources
        events = program.events
        self.observed = self._observation()
        self.base = list(program.base)
        for i, later in enumerate(self.observed):
            for j in bits(later):
                for x, y in program.synchronization(events[i], events[j]):
                    add_edge(self.base, x, y)
        self.fence_order = _ordered_pairs(program, fence_order)
        for x, y in self.fence_order:  # 8.9.4 (1)
            add_edge(self.base, x, y)
        self.causality = self._causality()
        self.coherence = self._coherence(write_order or {})

    def _observation(self):
        """Observation order. 8.9.2"""
        events, strong = self.program.events, self.program.strong_pairs
        direct = [0] * len(events)
        for read, write in self.sources.items():
            if strong[read] >> write & 1:
                direct[write] |= 1 << read
        order = list(direct)
        changed = True
        while changed:
            changed = False
            for i, row in enumerate(order):
                for z in bits(row):
                    if events[z].writes and order[z] & ~order[i]:
                        order[i] |= order[z]
                        changed = True
        return order

    def _causality(self):
        """Causality order between accesses of one location. 8.9.5"""
        same = self.program.overlapping
        causality = [row & same[i] for i, row in enumerate(self.base)]
        for i, row in enumerate(self.observed):
            for z in bits(row):
                causality[i] |= self.base[z] & same[z]
        return causality

    def _coherence(self, write_order):
        """Coherence order. 8.9.6, with the axiom of 8.10.1: it contains causality order."""
        events = self.program.events
        pairs = [
            (a.index, j)
            for a in events
            if a.writes
            for j in bits(self.causality[a.index])
            if events[j].writes
        ]
        for order in write_order.values():
            pairs += _ordered_pairs(self.program, order)
        return transitive(len(events), pairs)

    def from_reads(self):
        """The pairs of a read and a write that overwrites what it read. 8.9.7 (3)"""
        for read, source in self.sources.items():
            for write in bits(self.coherence[source] & ~(1 << read)):
                yield read, write

    def is_consistent(self):
        return (
            is_acyclic(self.coherence)
            and self._fences_agree()
            and self._reads_follow_causality()
            and self._is_atomic()
            and self._is_sequential_per_location()
        )

    def _fences_agree(self):  # 8.10.2
        return not any(self.base[y] >> x & 1 for x, y in self.fence_order)

    def _reads_follow_causality(self):  # 8.10.6
        if any(self.causality[read] >> source & 1 for read, source in self.sources.items()):
            return False
        return not any(self.causality[write] >> read & 1 for read, write in self.from_reads())

    def _is_atomic(self):  # 8.10.3, of read-modify-write operations
        strong = self.program.strong_pairs
        return not any(
            self.program.events[a].writes
            and strong[a] >> write & 1
            and self.coherence[write] >> a & 1
            for a, write in self.from_reads()
        )

    def _is_sequential_per_location(self):  # 8.10.5
        strong = self.program.strong_pairs
        communication = [(write, read) for read, write in self.sources.items()]
        communication += self.from_reads()
        communication += [(i, j) for i, row in enumerate(self.coherence) for j in bits(row)]
        pairs = [(i, j) for i, j in communication if strong[i] >> j & 1]
        for accesses in self.program.of_location.values():
            ordered = [pair for pair in permutations(accesses, 2) if before_in_program(*pair)]
            pairs += [(a.index, b.index) for a, b in ordered]
        return is_acyclic(transitive(len(self.program.events), pairs))

    def races(self):
        """Pairs of conflicting operations that are neither ordered nor morally strong. 8.7.1"""
        program = self.program
        for a in program.events:
            for j in bits(program.overlapping[a.index] >> a.index + 1 << a.index + 1):
                b = program.events[j]
                ordered = (self.causality[a.index] >> j | self.causality[j] >> a.index) & 1
                if (a.writes or b.writes) and not ordered and not program.morally_strong(a, b):
                    yield a, b


def _mask(events):
    return sum({1 << e.index for e in events})


def _grouped(pairs):
    groups = {}
    for key, event in pairs:
        groups.setdefault(key, []).append(event)
    return groups


def _ordered_pairs(program, order):
    """The morally strong pairs of a sequence of events, in its order."""
    return [
        (x, y)
        for k, x in enumerate(order)
        for y in order[k + 1 :]
        if program.strong_pairs[x] >> y & 1
    ]
