"""Turns a kernel of parse.py into a C++ function of the addresses of the kernel's arguments.

A register is a local variable of an unsigned type of its size, float, double or bool. An
instruction is one statement: from the table of arithmetic.py, or by a function of effects.py.
`#line` directives give the lines of the PTX to the debugger, so that messages of tests/simt name
them.

An address in shared memory is an offset from the block's shared memory: the variables of known
size, then the dynamic part. Addresses in the other state spaces are the machine's.
"""

from tests.ptx import arithmetic, effects
from tests.ptx.cpp import BITS, TYPES, converted, immediate, label
from tests.ptx.parse import Address, Immediate, Instruction, Label, PtxError, Register, Symbol

THREAD, GRID = "simt::globals.current->", "simt::globals."
SPECIAL = {  # PTX ISA, Special Registers
    **{f"%tid.{axis}": f"{THREAD}thread.{axis}" for axis in "xyz"},
    **{f"%ctaid.{axis}": f"{THREAD}block.{axis}" for axis in "xyz"},
    **{f"%ntid.{axis}": f"{GRID}block.{axis}" for axis in "xyz"},
    **{f"%nctaid.{axis}": f"{GRID}grid.{axis}" for axis in "xyz"},
    "%laneid": f"{THREAD}lane",
}
SHARED_ALIGNMENT = 128
# In the checked build too this code is compiled without sanitizers: memory.h calls the checks.
HEADER = '#include "memory.h"\n#include "fragments.h"\nusing namespace ptx;\n'


class Generator:
    """The C++ code of one kernel, or of a device function for one kernel.

    A device function has the kernel's signature: the addresses of its results and parameters.
    callers: the functions on the way from the kernel to this one
    """

    def __init__(self, entry, module, callers=()):
        self.entry, self.at, self.module, self.callers = entry, None, module, callers
        self.callees = {}  # {name: Generator} of the device functions that it calls
        self.used, self.lines, self.uses_warp = {}, [], False
        self.variables = {v.name: v for v in (*module.variables, *entry.variables)}
        self.parameters = {p.name: i for i, p in enumerate(entry.parameters)}
        self.shared, self.shared_bytes = {}, 0
        for v in self.variables.values():
            if v.space == "shared" and v.bytes and self.mentions(v.name):
                self.shared_bytes = -(-self.shared_bytes // v.align) * v.align
                self.shared[v.name] = self.shared_bytes
                self.shared_bytes += v.bytes
        self.shared_bytes = -(-self.shared_bytes // SHARED_ALIGNMENT) * SHARED_ALIGNMENT

    def mentions(self, name):
        return any(
            name == getattr(getattr(operand, "base", operand), "name", None)
            for item in self.entry.body
            if isinstance(item, Instruction)
            for operand in item.operands
        )

    # ---- operands

    def storage(self, register):
        """The C++ type of a register, which the function declares."""
        found = TYPES[self.entry.type_of(register)]
        self.used[register] = found
        return found

    def name(self, register):
        return "r_" + register.lstrip("%").replace("$", "_")

    def read(self, operand, kind):
        """The operand as a C++ expression of the PTX type `kind`."""
        want = TYPES[kind]
        match operand:
            case Immediate(text):
                return immediate(text, want)
            case Register(name, negated) if name in SPECIAL:
                return f"{want}({SPECIAL[name]})"
            case Register(name, negated):
                found = converted(self.name(name), self.storage(name), want)
                return f"!{found}" if negated else found
            case Symbol(name) if name in self.entry.registers:
                return converted(self.name(name), self.storage(name), want)
            case Symbol(name):
                return f"{want}({self.symbol(name)})"
        raise PtxError(f"operand {operand}")

    def write(self, operand, kind, expression):
        """The statement that assigns an expression of the PTX type `kind` to a register."""
        if operand == Symbol("_"):
            return ""
        want = self.storage(operand.name)
        value = expression if TYPES[kind] == want else f"{TYPES[kind]}({expression})"
        return f"{self.name(operand.name)} = {converted(value, TYPES[kind], want)};"

    def symbol(self, name):
        """A variable's address."""
        if name in self.parameters:
            return f"uint64_t(arguments[{self.parameters[name]}])"
        v = self.variables.get(name)
        if v is None:
            raise PtxError(f"{name} is not declared")
        if v.space == "shared":
            return f"{self.shared[name]}u" if v.bytes else f"{self.shared_bytes}u"
        return f"uint64_t({self.name(name)})"

    def address(self, operand, space):
        """An address operand as a pointer."""
        assert isinstance(operand, Address), operand
        match operand.base:
            case Register(name, _) if BITS[self.storage(name)] == 32:
                base = f"int32_t({self.name(name)})"
            case base_operand:
                base = self.read(base_operand, "u64")
        offset = f" + {operand.offset}" if operand.offset else ""
        if space == "shared":
            return f"(shared + {base}{offset})"
        return f"(reinterpret_cast<char*>({base}){offset})"

    def callee(self, name, sizes):
        """The C++ name of a device function. sizes: of its results and parameters, in bytes"""
        found = self.module.functions.get(name)
        if not found:
            raise PtxError(f"the function {name} is not defined")
        if name in (*self.callers, self.entry.name):
            raise PtxError(f"{name} calls itself")
        if sizes != [p.bytes for p in found.parameters]:
            raise PtxError(f"{name} has other results or parameters")
        if name not in self.callees:
            self.callees[name] = Generator(found, self.module, (*self.callers, self.entry.name))
        return f"{self.prefix}_{list(self.callees).index(name)}"

    # ---- code

    def emit(self, text):
        self.lines.append(text)

    def instruction(self, item):
        opcode, found = item.opcode, arithmetic.meaning(item.opcode)
        effect = effects.effect(opcode)
        if found:
            result, *kinds = found.types
            if len(kinds) + 1 != len(item.operands):
                raise PtxError(f"{len(item.operands)} operands, needs {len(kinds) + 1}")
            operands = [self.read(o, k) for o, k in zip(item.operands[1:], kinds, strict=True)]
            names = dict(zip("abcd", operands, strict=False))
            names |= {name: TYPES[kind] for name, kind in found.names.items() if kind in TYPES}
            code = self.write(item.operands[0], result, found.row.result.format(**names))
        elif effect:
            code = effect(self, item)
        else:
            raise PtxError("unknown instruction")
        if item.guard:
            code = f"if ({self.read(item.guard, 'pred')}) {{ {code} }}"
        if effect:
            self.emit(f"#line {item.line}")
        self.emit(code)

    def function(self, name):
        """The text of the function `name`, after those that it calls."""
        self.prefix = name
        for item in self.entry.body:
            self.at = item
            if isinstance(item, Label):
                self.emit(f"{label(item.name)}:;")
                continue
            try:
                self.instruction(item)
            except PtxError as error:
                operands = f"{item.opcode} with {item.operands}"
                raise PtxError(f"{self.entry.file}:{item.line}: {error}: {operands}") from None
        called = [g.function(f"{name}_{i}") for i, g in enumerate(self.callees.values())]
        self.uses_warp |= any(g.uses_warp for g in self.callees.values())
        if any(g.shared for g in self.callees.values()):
            raise PtxError(f"{self.entry.file}: shared variables of a device function")
        return "".join(called) + "\n".join([*self.head(name), *self.lines, "}"]) + "\n"

    def head(self, name):
        """The signature, the variables and the registers."""
        linkage = 'extern "C"' if self.entry.is_kernel else "static"
        yield f"{linkage} void {name}(void* const* arguments) {{"
        yield "  char* const shared = simt::globals.current->shared;"
        yield "  (void)shared, (void)arguments;"
        for v in self.variables.values():
            if v.space == "shared" or (v.space == "global" and not self.mentions(v.name)):
                continue
            values = f" = {{{', '.join(map(str, v.values))}}}" if v.values else "{}"
            constant = "static const " if v.space == "global" else ""
            name = f"{self.name(v.name)}[{v.bytes}]"
            yield f"  alignas({v.align}) {constant}unsigned char {name}{values};"
        if self.uses_warp:
            yield "  AsyncCopies copies;"
        by_type = {}
        for register, kind in self.used.items():
            by_type.setdefault(kind, []).append(self.name(register) + "{}")
        for kind, names in by_type.items():
            yield f"  {kind} {', '.join(names)};"
        yield f'#line 1 "{self.entry.file}"'
