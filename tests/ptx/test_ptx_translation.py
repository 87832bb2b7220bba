"""The translator: it refuses what it does not know, and single instructions compute what the PTX
ISA says.
"""

import ctypes
import math
import platform
import shutil
import struct

import pytest
import torch

from tests.ptx import arithmetic, build, effects, fragments, generate, parse
from tests.simt import build as simt

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which(simt.CXX),
    reason="tests/simt needs g++ on x86-64",
)
HEAD = ".version 9.0\n.target sm_80\n.address_size 64\n"
FUNCTIONS = """.func (.param .b32 result) sum(.param .align 8 .b8 pair[8])
;
.func (.param .b32 result) sum(.param .align 8 .b8 pair[8])
{
  .reg .b32 %r<3>;
  ld.param.v2.u32 {%r1, %r2}, [pair];
  add.s32 %r1, %r1, %r2;
  st.param.b32 [result], %r1;
  ret;
}
.weak .func (.param .b32 result) larger_sum(.param .align 8 .b8 pair[8], .param .b32 least)
{
  .reg .pred %p<2>;
  .reg .b32 %r<3>;
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [pair];
  { .param .align 8 .b8 copy[8]; st.param.b64 [copy], %rd1; .param .b32 value;
    call.uni (value), sum, (copy); ld.param.b32 %r1, [value]; }
  ld.param.u32 %r2, [least];
  st.param.b32 [result], %r2;
  setp.lt.s32 %p1, %r1, %r2;
  @%p1 ret;
  st.param.b32 [result+0], %r1;
  ret;
}
.func stop() .noreturn { trap; }
.func again() { call.uni again; ret; }
.func leave() { exit; }
"""
KERNEL = """.entry {name}(.param .u64 {name}_out, .param .u64 {name}_in)
{{
  .reg .pred %p<9>;
  .reg .b16 %rs<9>;
  .reg .f32 %f<9>;
  .reg .b32 %r<19>;
  .reg .f64 %fd<9>;
  .reg .b64 %rd<9>;
  ld.param.u64 %rd1, [{name}_out];
  ld.param.u64 %rd2, [{name}_in];
  mov.u32 %r0, %tid.x;
  mul.wide.u32 %rd3, %r0, 8;
  add.s64 %rd1, %rd1, %rd3;
  add.s64 %rd2, %rd2, %rd3;
{code}
  ret;
}}
"""


def module(code, name="probe"):
    return parse.module(HEAD + FUNCTIONS + KERNEL.format(code=code, name=name), "probe.ptx")


def translated(code):
    found = module(code)
    return generate.Generator(found.entries[0], found).function("f")


# ---- what is not known is an error


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sin.approx.f32 %f1, %f2;", "unknown instruction: sin.approx.f32"),
        ("add.sat.s32 %r1, %r2, %r3;", "unknown instruction: add.sat.s32"),
        ("fma.rz.f32 %f1, %f2, %f3, %f4;", "unknown instruction: fma.rz.f32"),
        ("ld.global.mystery.u32 %r1, [%rd1];", r"unknown modifier \.mystery"),
        ("ld.acquire.cta.global.u32 %r1, [%rd1];", "only the scopes gpu and sys"),
        ("bar.arrive 0, 64;", "unknown barrier"),
        ("add.s32 %r1, %r2;", "2 operands|1 operands"),
        ("add.s32 %r1, %r2, %q3;", "does not declare %q3"),
        ("mov.u32 %r1, nothing;", "nothing is not declared"),
        ("call.uni sum, (%r1);", "with variables as arguments"),
        ("call.uni %r1;", "only functions can be called"),
        ("{ .param .b32 p; call.uni vprintf, (p); }", "the function vprintf is not defined"),
        ("{ .param .b32 p; call.uni sum, (p); }", "sum has other results or parameters"),
        ("call.uni again;", "again calls itself"),
        ("call.uni leave;", "exit in a device function"),
        (
            "mma.sync.aligned.m16n8k16.row.row.f32.bf16.bf16.f32 {%f0,%f1,%f2,%f3},"
            " {%r0,%r1,%r2,%r3}, {%r4,%r5}, {%f0,%f1,%f2,%f3};",
            "unknown mma",
        ),
    ],
)
def test_an_unknown_instruction_is_an_error_that_names_it(code, message):
    with pytest.raises(parse.PtxError, match=message) as error:
        translated("  " + code)
    assert "probe.ptx" in str(error.value)


def test_an_unknown_directive_is_an_error():
    with pytest.raises(parse.PtxError, match="branchtargets"):
        module(".branchtargets L1, L2;")


def test_no_opcode_has_two_meanings():
    for row in arithmetic.ROWS:
        assert row.section
        assert len(row.types.split()) in (2, 3, 4, 5)
    for function in effects.FUNCTIONS.values():
        assert "Instructions" in function.__doc__, f"{function.__name__} cites no section"


def test_names_of_a_block_hide_those_outside():
    found = module("{ .reg .b32 %r1; mov.u32 %r1, 5; }\nmov.u32 %r1, 7;").entries[0].body
    values = {item.operands[1]: item.operands[0].name for item in found if item.operands}
    inner, outer = (values[parse.Immediate(text)] for text in "57")
    assert inner != outer == "%r1"


# ---- fragments


@pytest.mark.parametrize("shape", fragments.MMA)
@pytest.mark.parametrize("matrix", "abd")
def test_each_element_of_a_matrix_is_held_once(shape, matrix):
    mma = fragments.MMA[shape]
    table = mma.table(matrix)
    size = {"a": 16 * mma.k, "b": mma.k * 8, "d": 16 * 8}[matrix]
    assert sorted(table) == [*range(size)]


def test_fragments_are_those_of_the_isa():
    """The formulas of PTX ISA, Matrix Fragments for mma.m16n8k16 with floating point type."""
    mma = fragments.MMA["m16n8k16"]
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for i in range(8):
            row = group + 8 * (i % 4 >= 2)
            column = thread * 2 + (i & 1) + 8 * (i >= 4)
            assert mma.table("a")[lane * 8 + i] == row * 16 + column
        for i in range(4):
            row = thread * 2 + (i & 1) + 8 * (i >= 2)
            assert mma.table("b")[lane * 4 + i] == row * 8 + group
            assert mma.table("d")[lane * 4 + i] == (group + 8 * (i >= 2)) * 8 + thread * 2 + (i & 1)


# ---- what instructions compute

LOAD = "ld.global.u32 %r1, [%rd2]; ld.global.u32 %r2, [%rd2+4]; mov.b32 %f1, %r1; mov.b32 %f2, %r2;"
LOAD64 = "ld.global.u64 %rd4, [%rd2]; mov.b64 %fd1, %rd4;"
# What stores the result: the register that the PTX of a case writes, by its name.
STORES = {
    "st.global": "",
    "%rd5,": "st.global.u64 [%rd1], %rd5;",
    "%r3,": "mov.b64 %rd5, {%r3, %r4}; st.global.u64 [%rd1], %rd5;",
    "%f3,": "mov.b32 %r3, %f3; mov.b64 %rd5, {%r3, %r4}; st.global.u64 [%rd1], %rd5;",
    "%p1,": "selp.u32 %r3, 1, 0, %p1; mov.b64 %rd5, {%r3, %r4}; st.global.u64 [%rd1], %rd5;",
}


def f32(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def f64(x):
    return struct.unpack("<Q", struct.pack("<d", x))[0]


def pair(low, high=0):
    return low & 0xFFFFFFFF | (high & 0xFFFFFFFF) << 32


# Calls a function that calls another one.
CALL = "{ .param .align 8 .b8 pair[8]; st.param.v2.b32 [pair], {%r1, %r2};"
CALL += " .param .b32 least; st.param.b32 [least], 5; .param .b32 value;"
CALL += " call.uni (value), larger_sum, (pair, least); ld.param.b32 %r3, [value]; }"

# {name: (PTX, input, result)}, input and result as 64 bits. The result is %r4:%r3, or what the PTX
# stores.
CASES = {
    "mul.wide with a negative immediate": ("mul.wide.u32 %rd5, %r1, -1;", 5, 5 * 0xFFFFFFFF),
    "mul.wide.s32": ("mul.wide.s32 %rd5, %r1, -3;", pair(-7), 21),
    "mul.hi.u32": ("mul.hi.u32 %r3, %r1, %r2;", pair(2**31, 6), 3),
    "shr.s32 by 40": ("shr.s32 %r3, %r1, 40;", pair(-5), pair(-1)),
    "shl.b32 by 32": ("shl.b32 %r3, %r1, %r2;", pair(1, 32), 0),
    "cvt.s64.s32": ("cvt.s64.s32 %rd5, %r1;", pair(-2), 2**64 - 2),
    "cvt.u16.u32": ("cvt.u16.u32 %rs1, %r1; cvt.u32.u16 %r3, %rs1;", pair(0x12345), pair(0x2345)),
    "ld.s8 extends the sign": ("ld.global.s8 %r3, [%rd2];", 0x80, pair(0xFFFFFF80)),
    "st.u8 takes the low part": ("st.global.u64 [%rd1], 0; st.global.u8 [%rd1], %r1;", 0x1FF, 0xFF),
    "bfi": ("bfi.b32 %r3, %r1, %r2, 4, 8;", pair(0xAB, 0xFFFFFFFF), pair(0xFFFFFABF)),
    "min.s32": ("min.s32 %r3, %r1, %r2;", pair(-1, 1), pair(-1)),
    "rem.u32": ("rem.u32 %r3, %r1, %r2;", pair(17, 5), 2),
    "setp.ltu with NaN": ("setp.ltu.f32 %p1, %f1, %f2;", pair(f32(math.nan), f32(1.0)), 1),
    "setp.ne with NaN": ("setp.ne.f32 %p1, %f1, %f2;", pair(f32(math.nan), f32(1.0)), 0),
    "max of NaN": ("max.f32 %f3, %f1, %f2;", pair(f32(math.nan), f32(2.0)), f32(2.0)),
    "copysign": ("copysign.f32 %f3, %f1, %f2;", pair(f32(-1.0), f32(2.0)), f32(-2.0)),
    "fma rounds once": (
        "fma.rn.f32 %f3, %f1, %f1, 0fBF800000;",
        f32(1 + 2**-20),
        f32(2**-19 + 2**-40),
    ),
    "fma.rm rounds down": (
        "fma.rm.f32 %f3, %f1, %f2, 0f3F800000;",
        pair(f32(-(2**-30)), f32(2**-30)),
        f32(1 - 2**-24),
    ),
    "ex2.ftz flushes": ("ex2.approx.ftz.f32 %f3, %f1;", f32(-140.0), 0),
    "cvt.sat": ("cvt.sat.f32.f32 %f3, %f1;", f32(math.nan), 0),
    "cvt.rni": ("cvt.rni.f32.f32 %f3, %f1;", f32(2.5), f32(2.0)),
    "cvt.rn.bf16x2": ("cvt.rn.bf16x2.f32 %r3, %f1, %f2;", pair(f32(1.0), f32(-2.0)), 0x3F80C000),
    "cvt.rn.bf16 ties to even": (
        "cvt.rn.bf16.f32 %rs1, %f1; cvt.u32.u16 %r3, %rs1;",
        0x3F818000,
        0x3F82,
    ),
    "cvt.f32.f16": ("cvt.u16.u32 %rs1, %r1; cvt.f32.f16 %f3, %rs1;", 0x3C00, f32(1.0)),
    "rcp.approx.ftz.f64": (
        "rcp.approx.ftz.f64 %fd2, %fd1; mov.b64 %rd5, %fd2;",
        f64(3.0),
        f64(1 / 3) & ~0xFFFFFFFF,
    ),
    "mov packs": ("cvt.u16.u32 %rs1, %r1; mov.b32 %r3, {0, %rs1};", 0x3F80, 0x3F800000),
    "guard": ("mov.u32 %r3, 1; setp.eq.s32 %p1, %r1, 4; @!%p1 mov.u32 %r3, 2;", 5, 2),
    "call": (CALL, pair(7, 8), 15),
    "call, return under a guard": (CALL, pair(-7, 8), 5),
    "branch": (
        "mov.u32 %r3, 0;\n$L:\nadd.s32 %r3, %r3, 2; setp.lt.s32 %p1, %r3, 9; @%p1 bra $L;",
        0,
        10,
    ),
}


@pytest.fixture(scope="module")
def probes():
    text = HEAD + FUNCTIONS
    for i, (code, _, _) in enumerate(CASES.values()):
        load = LOAD64 if "%fd1" in code else LOAD
        start = f"{load}\nmov.u32 %r3, 0; mov.u32 %r4, 0;\n"
        store = next(text for written, text in STORES.items() if written in code)
        text += KERNEL.format(name=f"probe_{i}", code=start + code + store)
    return ctypes.CDLL(str(build.module_library("plain", {"probes.ptx": text})))


@pytest.mark.parametrize("case", CASES)
def test_an_instruction_computes_what_the_isa_says(probes, case):
    _, given, wanted = CASES[case]
    given = torch.tensor([given - (given >> 63 << 64)])
    out = torch.zeros(1, dtype=torch.int64)
    build.launch(probes, f"probe_{[*CASES].index(case)}", (1, 1, 1), 1, 0, [out, given])
    assert hex(out.item() % 2**64) == hex(wanted % 2**64)
