"""Whether the blocks of a launch always finish: an explicit-state model of their waits.

A warp is a sequence of steps: ("wait", {(layer, block), ...}, epoch), ("barrier",) or
("publish", epoch). Memory is one array of flags here, and what is published is seen at once: the
model is of progress alone, and assumes that a store becomes visible to a loop that waits for it in
finite time, and that every thread of a resident block runs again and again. `words_stuck` is the
same for words in place of flags.

Every step moves a warp forward and no step is undone, so all runs are finite. So the blocks finish
under every fair schedule exactly if no state that can be reached is stuck.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A layer of a launch. columns: {kind: how many columns of it each block owns}, widths alike.

    reads: the layer that hands over to it, or None    vectors: the kinds, one for each epoch
    rounds: of the layer that it reads
    """

    blocks: int
    warps: int
    steps: int
    rounds: int
    forward: bool = True
    reads: int | None = None
    columns: dict | None = None
    widths: dict | None = None
    last_epoch: bool = True

    def each(self, kind):
        return (self.columns or {}).get(kind, 1)

    def width(self, kind):
        return (self.widths or {}).get(kind, self.blocks)

    def owners(self, kind, begin, end):
        """The blocks that own the columns [begin, end) of a vector."""
        each = self.each(kind)
        return range(begin // each, (end - 1) // each + 1) if end > begin else range(0)


def slice_of(layer, kind, warp):
    """The columns that a warp reads: WarpGroup::wait, with k-steps of one column."""
    width = layer.width(kind)
    return width * warp // layer.warps, width * (warp + 1) // layer.warps


def warp_program(layers, number, block, warp):
    """The steps of a warp, in the order of ForwardBlock::run and BackwardBlock::run."""
    layer, steps, epoch = layers[number], [], 0

    def publish():
        nonlocal epoch
        epoch += 1
        steps.append(("barrier",))
        if warp == 0:
            steps.append(("publish", epoch))

    def read(kind):
        owners = layer.owners(kind, *slice_of(layer, kind, warp))
        steps.append(("wait", frozenset((number, b) for b in owners), epoch))
        steps.append(("barrier",))

    def read_link(step):
        if layer.reads is None or step >= layer.steps:
            return
        other = layers[layer.reads]
        kind = "x" if layer.forward else "h"
        each, width = layer.each(kind), layer.width(kind)
        begin, end = min(block * each, width), min((block + 1) * each, width)
        owners = other.owners("h" if layer.forward else "x", begin, end)
        target = (step + 1) * (other.rounds + 1) + layer.forward + 1
        steps.append(("wait", frozenset((layer.reads, b) for b in owners), target))

    if layer.forward:
        publish()
        read_link(0)
        for step in range(layer.steps):
            for k in range(layer.rounds):
                read("hx"[k % 2])
                publish()
            read_link(step + 1)
            read("hx"[layer.rounds % 2])
            publish()
    else:
        read_link(0)
        for step in range(layer.steps):
            publish()
            if not layer.rounds:
                read_link(step + 1)
            read("gates")
            for k in reversed(range(layer.rounds)):
                publish()
                if k == 0:
                    read_link(step + 1)
                read("xh"[k % 2])
    if layer.last_epoch:
        publish()
    return tuple(steps)


def launch(layers):
    """The programs of a launch: [block of the grid][warp], the blocks of the first layer first."""
    return [
        [warp_program(layers, n, block, warp) for warp in range(layer.warps)]
        for n, layer in enumerate(layers)
        for block in range(layer.blocks)
    ]


class Machine:
    """A grid on a device that holds `resident` blocks at once, all blocks if it is None. A block
    leaves when its warps have finished. Any block may come next.
    """

    def __init__(self, layers, resident=None):
        self.programs = launch(layers)
        self.resident = len(self.programs) if resident is None else resident
        names = [(n, b) for n, layer in enumerate(layers) for b in range(layer.blocks)]
        self.number = {name: i for i, name in enumerate(names)}
        # {(block, position of its first warp): the epoch of its flag}
        self.published = [self._epochs(warps[0]) for warps in self.programs]

    @staticmethod
    def _epochs(program):
        epochs, newest = [0], 0
        for step in program:
            newest = step[1] if step[0] == "publish" else newest
            epochs.append(newest)
        return epochs

    def first(self):
        """A state: for each block the positions of its warps, or None before it starts."""
        return (None,) * len(self.programs)

    def is_final(self, state):
        return all(self._has_left(state, b) for b in range(len(state)))

    def _has_left(self, state, b):
        ends = tuple(len(program) for program in self.programs[b])
        return state[b] == ends

    def flag(self, state, b):
        return self.published[b][state[b][0]] if state[b] else 0

    def successors(self, state):
        running = [b for b, s in enumerate(state) if s is not None and not self._has_left(state, b)]
        for b, positions in enumerate(state):
            if positions is None:
                if len(running) < self.resident:
                    yield (*state[:b], (0,) * len(self.programs[b]), *state[b + 1 :])
                continue
            for after in self._moves(state, b, positions):
                yield (*state[:b], after, *state[b + 1 :])

    def _moves(self, state, b, positions):
        """A warp moves alone, or all warps of the block pass a barrier together."""
        steps = [
            program[at] if at < len(program) else None
            for program, at in zip(self.programs[b], positions, strict=True)
        ]
        if all(step == ("barrier",) for step in steps):
            yield tuple(at + 1 for at in positions)
        for w, step in enumerate(steps):
            if step is None or step == ("barrier",):
                continue
            if step[0] == "wait" and any(
                self.flag(state, self.number[name]) < step[2] for name in step[1]
            ):
                continue
            yield (*positions[:w], positions[w] + 1, *positions[w + 1 :])


def stuck(machine):
    """A state from which nothing can happen before all blocks have finished; None if there is none.
    Visits all states. Also returns their number.
    """
    seen, pending = {machine.first()}, [machine.first()]
    while pending:
        state = pending.pop()
        after = list(machine.successors(state))
        if not after and not machine.is_final(state):
            return state, len(seen)
        for other in after:
            if other not in seen:
                seen.add(other)
                pending.append(other)
    return None, len(seen)


def run(machine, choose):
    """One run to its end. choose: picks one of the possible successors."""
    state = machine.first()
    while after := list(machine.successors(state)):
        state = choose(after)
    return state


def words_program(kinds, owners, blocks, warps, block, warp):
    """The steps of a warp that exchanges words: ("store", (kind, block, warp), use),
    ("wait", {(kind, block, warp), ...}, use) or ("barrier",). owners: {kind: its blocks}
    """
    steps, uses = [], dict.fromkeys(kinds, 0)
    for kind in kinds:
        uses[kind] += 1
        own = list(owners.get(kind, range(blocks)))
        if block in own:
            steps.append(("store", (kind, block, warp), uses[kind]))
        steps.append(("barrier",))
        read = own[len(own) * warp // warps : len(own) * (warp + 1) // warps]
        words = frozenset((kind, other, w) for other in read for w in range(warps))
        steps += [("wait", words, uses[kind]), ("barrier",)]
    return tuple(steps)


def words_stuck(kinds, reset_after, blocks=2, warps=1, owners=None):
    """As `stuck`, of blocks that exchange words. A store empties the same warp's word of
    `reset_after` uses before; a wait ends while its words are neither to come nor emptied.
    """
    programs = [
        [words_program(kinds, owners or {}, blocks, warps, b, w) for w in range(warps)]
        for b in range(blocks)
    ]

    def newest(state, name):
        _, b, w = name
        done = programs[b][w][: state[b][w]]
        return max((step[2] for step in done if step[:2] == ("store", name)), default=0)

    def ends(state, step):
        return all(step[2] <= newest(state, name) < step[2] + reset_after for name in step[1])

    def successors(state):
        for b, positions in enumerate(state):
            steps = [
                program[at] if at < len(program) else None
                for program, at in zip(programs[b], positions, strict=True)
            ]
            moves = []
            if all(step == ("barrier",) for step in steps):
                moves.append(tuple(at + 1 for at in positions))
            for w, step in enumerate(steps):
                if step and (step[0] == "store" or (step[0] == "wait" and ends(state, step))):
                    moves.append((*positions[:w], positions[w] + 1, *positions[w + 1 :]))
            for after in moves:
                yield (*state[:b], after, *state[b + 1 :])

    final = tuple(tuple(map(len, of_block)) for of_block in programs)
    first = ((0,) * warps,) * blocks
    seen, pending = {first}, [first]
    while pending:
        state = pending.pop()
        following = list(successors(state))
        if not following and state != final:
            return state
        for after in following:
            if after not in seen:
                seen.add(after)
                pending.append(after)
    return None
