"""The exchange in clusters of two blocks, as programs for enumerate_executions.py.

csrc/cuda/recurrence/persistent_cluster.cuh describes the protocol. What the model has not, bulk
copies of the asynchronous proxy and barriers in shared memory, is written in what it has:

- A copy is a load and two stores of the thread that starts it, weak ones, before its arrivals. This
  assumes that the fence between the proxies orders the copy after what precedes the fence, and that
  a phase that is complete because all bytes have arrived happens after the copies of these bytes.
- A barrier is a flag for each of its arrivals, which the arrival stores with release semantics, and
  a wait for a phase acquires both.
"""

from dataclasses import dataclass

from tests.memory_model.exchange import INSTRUCTIONS, SLOTS

CLUSTER_INSTRUCTIONS = {
    **{name: INSTRUCTIONS[name] for name in ("store", "publish barrier", "release", "acquire")},
    "syncwarp": INSTRUCTIONS["syncwarp"],
    "copy load": "ld.weak {register}, [{location}]@4",
    "copy store": "st.weak [{location}], {epoch}",
    "arrive": "st.release.cluster [{flag}], {turn}",
    "wait": "ld.acquire.cluster {register}, [{flag}] until >= {turn}",
    "staged load": "ld.weak {register}, [{location}]",
    "read syncwarp": INSTRUCTIONS["syncwarp"],
    "free": "st.release.cluster [{flag}], {turn}",
    "free wait": "ld.acquire.cluster {register}, [{flag}] until >= {turn}",
    "sum barrier": INSTRUCTIONS["sum barrier"],
}


@dataclass(frozen=True)
class Clusters:
    """clusters: of two blocks    stages: of a ring
    vectors, owners, slots, instructions: as of exchange.Exchange; owners are numbers of blocks

    Lane 0 of a warp copies, arrives and frees; all lanes wait for flags and read what lane 0 has
    copied. A vector takes one stage of the ring of a warp.
    """

    clusters: int = 1
    warps: int = 1
    lanes: int = 2
    stages: int = 1
    vectors: tuple = ("h", "h", "h")
    owners: dict | None = None
    slots: int = SLOTS
    instructions: dict | None = None

    def name(self, block):
        return f"{block // 2}-{block % 2}"

    def owners_of(self, kind):
        return list((self.owners or {}).get(kind, range(2 * self.clusters)))

    def half(self, warp, kind, rank):
        """The blocks whose columns a block copies for a warp of both blocks of its cluster."""
        all_ = self.owners_of(kind)
        read = all_[len(all_) * warp // self.warps : len(all_) * (warp + 1) // self.warps]
        middle = (len(read) + 1) // 2
        return read[middle:] if rank else read[:middle]

    def threads(self):
        """{name: instructions}"""
        return {
            f"{self.name(block)}.{warp}{lane}": self.thread(block, warp, lane)
            for block in range(2 * self.clusters)
            for warp in range(self.warps)
            for lane in range(self.lanes)
        }

    def thread(self, block, warp, lane):
        texts = CLUSTER_INSTRUCTIONS | (self.instructions or {})
        text, rank, number = [], block % 2, warp * self.lanes + lane
        pair = block - rank, block - rank + 1

        def do(name, **values):
            text.append(texts[name].format(block=self.name(block), warp=warp, **values))

        for epoch, kind in enumerate(self.vectors, 1):
            stage, turn = (epoch - 1) % self.stages, (epoch - 1) // self.stages + 1
            here = f"{warp}.{stage}"
            own = f"{block}{number}_{epoch}"

            def element(owner, by, kind=kind, epoch=epoch):
                return f"{kind}{epoch % self.slots}.{owner}.{by}"

            if lane == 0 and block in self.owners_of(kind):
                do("store", location=element(block, warp), value=epoch)
            do("publish barrier")
            if number == 0:
                do("release", flag=f"f{block}", epoch=epoch)
            for i, owner in enumerate(self.half(warp, kind, rank)):
                if i % self.lanes == lane:
                    do("acquire", register=f"f{own}_{i}", flag=f"f{owner}", epoch=epoch)
            do("syncwarp")
            if lane == 0:
                if turn > 1:
                    for by in pair:
                        flag = f"free{block}.{by}.{here}"
                        do("free wait", register=f"r{own}_{by}", flag=flag, turn=turn - 1)
                for owner in self.half(warp, kind, rank):
                    for by in range(self.warps):
                        register = f"v{epoch}_{own}_{owner}_{by}"
                        do("copy load", register=register, location=element(owner, by))
                if self.half(warp, kind, rank):
                    for to in pair:
                        do("copy store", location=f"staged{to}.{rank}.{here}", epoch=epoch)
                for to in pair:
                    do("arrive", flag=f"arrived{to}.{block}.{here}", turn=turn)
            for by in pair:
                do("wait", register=f"a{own}_{by}", flag=f"arrived{block}.{by}.{here}", turn=turn)
            for half in range(2):
                if self.half(warp, kind, half):
                    register = f"v{epoch}_{own}_staged{half}"
                    do("staged load", register=register, location=f"staged{block}.{half}.{here}")
            do("read syncwarp")
            if lane == 0:
                for to in pair:
                    do("free", flag=f"free{to}.{block}.{here}", turn=turn)
            do("sum barrier")
        return "; ".join(filter(None, text))
