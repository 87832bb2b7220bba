"""Reads PTX text into objects: a module's kernels, their declarations and their instructions.

Only what nvcc and Triton write is read; any other directive or operand raises PtxError with its
line. "PTX ISA" is NVIDIA's Parallel Thread Execution ISA, version 9; its sections are cited by
their titles.
"""

import re
from dataclasses import dataclass, field, replace

IDENTIFIER = r"[%$A-Za-z_][\w$]*"
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
LINKAGE = r"(?:\.visible\s+|\.weak\s+)?"
ENTRY = re.compile(rf"{LINKAGE}\.entry\s+([\w$]+)\s*\((.*?)\)([^{{]*)\{{", re.S)
# A device function with its body, or only its declaration (PTX ISA, Kernel and Function Directives:
# .func). The parameters of its results stand before its name.
FUNCTION = re.compile(
    rf"{LINKAGE}\.func\s*(?:\((?P<results>[^)]*)\)\s*)?(?P<name>[\w$]+)\s*"
    r"\((?P<parameters>[^)]*)\)\s*(?P<noreturn>\.noreturn\s*)?(?P<end>[{;])"
)
VARIABLE = re.compile(
    r"\.(?P<space>global|shared|local|param|const)\s+(?:\.align\s+(?P<align>\d+)\s+)?"
    rf"\.(?P<type>\w+)\s+(?P<name>{IDENTIFIER})(?:\[(?P<count>\d*)\])?"
    r"(?:\s*=\s*\{(?P<values>[^}]*)\})?"
)
INSTRUCTION = re.compile(
    rf"(?:@(?P<negated>!?)(?P<guard>{IDENTIFIER})\s+)?(?P<opcode>[a-z]\w*(?:\.[\w:]+)*)\s*(?P<operands>.*)",
    re.S,
)
POINTER = re.compile(r"\s*\.ptr\b(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?")  # of a parameter
# Directives that say nothing about what a kernel computes: debug information, and limits for the
# register allocator.
IGNORED = re.compile(r"\.(?:loc|file|pragma|section|version|target|address_size)\b")


class PtxError(Exception):
    """PTX that the translator does not know."""


@dataclass(frozen=True)
class Register:
    name: str
    negated: bool = False


@dataclass(frozen=True)
class Immediate:
    text: str


@dataclass(frozen=True)
class Symbol:
    """A variable's name as an operand: its address."""

    name: str


@dataclass(frozen=True)
class Address:
    base: "Register | Symbol | Immediate"
    offset: int


@dataclass(frozen=True)
class Vector:
    """Operands in braces, or in the parentheses of a call."""

    elements: tuple


@dataclass(frozen=True)
class Variable:
    space: str
    name: str
    align: int
    bytes: int  # 0: an array without a size, which is dynamic shared memory
    values: tuple = ()


@dataclass(frozen=True)
class Instruction:
    line: int
    opcode: str  # with its modifiers
    operands: tuple
    guard: Register | None = None

    @property
    def parts(self):
        return self.opcode.split(".")


@dataclass(frozen=True)
class Label:
    line: int
    name: str


@dataclass
class Entry:
    """A kernel, or a device function, which has results and parameters.

    registers: {name or prefix: type}, where `%r<9>` declares the prefix `%r`
    """

    name: str
    file: str
    parameters: list  # of a device function: first those of its results
    is_kernel: bool = True
    returns: bool = True
    registers: dict = field(default_factory=dict)
    variables: list = field(default_factory=list)  # declared inside the kernel
    body: list = field(default_factory=list)  # of Instruction and Label

    def type_of(self, register):
        prefix = re.match(r"\D*", register)[0]
        found = self.registers.get(register) or self.registers.get(prefix)
        if found is None:
            raise PtxError(f"{self.file}: {self.name} does not declare {register}")
        return found


@dataclass
class Module:
    file: str
    target: str
    variables: list
    entries: list  # the kernels
    functions: dict = field(default_factory=dict)  # {name: device function}


SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2}
SIZES |= {f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (32, 64)}


def split(text):
    """Splits at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[{(") - (c in "]})")
        if c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def operand(text, where):
    """Parses an operand (PTX ISA, Instruction Operands)."""
    if text[0] in "{(":
        return Vector(tuple(operand(part, where) for part in split(text[1:-1])))
    if text[0] == "[":
        inside = re.fullmatch(r"\[\s*(.+?)\s*(?:\+\s*(-?\w+)\s*)?\]", text, re.S)
        return Address(operand(inside[1], where), int(inside[2] or "0", 0))
    if re.fullmatch(
        r"0[fF][0-9A-Fa-f]{8}|0[dD][0-9A-Fa-f]{16}|-?(?:0[xX][0-9A-Fa-f]+|\d+)U?", text
    ):
        return Immediate(text)
    if re.fullmatch(r"!?%[\w$]+(?:\.[xyz])?", text):
        return Register(text.lstrip("!"), text[0] == "!")
    if re.fullmatch(IDENTIFIER, text):
        return Symbol(text)
    raise PtxError(f"{where}: operand {text}")


def variable(text, where):
    found = VARIABLE.fullmatch(text.strip())
    if not found or found["type"] not in SIZES:
        raise PtxError(f"{where}: declaration {text}")
    size = SIZES[found["type"]]
    count = 1 if found["count"] is None else int(found["count"] or 0)
    values = tuple(int(value, 0) for value in split(found["values"] or ""))
    align = int(found["align"] or size)
    return Variable(found["space"], found["name"], align, size * count, values)


def module(text, file, only=""):
    """Parses a module. file: its name in error messages    only: of the kernels' names, a regular
    expression
    """
    text = COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    target = re.search(r"\.target\s+(\w+)", text)
    text, functions = without_functions(text, file)
    entries, outside, end = [], [], 0
    for head in ENTRY.finditer(text):
        if head.start() < end:
            continue
        outside.append(text[end : head.start()])
        end = end_of_body(text, head.end())
        if not re.search(only, head[1]):
            continue
        entries.append(Entry(head[1], file, parameters(head[2], f"{file}: {head[1]}")))
        read_body(entries[-1], text[head.end() : end - 1], line_of(text, head.end()))
    outside.append(re.sub(r"\.section\b[^{]*\{.*?\}", "", text[end:], flags=re.S))
    variables = [v for part in outside for v in globals_of(part, file)]
    return Module(file, target[1], variables, entries, functions)


def without_functions(text, file):
    """Takes the device functions out of a module's text. Returns the text, with as many lines, and
    {name: function}; functions that are only declared, as those of the device library, are not in
    it.
    """
    functions, kept, end = {}, [], 0
    for head in FUNCTION.finditer(text):
        kept.append(re.sub(r"\.extern\s*$", "", text[end : head.start()]))
        end = head.end()
        if head["end"] == "{":
            end = end_of_body(text, end)
            name, where = head["name"], f"{file}: {head['name']}"
            found = [parameters(head[part] or "", where) for part in ("results", "parameters")]
            function = Entry(name, file, [*found[0], *found[1]], False, not head["noreturn"])
            read_body(function, text[head.end() : end - 1], line_of(text, head.end()))
            functions[name] = function
        kept.append("\n" * text.count("\n", head.start(), end))
    return "".join([*kept, text[end:]]), functions


def end_of_body(text, first):
    """The end of the block `{ ... }` whose text begins at `first`."""
    end, depth = first, 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return end


def line_of(text, at):
    return text.count("\n", 0, at) + 1


def parameters(text, where):
    return [variable(POINTER.sub("", part), where) for part in split(text)]


def globals_of(text, file):
    """The variables declared outside of kernels."""
    for statement in text.split(";"):
        statement = re.sub(
            r"^(\s*\.(version|target|address_size|file)\b[^\n]*\n)+", "", statement
        ).strip()
        if not statement or IGNORED.match(statement):
            continue
        yield variable(re.sub(r"^(\.visible|\.extern|\.weak)\s+", "", statement), file)


TOKEN = re.compile(
    rf"\s*(?:(?P<brace>[{{}}])|(?P<label>{IDENTIFIER}):(?!:)|"
    r"(?P<debug>\.(?:loc|file)\b[^\n]*)\n|(?P<statement>[^;]+);)"
)


def read_body(entry, text, line):
    """Reads declarations, labels and instructions of a kernel into `entry`.

    A block `{ ... }` may declare registers and variables that hide those outside of it. They get
    the block's number as a suffix.
    """
    text, at, blocks, hidden = text.rstrip(), 0, 0, [{}]
    while at < len(text):
        found = TOKEN.match(text, at)
        if not found:
            raise PtxError(f"{entry.file}:{line}: {text[at : at + 60].strip()!r}")
        number = line + text.count("\n", at, found.start(found.lastgroup))
        line += text.count("\n", at, found.end())
        at = found.end()
        if found["brace"] == "{":
            blocks += 1
            hidden.append(dict(hidden[-1]))
        elif found["brace"]:
            hidden.pop()
        elif found["label"]:
            entry.body.append(Label(number, found["label"]))
        elif found["statement"]:
            suffix = f"_in_{blocks}" if len(hidden) > 1 else ""
            read_statement(entry, found["statement"].strip(), number, hidden[-1], suffix)


def read_statement(entry, text, line, hidden, suffix):
    """hidden: {name: name with its block's suffix}    suffix: of the block of this statement"""
    where = f"{entry.file}:{line}"
    if text.startswith(".reg"):
        kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S).groups()
        for name in split(names):
            name = re.sub(r"<\d+>$", "", name)
            hidden[name] = name + suffix
            entry.registers[name + suffix] = kind
    elif text.startswith((".param", ".shared", ".local")):
        found = variable(text, where)
        hidden[found.name] = found.name + suffix
        entry.variables.append(replace(found, name=found.name + suffix))
    elif not text.startswith("."):
        found = INSTRUCTION.fullmatch(text)
        if not found:
            raise PtxError(f"{where}: {text}")
        operands = [named(operand(part, where), hidden) for part in split(found["operands"])]
        guard = found["guard"] and named(Register(found["guard"], bool(found["negated"])), hidden)
        entry.body.append(Instruction(line, found["opcode"], tuple(operands), guard or None))
    elif not IGNORED.match(text):
        raise PtxError(f"{where}: {text}")


def named(found, hidden):
    """The operand with the names that the blocks around it give to its registers and variables."""
    match found:
        case Register(name, _) | Symbol(name):
            return replace(found, name=hidden.get(name, name))
        case Address(base, offset):
            return Address(named(base, hidden), offset)
        case Vector(elements):
            return Vector(tuple(named(element, hidden) for element in elements))
    return found
