"""Litmus tests of the PTX memory model with published verdicts.

Sources of the verdicts:
  ISA 8.x   the example or the rule in that section of the PTX ISA, version 9
  ISA, NAME the section on that instruction
  fig. N    Lustig, Sahasrabuddhe and Giroux, ASPLOS 2019
  mixed     NVlabs/mixedproxy, commit 0807da2, tests/: NVIDIA's tests of the model of PTX 7.5
  Dat3M     hernanponcedeleon/Dat3M, commit 3064012, PTXv6_0-expected.csv: the test of that name in
            the litmus/PTX folder of that repository
Two published verdicts differ from the text of the PTX ISA, which is what ptx_model.py follows:
mixedproxy permits the outcome of "MP+release, later relaxed write", against release pattern 2 of
8.8; and Dat3M's Manual/LB+RMW-a is allowed where an atomic operation is split into a read and a
write, but not where it is one operation, as in 8.4. No kernel here depends on either.

Each entry: name, verdict and source; the outcome in question; a line for each thread, which is
named block.thread. An outcome is an expression of enumerate_executions.allows.
"""

from dataclasses import dataclass

TEXT = """
MP+weak | allowed | ISA 8.10.6: the rule needs a release and an acquire pattern
r1 == 1 and r2 == 0
a.0: st.weak [x], 1; st.weak [y], 1
b.0: ld.weak r1, [y]; ld.weak r2, [x]

MP+relaxed | allowed | Dat3M Manual/MP-relaxed
r1 == 1 and r2 == 0
a.0: st.weak [x], 1; st.relaxed.gpu [y], 1
b.0: ld.relaxed.gpu r1, [y]; ld.weak r2, [x]

MP+relaxed everywhere | allowed | ISA 8.10.5 orders one location only
r1 == 1 and r2 == 0
a.0: st.relaxed.gpu [x], 1; st.relaxed.gpu [y], 1
b.0: ld.relaxed.gpu r1, [y]; ld.relaxed.gpu r2, [x]

MP+release+acquire | forbidden | fig. 5; mixed MP_gpu
r1 == 1 and r2 == 0
a.0: st.weak [x], 1; st.release.gpu [y], 1
b.0: ld.acquire.gpu r1, [y]; ld.weak r2, [x]

MP+release+relaxed | allowed | ISA 8.8: no acquire pattern
r1 == 1 and r2 == 0
a.0: st.weak [x], 1; st.release.gpu [y], 1
b.0: ld.relaxed.gpu r1, [y]; ld.weak r2, [x]

MP+relaxed+acquire | allowed | ISA 8.8: no release pattern
r1 == 1 and r2 == 0
a.0: st.weak [x], 1; st.relaxed.gpu [y], 1
b.0: ld.acquire.gpu r1, [y]; ld.weak r2, [x]

MP+release+acquire, one block, cta | forbidden | mixed MP_cta
r1 == 1 and r2 == 0
a.0: st.weak [x], 1; st.release.cta [y], 1
a.1: ld.acquire.cta r1, [y]; ld.weak r2, [x]

MP+release+acquire, two blocks, cta | allowed | Dat3M Manual/MP-cta
r1 == 1 and r2 != 1
a.0: st.weak [x], 1; st.release.cta [y], 1
b.0: ld.acquire.cta r1, [y]; ld.weak r2, [x]

MP+release+acquire, cta and gpu | allowed | Dat3M Manual/MP-cta-gpu; ISA 8.7
r1 == 1 and r2 != 1
a.0: st.weak [x], 1; st.release.cta [y], 1
b.0: ld.acquire.gpu r1, [y]; ld.weak r2, [x]

MP+release+acquire, two GPUs, gpu | allowed | ISA 8.5
r1 == 1 and r2 != 1
g0/a.0: st.weak [x], 1; st.release.gpu [y], 1
g1/b.0: ld.acquire.gpu r1, [y]; ld.weak r2, [x]

MP+fences | forbidden | ISA 8.10.6 "Message Passing"
r1 == 1 and r2 == 0
a.0: st.weak [x], 1; fence.acq_rel.sys; st.relaxed.sys [y], 1
b.0: ld.relaxed.sys r1, [y]; fence.acq_rel.sys; ld.weak r2, [x]

MP+fences, weak flag | allowed | ISA 8.8: the write of a pattern is strong
r1 == 1 and r2 == 0
a.0: st.weak [x], 1; fence.acq_rel.gpu; st.weak [y], 1
b.0: ld.weak r1, [y]; fence.acq_rel.gpu; ld.weak r2, [x]

MP+fences, consumer's fence of cta | allowed | Dat3M Manual/MICRO24-Fig4a
r1 == 1 and r2 != 1
a.0: st.relaxed.sys [x], 1; fence.sc.gpu; st.relaxed.sys [y], 1
b.0: ld.relaxed.sys r1, [y]; fence.sc.cta; ld.relaxed.sys r2, [x]

MP+release, later relaxed write | forbidden | ISA 8.8; Dat3M Nvidia/Release-acquire-pattern
r1 == 2 and r2 == 0
a.0: st.weak [x], 1; st.release.sys [y], 1; st.relaxed.sys [y], 2
b.0: ld.relaxed.sys r1, [y]; fence.acq_rel.sys; ld.weak r2, [x]

MP+red | allowed | ISA 8.11.1
r2 == 0 and final("y", 2)
a.0: st.weak [x], 42; st.release.gpu [y], 1
b.0: red.relaxed.sys.add [y], 1; fence.acquire.gpu; ld.weak r2, [x]

MP+atom in place of red | forbidden | ISA 8.11.1
r1 == 1 and r2 == 0
a.0: st.weak [x], 42; st.release.gpu [y], 1
b.0: atom.relaxed.sys.add r1, [y], 1; fence.acquire.gpu; ld.weak r2, [x]

MP through an atom | forbidden | Dat3M Manual/MP+RMW; ISA 8.9.2
r0 == 1 and r1 == 2 and r2 == 0
a.0: st.relaxed.gpu [x], 1; st.release.gpu [y], 1
a.1: atom.relaxed.gpu.add r0, [y], 1
a.2: ld.acquire.gpu r1, [y]; ld.relaxed.gpu r2, [x]

MP+bar.sync | forbidden | Dat3M Barrier/barrier-inscope; ISA 8.9.4
r1 != 1
a.0: st.weak [x], 1; bar.sync 1
a.1: bar.sync 1; ld.weak r1, [x]

MP+bar.sync, two blocks | allowed | Dat3M Barrier/barrier-not-inscope
r1 != 1
a.0: st.weak [x], 1; bar.sync 1
b.0: bar.sync 1; ld.weak r1, [x]

MP+bar.sync, two barriers | allowed | Dat3M Manual/SB+bar-const-diff, as message passing
r1 != 1
a.0: st.weak [x], 1; bar.sync 1
a.1: bar.sync 2; ld.weak r1, [x]

MP+bar.warp.sync | forbidden | ISA, bar.warp.sync: "safely read values stored by other threads"
r1 != 1
a.0: st.weak [x], 1; bar.warp.sync w
a.1: bar.warp.sync w; ld.weak r1, [x]

PC+bar.sync | forbidden | Dat3M Manual/PC-bar-sync-sync-1
r0 == 1
a.0: ld.weak r0, [x]; bar.sync 0; bar.sync 1
a.1: bar.sync 0; st.weak [x], 1; bar.sync 1

SB+weak | allowed | Dat3M Manual/SB-weak
r1 == 0 and r2 == 0
a.0: st.weak [x], 1; ld.weak r1, [y]
b.0: st.weak [y], 1; ld.weak r2, [x]

SB+fence.sc | forbidden | fig. 6; ISA 8.10.6 "Store Buffering"
r1 == 0 and r2 == 0
a.0: st.weak [x], 1; fence.sc.gpu; ld.weak r1, [y]
b.0: st.weak [y], 1; fence.sc.gpu; ld.weak r2, [x]

SB+fence.sc, one block, cta | forbidden | mixed SB_cta
r1 == 0 and r2 == 0
a.0: st.weak [x], 1; fence.sc.cta; ld.weak r1, [y]
a.1: st.weak [y], 1; fence.sc.cta; ld.weak r2, [x]

SB+fence.sc, two blocks, cta | allowed | Dat3M Manual/SB+sc-cta-outScope
r1 == 0 and r2 == 0
a.0: st.weak [x], 1; fence.sc.cta; ld.weak r1, [y]
b.0: st.weak [y], 1; fence.sc.cta; ld.weak r2, [x]

SB+fence.acq_rel | allowed | ISA 8.10.6 "Store Buffering"; Dat3M Manual/SB+acq_rel-cta
r1 == 0 and r2 == 0
a.0: st.weak [x], 1; fence.acq_rel.sys; ld.weak r1, [y]
b.0: st.weak [y], 1; fence.acq_rel.sys; ld.weak r2, [x]

SB+release+acquire | allowed | ISA 8.9.4: nothing synchronizes
r1 == 0 and r2 == 0
a.0: st.release.gpu [x], 1; ld.acquire.gpu r1, [y]
b.0: st.release.gpu [y], 1; ld.acquire.gpu r2, [x]

SB+atoms | forbidden | mixed SB_rmw
r2 == 0 and r4 == 0
a.0: atom.acq_rel.gpu.add r1, [x], 1; atom.acq_rel.gpu.add r2, [y], 1
b.0: atom.acq_rel.gpu.add r3, [y], 1; atom.acq_rel.gpu.add r4, [x], 1

SB+atoms and st, ld | allowed | mixed SB_rmw_2
r2 == 0 and r3 == 0
a.0: atom.acq_rel.gpu.add r1, [x], 1; atom.acq_rel.gpu.add r2, [y], 1
b.0: st.relaxed.gpu [y], 1; ld.relaxed.gpu r3, [x]

SB+bar.sync | forbidden | Dat3M Manual/SB+bar-const-equal
r1 == 0 or r2 == 0
a.0: st.weak [x], 1; bar.sync 1; ld.weak r1, [y]
a.1: st.weak [y], 1; bar.sync 1; ld.weak r2, [x]

LB | allowed | ISA 8.10.4 "Load Buffering without dependencies"
r1 == 1 and r2 == 1
a.0: ld.weak r1, [x]; st.weak [y], 1
b.0: ld.weak r2, [y]; st.weak [x], 1

LB+deps | forbidden | ISA 8.10.4; fig. 8
r1 != 0 or r2 != 0
a.0: ld.weak r1, [y]; st.weak [x], r1
b.0: ld.weak r2, [x]; st.weak [y], r2

LB+release+acquire | forbidden | Dat3M Manual/LB+RMW-b is this with a relaxed read
r1 == 1 and r2 == 1
a.0: ld.acquire.gpu r1, [y]; st.weak [x], 1
b.0: ld.relaxed.gpu r2, [x]; st.release.gpu [y], 1

IRIW+acquire | allowed | fig. 4: not multi-copy atomic (3.4); ISA 8.9.4
r1 == 1 and r2 == 0 and r3 == 1 and r4 == 0
a.0: st.release.gpu [x], 1
b.0: st.release.gpu [y], 1
c.0: ld.acquire.gpu r1, [x]; ld.acquire.gpu r2, [y]
d.0: ld.acquire.gpu r3, [y]; ld.acquire.gpu r4, [x]

IRIW+fence.sc | forbidden | ISA 8.10.2, 8.10.6: the fences are ordered one way or the other
r1 == 1 and r2 == 0 and r3 == 1 and r4 == 0
a.0: st.relaxed.gpu [x], 1
b.0: st.relaxed.gpu [y], 1
c.0: ld.relaxed.gpu r1, [x]; fence.sc.gpu; ld.relaxed.gpu r2, [y]
d.0: ld.relaxed.gpu r3, [y]; fence.sc.gpu; ld.relaxed.gpu r4, [x]

IRIW+weak, fence.sc of two scopes | allowed | Dat3M Memalloy/IRIW1
r1 == 1 and r2 == 0 and r3 == 1 and r4 == 0
a.0: st.weak [x], 1
b.1: ld.weak r1, [x]; fence.sc.cta; ld.weak r2, [y]
b.2: st.weak [y], 1
b.3: ld.weak r3, [y]; fence.sc.gpu; ld.weak r4, [x]

WRC+release+acquire | forbidden | ISA 8.9.5: base causality order is transitive
r1 == 1 and r2 == 1 and r3 == 0
a.0: st.release.gpu [x], 1
b.0: ld.acquire.gpu r1, [x]; st.release.gpu [y], 1
c.0: ld.acquire.gpu r2, [y]; ld.weak r3, [x]

WRC+relaxed | allowed | ISA 8.8: no patterns
r1 == 1 and r2 == 1 and r3 == 0
a.0: st.relaxed.gpu [x], 1
b.0: ld.relaxed.gpu r1, [x]; st.relaxed.gpu [y], 1
c.0: ld.relaxed.gpu r2, [y]; ld.relaxed.gpu r3, [x]

WRC+weak, fence.sc of two scopes | allowed | Dat3M Memalloy/WRC1
r1 == 1 and r2 == 1 and r3 == 0
a.0: st.weak [x], 1
b.0: ld.weak r1, [x]; fence.sc.cta; st.weak [y], 1
b.1: ld.weak r2, [y]; fence.sc.gpu; ld.weak r3, [x]

ISA2 | forbidden | mixed ISA2; Dat3M Manual/MP-3-transitive
r0 == 1 and r1 == 1 and r2 != 42
a.0: st.weak [x], 42; st.release.cta [f], 1
a.1: ld.acquire.cta r0, [f]; st.release.gpu [g], 1
b.0: ld.acquire.gpu r1, [g]; ld.weak r2, [x]

ISA2, the second link of cta | allowed | ISA 8.7: not morally strong
r0 == 1 and r1 == 1 and r2 != 42
a.0: st.weak [x], 42; st.release.cta [f], 1
a.1: ld.acquire.cta r0, [f]; st.release.cta [g], 1
b.0: ld.acquire.gpu r1, [g]; ld.weak r2, [x]

ISA2+bar.sync | forbidden | ISA 8.9.5: cumulative through a barrier
r1 == 1 and r2 == 0
a.0: st.weak [x], 1; bar.sync 1
a.1: bar.sync 1; st.release.gpu [f], 1
b.0: ld.acquire.gpu r1, [f]; bar.sync 1
b.1: bar.sync 1; ld.weak r2, [x]

2+2W+relaxed | allowed | ISA 8.9.6 orders writes of one location only
final("x", 1) and final("y", 1)
a.0: st.relaxed.gpu [x], 1; st.relaxed.gpu [y], 2
b.0: st.relaxed.gpu [y], 1; st.relaxed.gpu [x], 2

2+2W+release | allowed | ISA 8.9.4: nothing is observed
final("x", 1) and final("y", 1)
a.0: st.release.gpu [x], 1; st.release.gpu [y], 2
b.0: st.release.gpu [y], 1; st.release.gpu [x], 2

2+2W+fence.sc | forbidden | ISA 8.10.1, 8.10.2
final("x", 1) and not final("x", 2) and final("y", 1) and not final("y", 2)
a.0: st.relaxed.gpu [x], 1; fence.sc.gpu; st.relaxed.gpu [y], 2
b.0: st.relaxed.gpu [y], 1; fence.sc.gpu; st.relaxed.gpu [x], 2

CoRR | forbidden | ISA 8.10.5 "CoRR"
r1 == 1 and r2 == 0
a.0: st.relaxed.sys [x], 1
b.0: ld.relaxed.sys r1, [x]; ld.relaxed.sys r2, [x]

CoRR, second read weak | forbidden | fig. 9a
r1 == 1 and r2 == 0
a.0: st.relaxed.gpu [x], 1
b.0: ld.relaxed.gpu r1, [x]; ld.weak r2, [x]

CoRR+weak | allowed | Dat3M Manual/CoRR-weak-weak
r1 == 1 and r2 == 0
g0/a.0: st.release.gpu [x], 1
g1/b.0: ld.weak r1, [x]; ld.weak r2, [x]

CoRR, two observers | forbidden | Dat3M Manual/Coherence
r1 == 1 and r2 == 2 and r3 == 2 and r4 == 1
a.0: st.relaxed.sys [x], 1
a.1: st.relaxed.sys [x], 2
a.2: ld.acquire.sys r1, [x]; ld.acquire.sys r2, [x]
a.3: ld.acquire.sys r3, [x]; ld.acquire.sys r4, [x]

CoRW | forbidden | fig. 9b
r1 == 1 and final("x", 1) and not final("x", 2)
a.0: st.relaxed.gpu [x], 1
b.0: ld.relaxed.gpu r1, [x]; st.weak [x], 2

CoRW, both ways | allowed | Dat3M Manual/CoRW-WW
r1 == 5 and final("y", 4) and not final("y", 3)
a.0: ld.acquire.sys r1, [x]; st.release.sys [y], 3
b.0: st.release.sys [y], 4; st.relaxed.sys [x], 5

CoWR | forbidden | fig. 9c
final("x", 2) and not final("x", 1) and r1 == 1
a.0: st.relaxed.gpu [x], 1
b.0: st.relaxed.gpu [x], 2; ld.weak r1, [x]

CoWW | forbidden | fig. 9d
final("x", 1)
a.0: st.weak [x], 1; st.weak [x], 2

CoWW+RR, weak | allowed | Dat3M Manual/CoWW-RR
r1 == 2 and r2 == 1
a.0: st.weak [x], 1; st.weak [x], 2
a.1: ld.weak r1, [x]; ld.weak r2, [x]

CoMP | allowed | mixed CoMP_volatile (a volatile access is relaxed.sys)
r1 == 2 and r2 != 2
a.0: st.weak [x], 1; st.relaxed.sys [x], 2
b.0: ld.weak r1, [x]; ld.relaxed.sys r2, [x]

Atoms of sys | forbidden | ISA 8.10.3 "Litmus Test 1"
not final("x", 2)
a.0: atom.relaxed.sys.add r1, [x], 1
b.0: atom.relaxed.sys.add r2, [x], 1

Atoms of cta and gpu | allowed | ISA 8.10.3 "Litmus Test 2"
final("x", 1)
a.0: atom.relaxed.cta.add r1, [x], 1
b.0: atom.relaxed.gpu.add r2, [x], 1
"""


@dataclass(frozen=True)
class Litmus:
    name: str
    allowed: bool
    source: str
    outcome: str
    threads: dict  # {name: instructions}

    def __str__(self):
        return self.name


def _litmus(text):
    title, outcome, *threads = text.splitlines()
    name, verdict, source = title.split(" | ")
    assert verdict in ("allowed", "forbidden"), title
    return Litmus(
        name, verdict == "allowed", source, outcome, dict(line.split(": ", 1) for line in threads)
    )


LITMUS = [_litmus(text) for text in TEXT.strip().split("\n\n")]
