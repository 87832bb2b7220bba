"""The model of PTX 6.0 in Figures 4 and 7 of Lustig, Sahasrabuddhe and Giroux, "A Formal Analysis
of the NVIDIA PTX Memory Consistency Model", ASPLOS 2019, as relations of pairs.

It shares only the events and `morally_strong` with ptx_model.py, whose text of the PTX ISA is
newer: there base causality order contains program order, and causality order relates accesses of
one address. Unlike in the paper an atomic operation is one event, not a read and a write. The tests
require the same verdict of both for every candidate execution.
"""

from tests.memory_model.ptx_model import before_in_program, morally_strong, overlap


def compose(*relations):
    result = relations[0]
    for relation in relations[1:]:
        after = {}
        for x, y in relation:
            after.setdefault(x, []).append(y)
        result = {(x, z) for x, y in result for z in after.get(y, ())}
    return result


def closure(relation):
    result = set(relation)
    while True:
        more = compose(result, relation) - result
        if not more:
            return result
        result |= more


def acyclic(relation):
    return all(x != y for x, y in closure(relation))


def is_consistent(program, sources, fence_order, write_order):
    """sources, fence_order, write_order: as of ptx_model.Execution"""
    events = program.events
    every = [(a, b) for a in events for b in events]
    same = {(e.index, e.index) for e in events}

    def related(condition):
        return {(a.index, b.index) for a, b in every if condition(a, b)}

    def identity(condition):
        return {(e.index, e.index) for e in events if condition(e)}

    strong = related(morally_strong)
    # The write that initializes a location stands before all threads.
    first = related(lambda a, b: a.thread is None and b.thread is not None)
    po = related(before_in_program)
    po_loc = po & related(overlap)
    rf = {(write, read) for read, write in sources.items()}
    writes = identity(lambda e: e.writes)
    rmw = identity(lambda e: e.reads and e.writes)
    barrier = related(lambda a, b: bool(a.barrier) and a.barrier == b.barrier and a != b)
    position = {x: i for i, x in enumerate(fence_order)}
    sc = {(x, y) for x, y in strong if position.get(x, 0) < position.get(y, -1) and x in position}

    # Figure 4
    releases = identity(lambda e: e.releases and not e.fence)
    release_fences = identity(lambda e: e.releases and e.fence)
    acquires = identity(lambda e: e.acquires and not e.fence)
    acquire_fences = identity(lambda e: e.acquires and e.fence)
    strong_writes = identity(lambda e: e.writes and e.strong)
    strong_reads = identity(lambda e: e.reads and e.strong and not e.reduction)
    release = compose(releases, po_loc | same, strong_writes)
    release |= compose(release_fences, po, strong_writes)
    acquire = compose(strong_reads, po_loc | same, acquires)
    acquire |= compose(strong_reads, po, acquire_fences)
    obs = strong & rf
    while more := compose(obs, rmw, obs) - obs:
        obs = obs | more
    sw = (strong & compose(release, obs, acquire)) | barrier | sc
    cause_base = closure(compose(po | same, sw, po | same) | first)
    cause = cause_base | compose(obs, cause_base | po_loc)

    # Coherence order (3.5.1), and Axiom 1
    co = compose(writes, cause, writes) & related(overlap)
    for order in write_order.values():
        position = {x: i for i, x in enumerate(order)}
        co |= {(x, y) for x in order for y in order if position[x] < position[y]} & strong
    co = closure(co)
    fr = compose({(read, write) for write, read in rf}, co) - same

    # Figure 7. Axiom 4, No-Thin-Air, is the one that values() in enumerate_executions.py checks.
    return (
        all(x != y for x, y in co)
        and not compose(sc, cause) & same  # Axiom 2
        and not compose(strong & fr, strong & co) & rmw  # Axiom 3
        and acyclic((strong & (rf | co | fr)) | po_loc)  # Axiom 5
        and not compose(rf | fr, cause) & same  # Axiom 6
    )
