"""Instructions that compute: moves, arithmetic, comparisons, conversions."""

from __future__ import annotations

from tests.ptx.arithmetic import DTYPE, HALF_KINDS, WIDTH, code_of
from tests.ptx.expressions import (
    SPECIAL,
    Translator,
    bits_of,
    handles,
    is_hex_float,
    register_width,
)
from tests.ptx.findings import PtxError
from tests.ptx.parsing import Instruction, split_operands

_FLOATS = ("f32", "f64", *HALF_KINDS)
_ROUNDINGS = {"rzi": "np.trunc", "rni": "np.rint", "rmi": "np.floor", "rpi": "np.ceil"}


# Moves


@handles("mov")
def _move(t: Translator, i: Instruction) -> list[str]:
    target, source = i.operands
    if i.kind == "pred":
        value = t.value(source, "pred")
        expression = value if source.startswith("%") else f"full(T, {value})"
        return t.assign(i, target, expression, "pred")
    if source.startswith("{"):
        return _pack(t, i)
    if target.startswith("{"):
        return _unpack(t, i)
    bits = bits_of(i.kind)
    if source in SPECIAL:
        wide = "" if bits == "b32" else ".astype(u8)"
        return t.assign(i, target, f"{SPECIAL[source]}{wide}", bits)
    if is_hex_float(source):
        return t.assign(i, target, f"full(T, {t.bits(source, bits)})", bits)
    return t.assign(i, target, t.array(source, bits), bits)


def _pack(t: Translator, i: Instruction) -> list[str]:
    parts, whole = split_operands(i.operands[1][1:-1]), WIDTH[i.kind]
    width = whole // len(parts)
    terms = [
        f"({t.array(part, f'b{8 * width}')}.astype(u{whole}) << u{whole}({8 * width * n}))"
        for n, part in enumerate(parts)
    ]
    return t.assign(i, i.operands[0], " | ".join(terms), f"b{8 * whole}")


def _unpack(t: Translator, i: Instruction) -> list[str]:
    parts, whole = split_operands(i.operands[0][1:-1]), WIDTH[i.kind]
    width = whole // len(parts)
    source = t.array(i.operands[1], f"b{8 * whole}")
    out = []
    for n, part in enumerate(parts):
        piece = f"({source} >> u{whole}({8 * width * n})).astype(u{width})"
        out += t.assign(i, part, piece, f"b{8 * width}")
    return out


@handles("cvta")
def _address_space(t: Translator, i: Instruction) -> list[str]:
    return t.assign(i, i.operands[0], t.array(i.operands[1], "b64"), "b64")


@handles("selp")
def _select(t: Translator, i: Instruction) -> list[str]:
    target, a, b, predicate = i.operands
    bits = bits_of(i.kind)
    return t.assign(
        i, target, f"where({predicate[1:]}, {t.bits(a, bits)}, {t.bits(b, bits)})", bits
    )


# Arithmetic

_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}


def _in_halves(t: Translator, i: Instruction, function: str) -> list[str]:
    bits = bits_of(i.kind)
    kind = "bf16" if i.kind.startswith("bf16") else "f16"
    args = ", ".join(t.array(x, bits) for x in i.operands[1:])
    expression = f"in_halves({function}, '{kind}', {bits == 'b32'}, {args})"
    return t.assign(i, i.operands[0], expression, bits)


def _flushed(i: Instruction, expression: str) -> str:
    return f"flush({expression})" if "ftz" in i.parts else expression


def _binary(t: Translator, i: Instruction) -> list[str]:
    symbol = _SYMBOLS[i.parts[0]]
    if i.kind in HALF_KINDS:
        return _in_halves(t, i, f"lambda a, b: a {symbol} b")
    if "sat" in i.parts:
        raise PtxError(i.opcode)
    target, a, b = i.operands
    expression = f"({t.array(a, i.kind)} {symbol} {t.value(b, i.kind)})"
    return t.assign(i, target, _flushed(i, expression), i.kind)


handles("add", "sub", "and", "or", "xor")(_binary)


def _wide_product(t: Translator, i: Instruction) -> tuple[str, str]:
    """The whole product of two narrow numbers, and its kind."""
    wide = {"s32": "s64", "u32": "u64", "s16": "s32", "u16": "u32"}[i.kind]
    dtype = code_of(DTYPE[wide])
    a, b = t.array(i.operands[1], i.kind), t.value(i.operands[2], i.kind)
    return f"{a}.astype({dtype}) * {b}.astype({dtype})", wide


@handles("mul")
def _multiply(t: Translator, i: Instruction) -> list[str]:
    if "wide" in i.parts:
        product, wide = _wide_product(t, i)
        return t.assign(i, i.operands[0], f"({product})", wide)
    if "hi" in i.parts:
        if WIDTH[i.kind] != 4:
            raise PtxError(i.opcode)
        product, wide = _wide_product(t, i)
        own, shift = code_of(DTYPE[i.kind]), code_of(DTYPE[wide])
        high = f"(({product}) >> {shift}(32)).astype({own})"
        return t.assign(i, i.operands[0], high, i.kind)
    return _binary(t, i)


@handles("mad")
def _multiply_add(t: Translator, i: Instruction) -> list[str]:
    target, a, b, c = i.operands
    if "wide" in i.parts:
        product, wide = _wide_product(t, i)
        return t.assign(i, target, f"({product} + {t.value(c, wide)})", wide)
    if "lo" not in i.parts:
        raise PtxError(i.opcode)
    product = f"{t.array(a, i.kind)} * {t.value(b, i.kind)}"
    return t.assign(i, target, f"({product} + {t.value(c, i.kind)})", i.kind)


@handles("fma")
def _fused(t: Translator, i: Instruction) -> list[str]:
    if i.kind != "f32":
        return _in_halves(t, i, "lambda a, b, c: a * b + c")
    target, a, b, c = i.operands
    expression = f"fma({t.array(a, 'f32')}, {t.value(b, 'f32')}, {t.value(c, 'f32')})"
    return t.assign(i, target, _flushed(i, expression), "f32")


@handles("div", "rem")
def _divide(t: Translator, i: Instruction) -> list[str]:
    target, a, b = i.operands
    if i.kind in _FLOATS:
        return t.assign(i, target, f"({t.array(a, i.kind)} / {t.value(b, i.kind)})", i.kind)
    a, b = t.array(a, i.kind), t.array(b, i.kind)
    quotient = f"divide({a}, {b})"
    rest = f"({a} - {quotient} * {b})"
    return t.assign(i, target, quotient if i.parts[0] == "div" else rest, i.kind)


@handles("max", "min")
def _extreme(t: Translator, i: Instruction) -> list[str]:
    name = i.parts[0]
    if i.kind in HALF_KINDS:
        return _in_halves(t, i, f"np.f{name}")
    ignores_nan = i.kind in _FLOATS and "NaN" not in i.parts
    function = f"np.f{name}" if ignores_nan else f"np.{name}imum"
    target, a, b = i.operands
    return t.assign(i, target, f"{function}({t.array(a, i.kind)}, {t.value(b, i.kind)})", i.kind)


@handles("neg", "abs", "not")
def _unary(t: Translator, i: Instruction) -> list[str]:
    function = {"neg": "-", "abs": "np.abs", "not": "~"}[i.parts[0]]
    if i.parts[0] == "neg" and i.kind in HALF_KINDS:
        return _in_halves(t, i, "lambda a: -a")
    return t.assign(i, i.operands[0], f"({function}({t.array(i.operands[1], i.kind)}))", i.kind)


@handles("ex2", "lg2", "rcp", "sqrt", "rsqrt")
def _special_function(t: Translator, i: Instruction) -> list[str]:
    function = {
        "ex2": "np.exp2", "lg2": "np.log2", "rcp": "np.reciprocal", "sqrt": "np.sqrt",
        "rsqrt": "1 / np.sqrt",
    }[i.parts[0]]  # fmt: skip
    expression = f"{function}({t.array(i.operands[1], 'f32')})"
    return t.assign(i, i.operands[0], _flushed(i, expression), "f32")


# Bits


@handles("shl", "shr")
def _shift(t: Translator, i: Instruction) -> list[str]:
    target, a, b = i.operands
    function = "shift_left" if i.parts[0] == "shl" else "shift_right"
    return t.assign(i, target, f"{function}({t.array(a, i.kind)}, {t.value(b, 'b32')})", i.kind)


@handles("shf")
def _funnel_shift(t: Translator, i: Instruction) -> list[str]:
    target, *others = i.operands
    low, high, amount = (t.array(x, "b32") for x in others)
    left, wrap = i.parts[1] == "l", i.parts[2] == "wrap"
    return t.assign(i, target, f"funnel_shift({low}, {high}, {amount}, {left}, {wrap})", "b32")


@handles("bfe")
def _extract_field(t: Translator, i: Instruction) -> list[str]:
    target, a, *place = i.operands
    position, length = (t.value(x, "b32") for x in place)
    return t.assign(i, target, f"extract_field({t.array(a, i.kind)}, {position}, {length})", i.kind)


@handles("bfi")
def _insert_field(t: Translator, i: Instruction) -> list[str]:
    target, a, b, *place = i.operands
    position, length = (t.value(x, "b32") for x in place)
    words = f"{t.array(a, 'b32')}, {t.array(b, 'b32')}"
    return t.assign(i, target, f"insert_field({words}, {position}, {length})", "b32")


@handles("prmt")
def _permute(t: Translator, i: Instruction) -> list[str]:
    if len(i.parts) != 2:
        raise PtxError(i.opcode)
    target, a, b, selector = i.operands
    words = f"{t.array(a, 'b32')}, {t.array(b, 'b32')}"
    return t.assign(i, target, f"permute_bytes({words}, {t.value(selector, 'b32')})", "b32")


@handles("lop3")
def _logic_of_three(t: Translator, i: Instruction) -> list[str]:
    target, a, b, c, table = i.operands
    words = ", ".join(t.array(x, "b32") for x in (a, b, c))
    return t.assign(i, target, f"logic_of_three({words}, {int(table.rstrip('U'), 0)})", "b32")


@handles("popc")
def _count_bits(t: Translator, i: Instruction) -> list[str]:
    count = f"np.bitwise_count({t.array(i.operands[1], i.kind)}).astype(u4)"
    return t.assign(i, i.operands[0], count, "b32")


# Comparisons

_ORDERED = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
_OPPOSITE = {"ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<", "neu": "=="}


@handles("setp")
def _compare(t: Translator, i: Instruction) -> list[str]:
    first, a, b, *more = i.operands
    comparison = i.parts[1]
    a, b = t.array(a, i.kind), t.value(b, i.kind)
    if i.kind in _FLOATS:
        if i.kind != "f32":
            raise PtxError(i.opcode)
        expression = _float_comparison(comparison, a, b)
    else:
        expression = f"({a} {_ORDERED[comparison]} {b})"
    combine = next((x for x in i.parts[2:-1] if x in ("and", "or", "xor")), None)
    if combine:
        other = ("~" if more[0].startswith("!") else "") + more[0].lstrip("!")[1:]
        expression = f"({expression} {_SYMBOLS[combine]} {other})"
    targets = first.split("|")
    out = t.assign(i, targets[0], expression, "pred")
    if len(targets) > 1:
        if combine:
            raise PtxError(i.opcode)
        out += t.assign(i, targets[1], f"~{targets[0][1:]}", "pred")
    return out


def _float_comparison(comparison: str, a: str, b: str) -> str:
    """With a NaN all are false but those whose names end in u, and `nan`."""
    either_nan = f"np.isnan({a}) | np.isnan({b})"
    if comparison == "ne":
        return f"(({a} != {b}) & ~({either_nan}))"
    if comparison in _ORDERED:
        return f"({a} {_ORDERED[comparison]} {b})"
    if comparison == "nan":
        return f"({either_nan})"
    if comparison == "num":
        return f"~({either_nan})"
    if comparison == "equ":
        return f"(({a} == {b}) | {either_nan})"
    return f"~({a} {_OPPOSITE[comparison]} {b})"


# Conversions


@handles("cvt")
def _convert(t: Translator, i: Instruction) -> list[str]:
    to, source_kind = i.parts[-2:]
    target, *sources = i.operands
    if "bf16x2" in i.parts or "f16x2" in i.parts:
        name = "pack_bf16" if "bf16x2" in i.parts else "pack_f16"
        return t.assign(
            i, target, f"{name}({', '.join(t.array(x, 'f32') for x in sources)})", "b32"
        )
    if (to, source_kind) == ("bf16", "f32"):
        return t.assign(i, target, f"to_bf16({t.array(sources[0], 'f32')})", "b16")
    if (to, source_kind) == ("f32", "bf16"):
        return t.assign(i, target, f"bf16_value({t.array(sources[0], 'b16')})", "f32")
    if to == "tf32":
        if "rna" not in i.parts:
            raise PtxError(i.opcode)
        return t.assign(i, target, f"round_to_tf32({t.array(sources[0], 'f32')})", "b32")
    source, dtype = t.array(sources[0], source_kind), code_of(DTYPE[to])
    if source_kind not in _FLOATS and to not in _FLOATS:
        return _resize(t, i, f"{source}.astype({dtype})", to)
    if source_kind in _FLOATS:
        rounding = next((_ROUNDINGS[x] for x in i.parts if x in _ROUNDINGS), "")
        if to not in _FLOATS and not rounding:
            raise PtxError(i.opcode)
        source = f"{rounding}({source})"
    return t.assign(i, target, f"{source}.astype({dtype})", to)


def _resize(t: Translator, i: Instruction, value: str, to: str) -> list[str]:
    """An integer of kind `to`, sign- or zero-extended to its register."""
    own = register_width(i.operands[0][1:])
    if own > WIDTH[to]:
        to = f"{'s' if to.startswith('s') else 'u'}{8 * own}"
        value = f"{value}.astype({code_of(DTYPE[to])})"
    return t.assign(i, i.operands[0], value, to)
