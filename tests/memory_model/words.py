"""The exchange by words that carry their own validity, as programs for enumerate_executions.py.

csrc/cuda/recurrence/persistent_exchange.cuh describes the protocol. A word holds the number of its
epoch here, and 0 while it is empty; a load that waits is modelled by its last turn, which reads
anything but 0. All accesses are relaxed, four bytes wide and of scope gpu, so they never race; what
is to be proved is that each load reads the word of its own epoch.
"""

import re
from dataclasses import dataclass

from tests.memory_model.enumerate_executions import parse
from tests.memory_model.exchange import INSTRUCTIONS, SOURCE, wanted_value
from tests.memory_model.ptx_model import add_edge


def constant(name, text):
    return int(re.search(rf"\b{name} = (\d+);", text)[1])


SLOTS = constant("WORD_SLOTS", SOURCE.read_text())
RESET_AFTER = constant("RESET_AFTER", SOURCE.read_text())
FENCE_PERIOD = constant("FENCE_PERIOD", (SOURCE.parent / "plan.h").read_text())

WORD_INSTRUCTIONS = {
    "store": "st.relaxed.gpu [{location}], {value}",
    "reset": "st.relaxed.gpu [{location}], 0",
    "publish barrier": INSTRUCTIONS["publish barrier"],
    "fence": "fence.acq_rel.gpu",
    "load": "ld.relaxed.gpu {register}, [{location}] until >= 1",
    "syncwarp": INSTRUCTIONS["syncwarp"],
    "sum barrier": INSTRUCTIONS["sum barrier"],
}


@dataclass(frozen=True)
class Words:
    """As exchange.Exchange. fence_period, reset_after: of the header
    instructions: as WORD_INSTRUCTIONS; an empty one is left out
    """

    blocks: int = 2
    warps: int = 1
    lanes: int = 1
    vectors: tuple = ("h", "h", "h")
    owners: dict | None = None
    slots: int = SLOTS
    fence_period: int = FENCE_PERIOD
    reset_after: int = RESET_AFTER
    instructions: dict | None = None

    def owners_of(self, kind):
        return (self.owners or {}).get(kind, range(self.blocks))

    def read_by(self, warp, kind):
        """The blocks whose columns a warp reads: its part of the sum over K."""
        owners = list(self.owners_of(kind))
        return owners[len(owners) * warp // self.warps : len(owners) * (warp + 1) // self.warps]

    def threads(self):
        """{name: instructions}"""
        return {
            f"{block}.{warp}{lane}": self.thread(block, warp, lane)
            for block in range(self.blocks)
            for warp in range(self.warps)
            for lane in range(self.lanes)
        }

    def thread(self, block, warp, lane):
        """Lane l of warp w stores one word of each vector of its block, and reads the words that
        the lanes l of all warps have stored.
        """
        texts = WORD_INSTRUCTIONS | (self.instructions or {})
        text, uses = [], dict.fromkeys(self.vectors, 0)

        def do(name, **values):
            text.append(texts[name].format(block=block, warp=warp, **values))

        def word(use, owner, stored_by):
            return f"{kind}{use % self.slots}.{owner}.{stored_by}"

        for epoch, kind in enumerate(self.vectors, 1):
            uses[kind] += 1
            if block in self.owners_of(kind):
                do("store", location=word(uses[kind], block, f"{warp}{lane}"), value=epoch)
                old = uses[kind] - self.reset_after
                do("reset", location=word(old, block, f"{warp}{lane}"))
            do("publish barrier")
            if epoch % self.fence_period == 0:
                do("fence")
            for owner in self.read_by(warp, kind):
                for other in range(self.warps):
                    register = f"v{epoch}_{block}_{warp}{lane}_{owner}_{other}"
                    do(
                        "load",
                        register=register,
                        location=word(uses[kind], owner, f"{other}{lane}"),
                    )
            do("syncwarp")
            do("sum barrier")
        return "; ".join(filter(None, text))


def unproved_words(threads):
    """Loads for which guaranteed order alone does not show that they read the word of their epoch,
    with a store that is not excluded. None in a correct protocol, of any size.

    Guaranteed order starts as what precedes what in every execution whatever is read. A load cannot
    read a store that it precedes, nor one that another store of the word follows which precedes the
    load (8.10.6). Where the stores that are left are of one thread, the release pattern of the
    first of them and the acquire pattern of the load synchronize whichever it reads: a fence before
    the first store is a fence before the others, too. That is more order, so it is repeated until
    nothing follows any more.
    """
    program, effects = parse(threads)
    order = list(program.base)
    reads = [e for e in program.events if e.reads]
    writes = {
        location: [e for e in events if e.writes]
        for location, events in program.of_location.items()
    }

    def sources(read):
        before = [w for w in writes[read.location] if order[w.index] >> read.index & 1]
        return [
            w
            for w in writes[read.location]
            if int(effects[w.index].operand) >= effects[read.index].bound
            and not order[read.index] >> w.index & 1
            and not any(order[w.index] >> other.index & 1 for other in before)
        ]

    known, changed = {}, True
    while changed:
        changed = False
        for read in reads:
            left = sources(read)
            if left == known.get(read.index):
                continue
            known[read.index], changed = left, True
            if not left or left[0].thread is None or len({w.thread for w in left}) > 1:
                continue
            if not all(program.morally_strong(w, read) for w in left):
                continue
            pairs = program.synchronization(left[0], read)
            if pairs:  # the strongest of them; the others follow from program order
                add_edge(order, max(x for x, _ in pairs), min(y for _, y in pairs))
    for read in reads:
        wanted, left = wanted_value(effects[read.index].register), sources(read)
        values = [int(effects[write.index].operand) for write in left]
        assert wanted in values, "a load cannot read the word of its epoch"
        for write, value in zip(left, values, strict=True):
            if value != wanted:
                yield read, write
