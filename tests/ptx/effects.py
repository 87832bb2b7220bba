"""The instructions that do more than compute a register: moves, memory, control, synchronization.

Each function gives the C++ statements of one instruction; `g` is the Generator. Its docstring names
the section of the PTX ISA. A modifier that the function does not know is an error.
"""

import re

from tests.ptx import fragments
from tests.ptx.cpp import TYPES, label
from tests.ptx.parse import PtxError, Symbol, Vector

SPACES = ("param", "global", "shared", "local")
# Hints for caches, which do not change what a load or store means.
HINTS = re.compile(r"ca|cg|cs|lu|cv|wb|wt|nc|L[12]::\w+|weak")
VALUE = r"[bus](?:8|16|32|64)|f32|f64"


def effect(opcode):
    """The function of an opcode, or None."""
    return FUNCTIONS.get(opcode.split(".")[0])


def elements(operand):
    return operand.elements if isinstance(operand, Vector) else (operand,)


def modifiers(item, known):
    """The modifiers of an opcode by name; {"space": "global", ...}. known: {name: pattern}"""
    found = {}
    for part in item.parts[1:]:
        if HINTS.fullmatch(part) and item.parts[0] in ("ld", "st"):
            continue
        names = [name for name, pattern in known.items() if re.fullmatch(pattern, part)]
        if len(names) != 1 or names[0] in found:
            raise PtxError(f"unknown modifier .{part}")
        found[names[0]] = part
    return found


def mov(g, item):
    """Data Movement and Conversion Instructions: mov, with packing and unpacking of vectors."""
    kind = modifiers(item, {"type": rf"{VALUE}|pred"})["type"]
    to, source = item.operands
    if isinstance(to, Vector):
        count = len(to.elements)
        part = int(kind[1:]) // count
        value = g.read(source, kind.replace("f", "b"))
        return "".join(
            g.write(register, f"b{part}", f"{value} >> {i * part}")
            for i, register in enumerate(to.elements)
        )
    if isinstance(source, Vector):
        part = int(kind[1:]) // len(source.elements)
        values = (
            f"uint{kind[1:]}_t({g.read(element, f'b{part}')}) << {i * part}"
            for i, element in enumerate(source.elements)
        )
        return g.write(to, f"b{kind[1:]}", " | ".join(values))
    return g.write(to, kind, g.read(source, kind))


def access(item):
    """The modifiers of a load or store, the number of its elements and the function's name."""
    found = modifiers(
        item,
        {
            "order": "acquire|release|relaxed|volatile",
            "scope": "cta|gpu|sys",
            "space": "|".join(SPACES),
            "vector": "v2|v4",
            "type": VALUE,
        },
    )
    order, space = found.get("order"), found.get("space")
    if order and order != "volatile" and found.get("scope") not in ("gpu", "sys"):
        raise PtxError("only the scopes gpu and sys of strong operations are known")
    if order and space != "global":
        raise PtxError("strong operations are known in global memory only")
    kind = "relaxed" if order == "volatile" else order or ("own" if space in OWN else "")
    if order == "relaxed" and found["type"] == "b32":
        kind = "words"  # csrc/cuda/ptx.cuh: other blocks may access them at the same time
    return found, int(found.get("vector", "v1")[1:]), f"_{kind}" if kind else ""


OWN = ("param", "local")  # the state spaces that belong to one thread


def ld(g, item):
    """Data Movement and Conversion Instructions: ld, ld.global.nc; Memory Consistency Model."""
    found, count, name = access(item)
    space, kind = found.get("space"), found["type"]
    registers = elements(item.operands[0])
    if len(registers) != count:
        raise PtxError(f"{len(registers)} registers for {count} elements")
    pointer = g.address(item.operands[1], space)
    line = f", {item.line}" if "order" in found else ""
    loaded = "".join(g.write(r, kind, f"v[{i}]") for i, r in enumerate(registers))
    return f"{{ {TYPES[kind]} v[{count}]; ptx::load{name}({pointer}, v{line}); {loaded} }}"


def st(g, item):
    """Data Movement and Conversion Instructions: st; Memory Consistency Model."""
    found, count, name = access(item)
    space, kind = found.get("space"), found["type"]
    registers = elements(item.operands[1])
    if len(registers) != count:
        raise PtxError(f"{len(registers)} registers for {count} elements")
    pointer = g.address(item.operands[0], space)
    values = ", ".join(g.read(r, kind) for r in registers)
    return f"{{ const {TYPES[kind]} v[{count}] = {{{values}}}; ptx::store{name}({pointer}, v); }}"


def cvta(g, item):
    """Data Movement and Conversion Instructions: cvta, of shared memory."""
    modifiers(item, {"to": "to", "space": "shared", "type": "u64"})
    sign = "-" if "to" in item.parts else "+"
    value, base = g.read(item.operands[1], "u64"), "reinterpret_cast<uint64_t>(shared)"
    return g.write(item.operands[0], "u64", f"{value} {sign} {base}")


def bra(g, item):
    """Control Flow Instructions: bra."""
    modifiers(item, {"uniform": "uni"})
    return f"goto {label(item.operands[0].name)};"


def ret(g, item):
    """Control Flow Instructions: ret, exit. In a kernel both end the thread; ret of a device
    function returns to the call, unless the function is declared with .noreturn.
    """
    modifiers(item, {"uniform": "uni"})
    if item.parts[0] == "exit" and not g.entry.is_kernel:
        raise PtxError("exit in a device function")
    if not g.entry.returns:
        return f'simt::fault_in_kernel("return at line %d of a .noreturn function", {item.line});'
    return "return;"


def trap(g, item):
    """Miscellaneous Instructions: trap."""
    return f'simt::fault_in_kernel("trap at line %d", {item.line});'


def membar(g, item):
    """Parallel Synchronization and Communication Instructions: membar.sys, before a trap, and
    fence.acq_rel.gpu.
    """
    if item.opcode not in ("membar.sys", "fence.acq_rel.gpu"):
        raise PtxError("unknown fence")
    return "simt::fence();"


def call(g, item):
    """Control Flow Instructions: call, of a device function of the module, by its name, or of the
    device library's __assertfail. The operands are variables of the state space .param.
    """
    modifiers(item, {"uniform": "uni"})
    results, rest = (), list(item.operands)
    if rest and isinstance(rest[0], Vector):
        results = rest.pop(0).elements
    values = [*results, *(rest[1].elements if len(rest) == 2 else ())]
    if not 1 <= len(rest) <= 2 or not all(
        isinstance(value, Symbol) for value in (rest[0], *values)
    ):
        raise PtxError("only functions can be called, with variables as arguments")
    if rest[0] == Symbol("__assertfail"):
        kinds = ["const char*", "const char*", "unsigned", "const char*", "uint64_t"]
        pointers = zip(kinds, values, strict=True)
        read = (f"*reinterpret_cast<{kind} const*>({g.name(v.name)})" for kind, v in pointers)
        return f"ptx::assertfail({', '.join(read)});"
    callee = g.callee(rest[0].name, [g.variables[value.name].bytes for value in values])
    addresses = ", ".join(g.name(value.name) for value in values)
    return f"{{ void* const values[] = {{{addresses or 'nullptr'}}}; {callee}(values); }}"


def bar(g, item):
    """Parallel Synchronization and Communication Instructions: bar, bar.warp.sync."""
    if item.opcode == "bar.warp.sync":
        return f"simt::sync_warp({g.read(item.operands[0], 'u32')}, {item.line});"
    if item.opcode not in ("bar.sync", "barrier.sync", "barrier.sync.aligned"):
        raise PtxError("unknown barrier")
    ids = [g.read(operand, "u32") for operand in item.operands]
    if len(ids) == 1 and getattr(item.operands[0], "text", "") == "0":
        return f"simt::sync_block({item.line}, false);"
    if len(ids) == 1:
        raise PtxError("a barrier of all threads must have number 0")
    return f"simt::sync_named(int({ids[0]}), int({ids[1]}), {item.line});"


def mma(g, item):
    """Warp Level Matrix Multiply-Accumulate Instructions: mma.sync.

    The result is computed in copies, so that d may or may not be the registers of c.
    """
    found = re.fullmatch(
        r"mma\.sync\.aligned\.(m16n8k16|m16n8k8)\.row\.col\.f32\.(f16|bf16|tf32)\.\2\.f32",
        item.opcode,
    )
    if not found:
        raise PtxError("unknown mma")
    shape, kind = found.groups()
    shape = f"{shape} tf32" if kind == "tf32" else shape
    if shape not in fragments.MMA:
        raise PtxError("unknown shape of mma")
    layout = fragments.MMA[shape]
    d, a, b, c = (operand.elements for operand in item.operands)
    per_register = 32 // layout.bits
    sizes = (
        len(layout.table("a")) // 32 // per_register,
        len(layout.table("b")) // 32 // per_register,
    )
    if (len(a), len(b), len(c), len(d)) != (*sizes, 4, 4):
        raise PtxError("a wrong number of registers")
    values = [", ".join(g.read(r, k) for r in rs) for rs, k in ((c, "f32"), (a, "b32"), (b, "b32"))]
    results = "".join(g.write(r, "f32", f"d[{i}]") for i, r in enumerate(d))
    return (
        f"{{ float d[4] = {{{values[0]}}}; "
        f"const uint32_t a[] = {{{values[1]}}}, b[] = {{{values[2]}}}; "
        f"ptx::mma({{d, a, b, &{fragments.identifier(shape)}, ptx::number_{kind}}}, {item.line}); "
        f"{results} }}"
    )


def shfl(g, item):
    """Data Movement and Conversion Instructions: shfl.sync, without a predicate as a result."""
    found = re.fullmatch(r"shfl\.sync\.(up|down|bfly|idx)\.b32", item.opcode)
    if not found:
        raise PtxError("unknown shuffle")
    value, by, bounds, lanes = (g.read(operand, "u32") for operand in item.operands[1:])
    g.uses_warp = True
    call = f"shuffle(Shuffle::{found[1]}, {value}, {by}, {bounds}, {lanes}, {item.line})"
    return g.write(item.operands[0], "b32", call)


def ldmatrix(g, item):
    """Warp Level Matrix Multiply-Accumulate Instructions: ldmatrix."""
    found = re.fullmatch(
        r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", item.opcode
    )
    registers = elements(item.operands[0])
    if not found or len(registers) != int(found[1]):
        raise PtxError("unknown ldmatrix")
    g.uses_warp = True
    pointer, transposed = g.address(item.operands[1], "shared"), str(bool(found[2])).lower()
    loaded = "".join(g.write(r, "b32", f"m[{i}]") for i, r in enumerate(registers))
    load = f"load_matrices({pointer}, m, {transposed}, {item.line})"
    return f"{{ uint32_t m[{len(registers)}]; {load}; {loaded} }}"


def stmatrix(g, item):
    """Warp Level Matrix Multiply-Accumulate Instructions: stmatrix, of 16-bit elements."""
    found = re.fullmatch(
        r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", item.opcode
    )
    registers = elements(item.operands[1])
    if not found or len(registers) != int(found[1]):
        raise PtxError("unknown stmatrix")
    g.uses_warp = True
    pointer, transposed = g.address(item.operands[0], "shared"), str(bool(found[2])).lower()
    values = ", ".join(g.read(r, "b32") for r in registers)
    store = f"store_matrices({pointer}, m, {transposed}, {item.line})"
    return f"{{ const uint32_t m[] = {{{values}}}; {store}; }}"


def cp(g, item):
    """Data Movement and Conversion Instructions: cp.async, commit_group and wait_group."""
    g.uses_warp = True
    if not g.entry.is_kernel:
        raise PtxError("cp.async in a device function")
    if item.opcode == "cp.async.commit_group":
        return "copies.commit();"
    if item.opcode == "cp.async.wait_group":
        return f"copies.wait({g.read(item.operands[0], 'u32')});"
    if not re.fullmatch(r"cp\.async\.(ca|cg)\.shared\.global", item.opcode):
        raise PtxError("unknown cp")
    to, source, *sizes = item.operands
    sizes = [g.read(size, "u32") for size in sizes]
    pointers = f"{g.address(to, 'shared')}, {g.address(source, 'global')}"
    return f"copies.copy({pointers}, {sizes[0]}, {sizes[-1]});"


FUNCTIONS = {
    "mov": mov,
    "ld": ld,
    "st": st,
    "cvta": cvta,
    "bra": bra,
    "ret": ret,
    "exit": ret,
    "trap": trap,
    "membar": membar,
    "fence": membar,
    "call": call,
    "bar": bar,
    "barrier": bar,
    "mma": mma,
    "shfl": shfl,
    "ldmatrix": ldmatrix,
    "stmatrix": stmatrix,
    "cp": cp,
}
