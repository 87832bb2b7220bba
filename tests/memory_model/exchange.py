"""The exchange of the persistent kernels as programs for enumerate_executions.py.

csrc/cuda/recurrence/persistent_exchange.cuh describes the protocol. A program here is what each
thread of a few small blocks does for a few epochs: store its element of the vector, publish, wait
for the blocks whose columns its warp reads, load their elements. test_compiled_exchange.py checks
that the compiled kernels have these instructions in this order.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.memory_model.enumerate_executions import candidates, parse, write_orders
from tests.memory_model.ptx_model import Execution, add_edge

SOURCE = Path(__file__).parents[2] / "csrc/cuda/recurrence/persistent_exchange.cuh"
SLOTS = int(re.search(r"SLOTS = (\d+);", SOURCE.read_text())[1])

# The instructions of the protocol. The stores are two bytes wide and the loads four (as parts of
# ld.v4.u32): accesses of different widths are never morally strong, so that only causality order
# can order them.
INSTRUCTIONS = {
    "store": "st.relaxed.gpu [{location}]@2, {value}",
    "publish barrier": "bar.sync {block}",
    "release": "st.release.gpu [{flag}], {epoch}",
    "acquire": "ld.acquire.gpu {register}, [{flag}] until >= {epoch}",
    "syncwarp": "bar.warp.sync {warp}",
    "load": "ld.relaxed.gpu {register}, [{location}]@4",
    "sum barrier": "bar.sync {block}",
}


@dataclass(frozen=True)
class Exchange:
    """vectors: the kind of each epoch's vector; each kind has slots of its own
    owners: {kind: the blocks that own columns of it}    initial: what the flags hold at first
    instructions: as INSTRUCTIONS; an empty one is left out
    """

    blocks: int = 2
    warps: int = 1
    lanes: int = 2
    vectors: tuple = ("h", "h", "h")
    owners: dict | None = None
    slots: int = SLOTS
    initial: int = 0
    instructions: dict | None = None

    def owners_of(self, kind):
        return (self.owners or {}).get(kind, range(self.blocks))

    def read_by(self, warp, kind):
        """The blocks whose columns a warp reads: its part of the sum over K."""
        owners = list(self.owners_of(kind))
        return owners[len(owners) * warp // self.warps : len(owners) * (warp + 1) // self.warps]

    def element(self, epoch, block, thread):
        kind = self.vectors[epoch - 1]
        return f"{kind}{epoch % self.slots}.{block}.{thread}"

    def threads(self):
        """{name: instructions}"""
        return {
            f"{block}.{warp}{lane}": self.thread(block, warp, lane)
            for block in range(self.blocks)
            for warp in range(self.warps)
            for lane in range(self.lanes)
        }

    def thread(self, block, warp, lane):
        texts = INSTRUCTIONS | (self.instructions or {})
        number = warp * self.lanes + lane
        text = []

        def do(name, **values):
            text.append(texts[name].format(block=block, warp=warp, **values))

        for epoch, kind in enumerate(self.vectors, 1):
            if block in self.owners_of(kind):
                do("store", location=self.element(epoch, block, number), value=epoch)
            do("publish barrier")
            if number == 0:
                do("release", flag=f"f{block}", epoch=epoch)
            read = self.read_by(warp, kind)
            for i, owner in enumerate(read):
                if i % self.lanes == lane:
                    register = f"f{block}_{number}_{epoch}_{i}"
                    do("acquire", register=register, flag=f"f{owner}", epoch=epoch)
            do("syncwarp")
            for owner in read:
                for stored_by in range(self.warps * self.lanes):
                    register = f"v{epoch}_{block}_{number}_{owner}_{stored_by}"
                    location = self.element(epoch, owner, stored_by)
                    do("load", register=register, location=location)
            do("sum barrier")
        return "; ".join(filter(None, text))


@dataclass(frozen=True)
class Handover:
    """Two blocks of the layer of a wavefront that hands over, and a block of the layer that reads.

    Forward the first layer hands over y: it publishes h0 first, and stores y_t after the last
    epoch of step t. Backward the second layer hands over dx: there is no epoch before the first
    step, and dx is stored after the last vector of the step has been read. One more epoch at the
    end covers the last step. A block that hands over has two warps with one thread each.
    """

    forward: bool = True
    rounds: int = 1
    steps: int = 2
    last_epoch: bool = True
    early: int = 0  # how many epochs too early the reading layer stops to wait
    instructions: dict | None = None

    def threads(self):
        programs = {f"{b}.{warp}": self.producer(b, warp) for b in range(2) for warp in range(2)}
        for warp in range(2):
            for lane in range(2):
                programs[f"c.{warp}{lane}"] = self.consumer(warp, lane)
        return programs

    def producer(self, block, warp):
        texts = INSTRUCTIONS | (self.instructions or {})
        epochs = self.forward + self.steps * (self.rounds + 1)
        text = []
        for epoch in range(1, epochs + 1 + self.last_epoch):
            text.append(texts["publish barrier"].format(block=block))
            if warp == 0:
                text.append(texts["release"].format(flag=f"f{block}", epoch=epoch))
            # The exchange within the layer: each warp reads the columns of one block.
            register = f"f{block}_{warp}_{epoch}"
            read = [
                texts["acquire"].format(register=register, flag=f"f{warp}", epoch=epoch),
                texts["syncwarp"].format(warp=warp),
                texts["sum barrier"].format(block=block),
            ]
            step, rest = divmod(epoch - self.forward, self.rounds + 1)
            location = f"step{step}.{block}.{warp}"
            store = [texts["store"].format(location=location, value=step)]
            if step == 0 or rest:
                store = []
            if epoch > epochs:
                continue
            if self.forward:
                text += store + (read if epoch < epochs else [])
            else:
                text += read + store
        return "; ".join(filter(None, text))

    def consumer(self, warp, lane):
        texts = INSTRUCTIONS | (self.instructions or {})
        text = []
        for step in range(1, self.steps + 1):
            epoch = step * (self.rounds + 1) + self.forward + 1 - self.early
            register = f"fc{warp}{lane}_{step}"
            text.append(texts["acquire"].format(register=register, flag=f"f{lane}", epoch=epoch))
            text.append(texts["syncwarp"].format(warp=warp))
            for block in range(2):
                for stored_by in range(2):
                    register = f"v{step}_{warp}{lane}_{block}{stored_by}"
                    location = f"step{step}.{block}.{stored_by}"
                    # A load_relaxed of the same width as the store.
                    text.append(f"ld.relaxed.gpu {register}, [{location}]@2")
            text.append(texts["publish barrier"].format(block="c"))
        return "; ".join(filter(None, text))


def partial_sums(phases=3, without=""):
    """The warps' partial sums in shared memory: two warps store theirs and read both."""
    programs = {}
    for warp in range(2):
        text = []
        for phase in range(1, phases + 1):
            text.append(f"st.weak [sum.{warp}], {phase}")
            if without != "sum barrier":
                text.append("bar.sync 1")
            text += [f"ld.weak v{phase}_{warp}_{other}, [sum.{other}]" for other in range(2)]
            if without != "publish barrier":
                text.append("bar.sync 1")
        programs[f"a.{warp}"] = "; ".join(text)
    return programs


def wanted_value(register):
    """What register v<n>_... is to hold: n, the number of the vector."""
    return int(register[1:].split("_")[0])


def violations(threads, initial=None):
    """What goes wrong in consistent executions: ("stale" | "early" | "race", detail), once for each
    execution and register or pair of events. Of a register v<n>_... a smaller value than n is of an
    older vector ("stale"), a larger one of a newer vector ("early").
    """
    program, effects = parse(threads, initial)
    orders = list(write_orders(program))
    for sources, result in candidates(program, effects):
        for order in orders:
            execution = Execution(program, sources, (), order)
            if not execution.is_consistent():
                continue
            for register, value in result.registers.items():
                if register[0] == "v" and value != (wanted := wanted_value(register)):
                    yield ("stale" if value < wanted else "early"), (register, value)
            for pair in execution.races():
                yield "race", pair


def unproved(threads, initial=None):
    """Reads for which guaranteed order alone does not show that they return what they should, with
    a write that is not excluded. None in a correct protocol, of any size.

    Guaranteed order is contained in base causality order of every execution. A wait for epoch e on
    a flag that one thread writes, in ascending order, reads the release of e or a later one of that
    thread. So whatever precedes the release of e in program order precedes what follows the wait.
    A read returns what it should if the write that it should read precedes it, and every other
    write of the location either precedes that one or follows the read (8.10.6). Then there is no
    race either, since all conflicting accesses are ordered.
    """
    program, effects = parse(threads, initial)
    events, order = program.events, list(program.base)
    for read in events:
        if effects[read.index].comparison:
            for x, y in _guaranteed(program, effects, read):
                add_edge(order, x, y)
    for read in events:
        if not read.reads or effects[read.index].comparison:
            continue
        wanted = wanted_value(effects[read.index].register)
        writes = [e for e in program.of_location[read.location] if e.writes]
        (right,) = [w for w in writes if int(effects[w.index].operand) == wanted]
        if not order[right.index] >> read.index & 1:
            yield read, right
        for other in writes:
            follows = order[read.index] >> other.index & 1
            if other != right and not (follows or order[other.index] >> right.index & 1):
                yield read, other


def _guaranteed(program, effects, wait):
    """The pairs of operations that synchronize whichever write a wait reads."""
    bound = effects[wait.index].bound
    writes = [e for e in program.of_location[wait.location] if e.writes]
    sources = [w for w in writes if int(effects[w.index].operand) >= bound]
    assert effects[wait.index].comparison == ">="
    if not sources or len({w.thread for w in sources}) > 1 or sources[0].thread is None:
        return
    if not all(program.morally_strong(w, wait) for w in sources):
        return  # then the wait does not observe the write (8.9.2)
    for x, y in program.synchronization(sources[0], wait):
        # Every later source synchronizes with y, too, by an operation that follows x.
        if all(
            any(y == last and first >= x for first, last in program.synchronization(w, wait))
            for w in sources
        ):
            yield x, y
