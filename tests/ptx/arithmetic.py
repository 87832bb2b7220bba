"""The instructions that compute registers from registers: a table of their meaning in C++.

A row has the opcode with its modifiers as a regular expression, the section of the PTX ISA that
defines it, the types of the result and of the operands, and the result as a C++ expression of the
operands {a}, {b}, {c}, {d}. Types: T is the opcode's group T, U the unsigned type of T's size, W
the type of twice T's size, D the opcode's group D; others stand for themselves. {W} and {D} in an
expression are the C++ types. The functions are those of values.h. An opcode that no row matches is
unknown.
"""

import re
from dataclasses import dataclass

INTEGER = "Integer Arithmetic Instructions"
FLOAT = "Floating-Point Instructions"
HALF = "Half Precision Floating-Point Instructions"
COMPARE = "Comparison and Selection Instructions"
LOGIC = "Logic and Shift Instructions"
MOVE = "Data Movement and Conversion Instructions"

ANY = r"(?P<T>[us](16|32|64))"
SIGNED = r"(?P<T>s(16|32|64))"
BITS = r"(?P<T>b(16|32|64))"
REAL = r"(?P<T>f(32|64))"
F32 = r"(?P<T>f32)"
WIDENING = r"(?P<T>[us](16|32))"


@dataclass(frozen=True)
class Row:
    opcode: str
    section: str
    types: str  # of the result, then of each operand
    result: str


COMPARISONS = {  # PTX ISA, Comparison and Selection Instructions: setp, the tables of .CmpOp
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
UNORDERED = {"equ": "==", "ltu": "<", "leu": "<=", "gtu": ">", "geu": ">="}

ROWS = [
    Row(rf"add\.{ANY}", f"{INTEGER}: add", "U U U", "{a} + {b}"),
    Row(rf"sub\.{ANY}", f"{INTEGER}: sub", "U U U", "{a} - {b}"),
    Row(rf"mul\.lo\.{ANY}", f"{INTEGER}: mul", "U U U", "uint64_t({a}) * {b}"),
    Row(rf"mul\.wide\.{WIDENING}", f"{INTEGER}: mul", "W T T", "{W}({a}) * {W}({b})"),
    Row(r"mul\.hi\.(?P<T>[us]32)", f"{INTEGER}: mul", "T T T", "{W}({a}) * {W}({b}) >> 32"),
    Row(r"mul\.hi\.(?P<T>u64)", f"{INTEGER}: mul", "T T T", "__uint128_t({a}) * {b} >> 64"),
    Row(r"mul\.hi\.(?P<T>s64)", f"{INTEGER}: mul", "T T T", "__int128_t({a}) * {b} >> 64"),
    Row(rf"mad\.lo\.{ANY}", f"{INTEGER}: mad", "U U U U", "uint64_t({a}) * {b} + {c}"),
    Row(rf"mad\.wide\.{WIDENING}", f"{INTEGER}: mad", "W T T W", "{W}({a}) * {W}({b}) + {c}"),
    Row(rf"div\.{ANY}", f"{INTEGER}: div", "T T T", "divided({a}, {b})"),
    Row(rf"rem\.{ANY}", f"{INTEGER}: rem", "T T T", "remainder_of({a}, {b})"),
    Row(rf"neg\.{SIGNED}", f"{INTEGER}: neg", "U U", "0 - {a}"),
    Row(rf"abs\.{SIGNED}", f"{INTEGER}: abs", "U T", "{a} < 0 ? 0 - uint64_t({a}) : {a}"),
    Row(rf"min\.{ANY}", f"{INTEGER}: min", "T T T", "{a} < {b} ? {a} : {b}"),
    Row(
        r"min\.relu\.(?P<T>s32)",
        f"{INTEGER}: min",
        "T T T",
        "({a} < {b} ? {a} : {b}) > 0 ? ({a} < {b} ? {a} : {b}) : 0",
    ),
    Row(
        r"max\.relu\.(?P<T>s32)",
        f"{INTEGER}: max",
        "T T T",
        "({a} > {b} ? {a} : {b}) > 0 ? ({a} > {b} ? {a} : {b}) : 0",
    ),
    Row(rf"max\.{ANY}", f"{INTEGER}: max", "T T T", "{a} > {b} ? {a} : {b}"),
    Row(r"popc\.b32", f"{INTEGER}: popc", "u32 u32", "__builtin_popcount({a})"),
    Row(r"clz\.b32", f"{INTEGER}: clz", "u32 u32", "{a} ? __builtin_clz({a}) : 32"),
    Row(
        r"bfe\.(?P<T>[us](32|64))",
        f"{INTEGER}: bfe",
        "T T u32 u32",
        "bit_field({a}, {b} & 255, {c} & 255)",
    ),
    Row(
        r"bfi\.(?P<T>b(32|64))",
        f"{INTEGER}: bfi",
        "T T T u32 u32",
        "with_bit_field({a}, {b}, {c} & 255, {d} & 255)",
    ),
    Row(rf"add(\.rn)?\.{REAL}", f"{FLOAT}: add", "T T T", "{a} + {b}"),
    Row(rf"sub(\.rn)?\.{REAL}", f"{FLOAT}: sub", "T T T", "{a} - {b}"),
    Row(rf"mul(\.rn)?\.{REAL}", f"{FLOAT}: mul", "T T T", "{a} * {b}"),
    Row(rf"fma\.rn\.{REAL}", f"{FLOAT}: fma", "T T T T", "fused({a}, {b}, {c})"),
    Row(
        rf"fma\.rn\.ftz\.{F32}",
        f"{FLOAT}: fma",
        "T T T T",
        "flushed(fused(flushed({a}), flushed({b}), flushed({c})))",
    ),
    Row(rf"fma\.rm\.{F32}", f"{FLOAT}: fma", "T T T T", "fused_rounded_down({a}, {b}, {c})"),
    Row(rf"div\.rn\.{REAL}", f"{FLOAT}: div", "T T T", "{a} / {b}"),
    Row(rf"div\.full\.{F32}", f"{FLOAT}: div", "T T T", "{a} / {b}"),
    Row(rf"rcp\.rn\.{REAL}", f"{FLOAT}: rcp", "T T", "1 / {a}"),
    Row(rf"rcp\.approx\.ftz\.{F32}", f"{FLOAT}: rcp", "T T", "flushed(1 / flushed({a}))"),
    Row(
        r"rcp\.approx\.ftz\.(?P<T>f64)",
        f"{FLOAT}: rcp.approx.ftz.f64",
        "T T",
        "gross_reciprocal({a})",
    ),
    Row(rf"sqrt\.rn\.{REAL}", f"{FLOAT}: sqrt", "T T", "square_root({a})"),
    Row(
        rf"sqrt\.approx\.ftz\.{F32}", f"{FLOAT}: sqrt", "T T", "flushed(square_root(flushed({a})))"
    ),
    Row(
        rf"rsqrt\.approx\.ftz\.{F32}",
        f"{FLOAT}: rsqrt",
        "T T",
        "flushed(1 / square_root(flushed({a})))",
    ),
    Row(rf"ex2\.approx\.ftz\.{F32}", f"{FLOAT}: ex2", "T T", "flushed(power_of_2(flushed({a})))"),
    Row(rf"ex2\.approx\.{F32}", f"{FLOAT}: ex2", "T T", "power_of_2({a})"),
    Row(rf"lg2\.approx\.ftz\.{F32}", f"{FLOAT}: lg2", "T T", "flushed(log_of_2(flushed({a})))"),
    Row(rf"lg2\.approx\.{F32}", f"{FLOAT}: lg2", "T T", "log_of_2({a})"),
    Row(rf"neg\.{REAL}", f"{FLOAT}: neg", "T T", "-{a}"),
    Row(rf"abs\.ftz\.{F32}", f"{FLOAT}: abs", "T T", "flushed(magnitude({a}))"),
    Row(rf"abs\.{REAL}", f"{FLOAT}: abs", "T T", "magnitude({a})"),
    Row(rf"min\.{REAL}", f"{FLOAT}: min", "T T T", "smaller({a}, {b})"),
    Row(rf"max\.{REAL}", f"{FLOAT}: max", "T T T", "larger({a}, {b})"),
    Row(rf"copysign\.{REAL}", f"{FLOAT}: copysign", "T T T", "with_sign_of({a}, {b})"),
    *(
        Row(rf"setp\.{name}\.{ANY}", f"{COMPARE}: setp", "pred T T", f"{{a}} {sign} {{b}}")
        for name, sign in COMPARISONS.items()
    ),
    *(
        Row(rf"setp\.{name}\.{BITS}", f"{COMPARE}: setp", "pred U U", f"{{a}} {sign} {{b}}")
        for name, sign in (("eq", "=="), ("ne", "!="))
    ),
    *(
        Row(rf"setp\.{name}\.{REAL}", f"{COMPARE}: setp", "pred T T", f"{{a}} {sign} {{b}}")
        for name, sign in COMPARISONS.items()
        if name in ("eq", "lt", "le", "gt", "ge")
    ),
    Row(rf"setp\.ne\.{REAL}", f"{COMPARE}: setp", "pred T T", "{a} < {b} || {a} > {b}"),
    *(
        Row(
            rf"setp\.{name}\.{REAL}",
            f"{COMPARE}: setp",
            "pred T T",
            f"unordered({{a}}, {{b}}) || {{a}} {sign} {{b}}",
        )
        for name, sign in UNORDERED.items()
    ),
    Row(rf"setp\.neu\.{REAL}", f"{COMPARE}: setp", "pred T T", "!({a} == {b})"),
    Row(rf"setp\.nan\.{REAL}", f"{COMPARE}: setp", "pred T T", "unordered({a}, {b})"),
    Row(rf"setp\.num\.{REAL}", f"{COMPARE}: setp", "pred T T", "!unordered({a}, {b})"),
    Row(
        r"selp\.(?P<T>[bus](16|32|64)|f32|f64)", f"{COMPARE}: selp", "T T T pred", "{c} ? {a} : {b}"
    ),
    Row(rf"and\.{BITS}", f"{LOGIC}: and", "T T T", "{a} & {b}"),
    Row(rf"or\.{BITS}", f"{LOGIC}: or", "T T T", "{a} | {b}"),
    Row(rf"xor\.{BITS}", f"{LOGIC}: xor", "T T T", "{a} ^ {b}"),
    Row(rf"not\.{BITS}", f"{LOGIC}: not", "T T", "~{a}"),
    Row(r"and\.pred", f"{LOGIC}: and", "pred pred pred", "{a} && {b}"),
    Row(r"or\.pred", f"{LOGIC}: or", "pred pred pred", "{a} || {b}"),
    Row(r"xor\.pred", f"{LOGIC}: xor", "pred pred pred", "{a} != {b}"),
    Row(r"not\.pred", f"{LOGIC}: not", "pred pred", "!{a}"),
    Row(rf"shl\.{BITS}", f"{LOGIC}: shl", "T T u32", "shifted_left({a}, {b})"),
    Row(r"shr\.(?P<T>[bus](16|32|64))", f"{LOGIC}: shr", "T T u32", "shifted_right({a}, {b})"),
    Row(
        r"lop3\.b32", f"{LOGIC}: lop3", "u32 u32 u32 u32 u32", "by_truth_table({a}, {b}, {c}, {d})"
    ),
    Row(r"prmt\.b32", f"{MOVE}: prmt", "u32 u32 u32 u32", "permuted_bytes({a}, {b}, {c})"),
    Row(r"cvt\.(?P<D>[us](8|16|32|64))\.(?P<T>[us](8|16|32|64))", f"{MOVE}: cvt", "D T", "{a}"),
    Row(r"cvt\.rn\.(?P<D>f32|f64)\.(?P<T>[us](8|16|32|64))", f"{MOVE}: cvt", "D T", "{a}"),
    Row(
        r"cvt\.rzi\.(?P<D>[us](32|64))\.(?P<T>f32|f64)",
        f"{MOVE}: cvt",
        "D T",
        "to_integer<{D}>(__builtin_trunc({a}))",
    ),
    Row(r"cvt\.f64\.f32", f"{MOVE}: cvt", "f64 f32", "{a}"),
    Row(r"cvt\.rn\.f32\.f64", f"{MOVE}: cvt", "f32 f64", "{a}"),
    Row(r"cvt\.f32\.f16", f"{MOVE}: cvt", "f32 f16", "of_f16({a})"),
    Row(r"cvt\.f32\.bf16", f"{MOVE}: cvt", "f32 bf16", "of_bf16({a})"),
    Row(r"cvt\.rn\.f16\.f32", f"{MOVE}: cvt", "f16 f32", "to_f16({a})"),
    Row(r"cvt\.rn\.bf16\.f32", f"{MOVE}: cvt", "bf16 f32", "to_bf16({a})"),
    # The first operand is converted into the upper half.
    Row(r"cvt\.rn\.f16x2\.f32", f"{MOVE}: cvt", "b32 f32 f32", "to_f16({a}) << 16 | to_f16({b})"),
    Row(
        r"cvt\.rn\.bf16x2\.f32", f"{MOVE}: cvt", "b32 f32 f32", "to_bf16({a}) << 16 | to_bf16({b})"
    ),
    Row(r"cvt\.rni\.f32\.f32", f"{MOVE}: cvt", "f32 f32", "__builtin_nearbyintf({a})"),
    Row(r"cvt\.sat\.f32\.f32", f"{MOVE}: cvt", "f32 f32", "saturated({a})"),
    Row(r"cvta(\.to)?\.(global|param|local)\.u64", f"{MOVE}: cvta", "u64 u64", "{a}"),
]
PATTERNS = [(re.compile(row.opcode), row) for row in ROWS]


@dataclass(frozen=True)
class Meaning:
    row: Row
    types: tuple  # PTX types of the result and of the operands
    names: dict  # {"T": "u32", ...}


def meaning(opcode):
    """The row of an opcode with the types of this opcode, or None if the table does not have it."""
    for pattern, row in PATTERNS:
        found = pattern.fullmatch(opcode)
        if not found:
            continue
        groups = found.groupdict()
        t, d = groups.get("T") or "", groups.get("D") or ""
        names = {"T": t, "D": d, "U": "u" + t[1:]}
        if t[1:].isdigit():
            names["W"] = f"{t[0]}{int(t[1:]) * 2}"
        return Meaning(row, tuple(names.get(name, name) for name in row.types.split()), names)
    return None
