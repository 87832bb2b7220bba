"""Which orders of memory instructions occur on the paths through a compiled kernel.

The programs of exchange.py assume an order of instructions around a flag. This file finds, in
nvcc's PTX, every path on which it does not hold.
"""

import re
from dataclasses import dataclass, field

from tests.ptx.parse import ENTRY, FUNCTION, end_of_body

STATEMENT = re.compile(
    r"^\s*(?:(?P<label>\$?\w+):|(?P<guard>@!?%\w+\s+)?(?P<opcode>[a-z]\w*(?:\.[\w:]+)*)\s*(?P<operands>[^;]*);)",
    re.M,
)
ENDS = re.compile(r"(bra|ret|exit|trap)\b")
# The kinds of instructions that a path consists of. Any other that synchronizes is UNKNOWN, as is
# a relaxed, acquire or release operation of another scope than .gpu.
KINDS = (
    ("release", r"st\.release\.gpu\."),
    ("acquire", r"ld\.acquire\.gpu\."),
    ("word store", r"st\.relaxed\.gpu\.global\.(v2\.)?b32$"),
    ("word load", r"ld\.relaxed\.gpu\.global\.v4\.b32$"),
    ("fence", r"fence\.acq_rel\.gpu$"),
    ("store", r"st\.relaxed\.gpu\.global\."),
    ("load", r"ld\.relaxed\.gpu\.global\.v4\."),  # of a vector
    ("linked load", r"ld\.relaxed\.gpu\.global\."),  # of what the other layer has stored
    (
        "report",
        r"st\.relaxed\.sys\.global\.v4\.|(membar|fence\.(sc|acq_rel))\.sys$",
    ),  # of a lost block
    ("syncwarp", r"bar\.warp\.sync$"),
    ("barrier", r"bar(rier)?\.sync$"),
    ("shared store", r"st\.shared\."),
    ("shared load", r"ld\.shared\."),
    ("end of .noreturn", r"fall_through$"),  # inlined() writes it; nothing must reach it
    (
        "UNKNOWN",
        r"(bar|barrier|fence|membar|atom|red|mbarrier|cp|griddepcontrol|call)\b"
        r"|.*\.(relaxed|acquire|release|acq_rel|volatile|mmio|cta|cluster|sys)\b",
    ),
)
# A path breaks a rule if, after an instruction of the first kinds, it reaches one of the third
# kinds without one of the second kinds between them. `start` stands at the beginning of a kernel.
RULES = {
    "a barrier stands between the stores and the release": (("store",), ("barrier",), ("release",)),
    "a barrier stands between the loads and the release": (
        ("load", "linked load"),
        ("barrier",),
        ("release",),
    ),
    "the warp synchronizes after an acquire": (
        ("acquire",),
        ("syncwarp",),
        ("load", "linked load", "store", "release", "barrier", "shared store", "shared load"),
    ),
    "every load follows a wait of its warp": (("start", "barrier"), ("syncwarp",), ("load",)),
    "a barrier stands between partial sums and their reads": (
        ("shared store",),
        ("barrier",),
        ("shared load",),
    ),
    "a report of a lost block ends the kernel": (
        ("report",),
        (),
        tuple(kind for kind, _ in KINDS if kind != "report"),
    ),
}
# Of kernels whose exchange is by words.
WORD_RULES = {
    "a barrier stands between the loads of words and the next stores": (
        ("word load",),
        ("barrier",),
        ("word store",),
    ),
    "a barrier stands between the stores of words and their loads": (
        ("word store",),
        ("barrier",),
        ("word load",),
    ),
    "a barrier stands between the stores of words and the fence": (
        ("word store",),
        ("barrier",),
        ("fence",),
    ),
    **{
        rule: RULES[rule]
        for rule in (
            "a barrier stands between partial sums and their reads",
            "a report of a lost block ends the kernel",
        )
    },
}


@dataclass
class Node:
    kind: str  # of KINDS, or "start", or empty
    text: str
    next: list = field(default_factory=list)


def kind_of(opcode):
    return next((kind for kind, pattern in KINDS if re.match(pattern, opcode)), "")


CALL = re.compile(r"\bcall(?:\.uni)?\s+(?:\([^)]*\)\s*,\s*)?(\w+)\s*(?:,\s*\([^)]*\)\s*)?;")


def inlined(text):
    """The text of a PTX module with the bodies of its device functions in place of their calls. The
    body of a function that does not return ends in `fall_through`. The call of a function of the
    device library, whose body is not in the module, is an unknown instruction.
    """
    bodies, kept, end = {}, [], 0
    for head in FUNCTION.finditer(text):
        kept.append(text[end : head.start()])
        end = head.end()
        if head["end"] == "{":
            end = end_of_body(text, end)
            bodies[head["name"]] = text[head.end() : end - 1]
            bodies[head["name"]] += "\nfall_through;\n" if head["noreturn"] else ""
    text = "".join([*kept, text[end:]])
    number = 0

    def body(call):
        nonlocal number
        if call[1] not in bodies:
            return call[0]
        number += 1
        code = re.sub(r"(\$L\w+)", rf"\1_of_call_{number}", bodies[call[1]])
        after = f"$after_call_{number}"
        return re.sub(r"\bret;", f"bra {after};", code) + f"\n{after}:\n"

    while (expanded := CALL.sub(body, text)) != text:
        text = expanded
    return text


def kernels(text):
    """{name: nodes} of the kernels of a PTX module."""
    text = inlined(re.sub(r"//[^\n]*", "", text))
    heads = list(ENTRY.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return {h[1]: nodes(text[h.end() : end]) for h, end in zip(heads, ends, strict=True)}


def nodes(body):
    """The control flow graph of a kernel, of which node 0 is the start."""
    graph, labels, branches, open_ends = [Node("start", "start")], {}, [], [0]
    for found in STATEMENT.finditer(body):
        if found["label"]:
            labels[found["label"]] = len(graph)
            graph.append(Node("", found["label"]))
        else:
            opcode = found["opcode"]
            kind = kind_of(opcode)
            if not (kind or ENDS.match(opcode)):
                continue
            graph.append(Node(kind, found[0].strip()))
            if opcode.startswith("bra"):
                branches.append((len(graph) - 1, found["operands"].strip()))
        this = len(graph) - 1
        for end in open_ends:
            graph[end].next.append(this)
        # A guarded instruction may also be passed over.
        passes = found["label"] or found["guard"] or not ENDS.match(found["opcode"])
        skipped = open_ends if found["guard"] and not graph[this].text.count("bra") else []
        open_ends = [*skipped, *([this] if passes else [])]
    for node, label in branches:
        graph[node].next.append(labels[label])
    return graph


def broken(graph, rule):
    """The instructions at which a path breaks a rule: (first instruction, last instruction)."""
    after, between, at = (RULES | WORD_RULES)[rule]
    for first in graph:
        if first.kind not in after:
            continue
        seen, pending = set(), list(first.next)
        while pending:
            n = pending.pop()
            if n in seen or graph[n].kind in between:
                continue
            seen.add(n)
            if graph[n].kind in at:
                yield first.text, graph[n].text
                continue
            pending += graph[n].next


def counts(graph):
    found = {}
    for node in graph:
        if node.kind:
            found[node.kind] = found.get(node.kind, 0) + 1
    return found
