"""Programs as text in PTX's notation, and the enumeration of their executions.

A program is {thread: "instruction; instruction; ..."}. A thread's name is "block.thread" or
"gpu/block.thread". Registers belong to the whole program, so each is written once.

    ld.acquire.gpu r, [flag] until >= 3     only executions in which this holds: the last turn of a
                                            loop that waits (docs/gpu-proofs.md says why)
    st.relaxed.gpu [x], 1                   the value is a number or a register
    atom.acq_rel.gpu.add r, [x], 1          add or exch;   red.relaxed.gpu.add [x], 1
    fence.acq_rel.gpu                       acquire, release, acq_rel or sc
    bar.sync 1                              all threads of the block that name this barrier
    bar.warp.sync w0                        all threads of the block that name this warp
    @2                                      after a location: the access is 2 bytes wide, not 4
"""

import itertools
import operator
import re
from dataclasses import dataclass

from tests.memory_model.ptx_model import SCOPES, Event, Execution, Program, Thread, add_edge, bits

COMPARISONS = {">=": operator.ge, "==": operator.eq, "!=": operator.ne}
ACCESS = re.compile(
    r"(?P<opcode>(?:ld|st|atom|red)\S*)(?: (?P<register>\w+),)?"
    r" \[(?P<location>[^\]]+)\](?:@(?P<width>\d))?(?:, (?P<value>\w+))?"
    r"(?: until (?P<comparison>\S+) (?P<bound>\d+))?"
)
ORDERS = ("weak", "relaxed", "acquire", "release", "acq_rel", "sc")


@dataclass(frozen=True)
class Effect:
    """What an event does with values: it writes `operand`, a number or a register, or adds it."""

    register: str = ""
    operand: str = "0"
    adds: bool = False
    comparison: str = ""
    bound: int = 0


@dataclass(frozen=True)
class Values:
    registers: dict  # {name: value}
    written: dict  # {index of a write: value}


def parse(threads, initial=None):
    """The program, and the effect of each of its events. initial: {location: value}, 0 if absent"""
    parsed = []
    for name, text in threads.items():
        place, _, block = name.split(".")[0].rpartition("/")
        uses = {}
        thread = Thread(name, block, place or "gpu0")
        for line in filter(None, (part.strip() for part in re.split(r"[;\n]", text))):
            parsed.append(_instruction(line, thread, uses))
    locations = sorted({fields["location"] for fields, _ in parsed if "location" in fields})
    values = {x: str((initial or {}).get(x, 0)) for x in locations}
    starts = [
        ({"thread": None, "writes": True, "location": x}, Effect(operand=values[x]))
        for x in locations
    ]
    events = [Event(index=i, **fields) for i, (fields, _) in enumerate(starts + parsed)]
    return Program(events), [effect for _, effect in starts + parsed]


def _instruction(line, thread, uses):
    words = line.split()[0].split(".")
    if words[0] == "bar":
        warp = words[1] == "warp"
        assert words[1:] in (["sync"], ["warp", "sync"]), line
        name = (thread.gpu, thread.block, warp, line.split()[1])
        uses[name] = uses.get(name, 0) + 1
        return {"thread": thread, "barrier": (name, uses[name])}, Effect()
    order = next((w for w in words if w in ORDERS), "weak")
    scope = next((w for w in words if w in SCOPES), "")
    assert bool(scope) == (order != "weak"), line
    if words[0] == "fence":
        return {"thread": thread, "fence": True, "order": order, "scope": scope}, Effect()
    found = ACCESS.fullmatch(line)
    assert found, line
    kind = words[0]
    assert (kind in ("ld", "atom")) == bool(found["register"]), line
    fields = {
        "thread": thread,
        "reads": kind != "st",
        "writes": kind != "ld",
        "location": found["location"],
        "width": int(found["width"] or 4),
        "order": order,
        "scope": scope,
        "reduction": kind == "red",
    }
    effect = Effect(
        found["register"] or "",
        found["value"] or "0",
        words[-1] == "add",
        found["comparison"] or "",
        int(found["bound"] or 0),
    )
    return fields, effect


def executions(threads, initial=None):
    """The consistent executions of a program: (execution, values) for each."""
    program, effects = parse(threads, initial)
    orders = list(write_orders(program))
    for sources, result in candidates(program, effects):
        for fences in itertools.permutations([e.index for e in program.fences]):
            for order in orders:
                execution = Execution(program, sources, fences, order)
                if execution.is_consistent():
                    yield execution, result


def candidates(program, effects, prune=True):
    """Which write each read reads, {read: write}, where base causality order does not exclude that
    at once, and the values that follow.

    Reads that can be part of an acquire pattern are chosen first, because they alone extend base
    causality order. prune=False: also what causality order excludes
    """
    reads = sorted(
        (e for e in program.events if e.reads),
        key=lambda e: not (e.writes or any(True for _ in program.acquires_of(e))),
    )
    yield from _choose(program, effects, reads, {}, list(program.base) if prune else None)


def _choose(program, effects, reads, sources, base):
    """base: causality order of the choices so far; None if it is not to exclude any."""
    if len(sources) == len(reads):
        result = values(program, effects, sources)
        if result is not None:
            yield dict(sources), result
        return
    read = reads[len(sources)]
    for source in bits(program.overlapping[read.index]):
        if not program.events[source].writes or source == read.index:
            continue
        if not _may_hold(effects[read.index], effects[source]):
            continue
        extended = base
        pairs = []
        if base and program.morally_strong(program.events[source], read):
            pairs = program.synchronization(program.events[source], read)
        if pairs:
            extended = list(base)
            for x, y in pairs:
                add_edge(extended, x, y)
        sources[read.index] = source
        checked = sources if pairs else {read.index: source}
        if not base or not any(_is_excluded(program, extended, *pair) for pair in checked.items()):
            yield from _choose(program, effects, reads, sources, extended)
        del sources[read.index]


def _may_hold(read, write):
    """Whether the comparison of a read can hold for what is written, as far as that is constant."""
    if not read.comparison or write.adds or not write.operand.isdigit():
        return True
    return COMPARISONS[read.comparison](int(write.operand), read.bound)


def _is_excluded(program, base, read, source):
    """Whether base causality order alone shows that a read cannot read a write. 8.10.6"""
    if base[read] >> source & 1:
        return True
    later = (w for w in bits(base[source] & program.overlapping[source]) if w != read)
    return any(base[w] >> read & 1 and program.events[w].writes for w in later)


def values(program, effects, sources):
    """All values; None if some would appear out of thin air (8.10.4) or a comparison fails.

    A write depends on the register that is its operand, and on nothing else: a loop that waits
    orders no write after it. So more executions are possible than if it did.
    """
    known = Values({}, {})
    pending = [e.index for e in program.events if e.accesses]
    while pending:
        left = [i for i in pending if not _evaluate(program, effects, sources, known, i)]
        if len(left) == len(pending):
            return None
        pending = left
    for read in sources:
        effect = effects[read]
        if effect.comparison:
            holds = COMPARISONS[effect.comparison]
            if not holds(known.registers[effect.register], effect.bound):
                return None
    return known


def _evaluate(program, effects, sources, known, i):
    """Computes the values of access i. Returns whether all that it depends on was known."""
    registers, written = known.registers, known.written
    effect, source = effects[i], sources.get(i)
    if source is not None and source not in written:
        return False
    if program.events[i].reads:
        registers[effect.register] = written[source]
    if program.events[i].writes:
        operand = effect.operand
        value = int(operand) if operand.isdigit() else registers.get(operand)
        if value is None:
            return False
        written[i] = value + (written[source] if effect.adds else 0)
    return True


def write_orders(program):
    """The orders of the morally strong writes of each location: {location: indices}.

    The writes of a thread stay in program order, as the axiom of 8.10.1 requires.
    """
    writes = {}
    for e in program.events:
        if e.writes and e.thread is not None:
            writes.setdefault(e.location, []).append(e)
    choices = []
    for location, events in sorted(writes.items()):
        threads = {e.thread: 0 for e in events}
        by_thread = [[e.index for e in events if e.thread == thread] for thread in threads]
        distinct = {}
        for order in _interleavings(by_thread):
            pairs = frozenset(
                (x, y)
                for x, y in itertools.combinations(order, 2)
                if program.strong_pairs[x] >> y & 1
            )
            distinct.setdefault(pairs, order)
        choices.append([(location, order) for order in distinct.values()])
    for chosen in itertools.product(*choices):
        yield dict(chosen)


def _interleavings(sequences):
    sequences = [s for s in sequences if s]
    if not sequences:
        yield ()
    for i, s in enumerate(sequences):
        for rest in _interleavings([*sequences[:i], s[1:], *sequences[i + 1 :]]):
            yield (s[0], *rest)


def final_values(execution, result, location):
    """What a location can hold at the end: the values of writes that no write overwrites."""
    writes = [e.index for e in execution.program.events if e.writes and e.location == location]
    return {result.written[w] for w in writes if not execution.coherence[w]}


def allows(threads, condition, initial=None):
    """Whether a consistent execution fulfils a condition, a Python expression of the registers; in
    it `final("x", 1)` says that x can be 1 at the end.
    """
    for execution, result in executions(threads, initial):

        def final(location, value, execution=execution, result=result):
            return value in final_values(execution, result, location)

        if eval(condition, {"__builtins__": {}}, {**result.registers, "final": final}):
            return True
    return False
