"""PTX types, constants and labels as C++."""

from tests.ptx.parse import PtxError

# The C++ type in which a value of a PTX type is computed.
TYPES = {"pred": "bool", "f32": "float", "f64": "double", "f16": "uint16_t", "bf16": "uint16_t"}
TYPES |= {f"{kind}{bits}": f"uint{bits}_t" for kind in "bu" for bits in (8, 16, 32, 64)}
TYPES |= {f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)}
BITS = {"bool": 0, "float": 32, "double": 64}
BITS |= {f"{sign}int{bits}_t": bits for sign in ("u", "") for bits in (8, 16, 32, 64)}
REAL = ("float", "double")


def converted(expression, have, want):
    """An expression of one C++ type as another one: the same bits where both have one size."""
    if have == want:
        return expression
    if (have in REAL or want in REAL) and BITS[have] == BITS[want]:
        return f"__builtin_bit_cast({want}, {expression})"
    if have in REAL or want in REAL or "bool" in (have, want):
        raise PtxError(f"{expression} of type {have} where {want} is needed")
    if BITS[want] > BITS[have] and want.startswith("int"):
        expression = f"int{BITS[have]}_t({expression})"  # the sign bit is that of the narrow type
    return f"{want}({expression})"


def immediate(text, want):
    """A constant (PTX ISA, Constants) as a C++ expression."""
    if text[:2] in ("0f", "0F"):
        return converted(f"0x{text[2:]}u", "uint32_t", "uint32_t" if want == "double" else want)
    if text[:2] in ("0d", "0D"):
        return converted(f"0x{text[2:]}ull", "uint64_t", want)
    value = int(text.removesuffix("U"), 0)
    if want == "bool":
        return "true" if value else "false"
    if want in REAL:
        raise PtxError(f"the integer {text} where {want} is needed")
    return f"{want}({value & (1 << 64) - 1:#x}ull)"


def label(name):
    return "l_" + name.replace("$", "_")
