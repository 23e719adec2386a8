"""Instructions that need more than registers: memory, warps, matrix units, branches."""

from __future__ import annotations

import re

from tests.ptx.arithmetic import DTYPE, WIDTH, code_of
from tests.ptx.expressions import Translator, handles, is_hex_float, register_width, unset
from tests.ptx.findings import PtxError
from tests.ptx.parsing import Instruction, registers_of

_MEMORIES = {"global": ("machine.globals", "b64"), "shared": ("machine.shared", "b32")}
_ALL_LANES = ("-1", "0xffffffff")
_MATRIX_KINDS = ("bf16", "f16", "tf32")


def _space_of(i: Instruction) -> str:
    spaces = (part.split("::")[0] for part in i.parts[1:])
    found = next((space for space in spaces if space in ("param", *_MEMORIES)), None)
    if found is None:
        raise PtxError(i.opcode)
    return found


# Memory


@handles("ld")
def _load(t: Translator, i: Instruction) -> list[str]:
    space = _space_of(i)
    if space == "param":
        return _load_parameter(t, i)
    names = [register[1:] for register in registers_of(i.operands[0])]
    width = WIDTH[i.kind]
    memory, address_kind = _MEMORIES[space]
    call = f"{memory}.load({t.address(i.operands[1], address_kind)}, {width}, {len(names)}, "
    if any(register_width(name) != width for name in names):
        return _load_narrow(t, i, names, call)
    old = ", ".join(names) if i.predicate else f"full(T, {unset(names[0])})"
    repeat = "" if i.predicate else f" * {len(names)}"
    call += f"{t.active(i)}, [{old}]{repeat}, {i.line})"
    return [f"{', '.join(names)}, = {call}"]


def _load_narrow(t: Translator, i: Instruction, names: list[str], call: str) -> list[str]:
    """Into wider registers, by the kind's sign."""
    old = f"[np.zeros(T, u{WIDTH[i.kind]})] * {len(names)}"
    out = [f"loaded = {call}{t.active(i)}, {old}, {i.line})"]
    for n, name in enumerate(names):
        own = register_width(name)
        value = f"loaded[{n}].astype(u{own})"
        if i.kind.startswith("s"):
            value = f"loaded[{n}].view({code_of(DTYPE[i.kind])}).astype(i{own}).view(u{own})"
        out += t.assign(i, f"%{name}", value, f"b{8 * own}")
    return out


def _load_parameter(t: Translator, i: Instruction) -> list[str]:
    index = t.parameters.index(i.operands[1].strip()[1:-1].strip())
    name, value = i.operands[0][1:], f"parameters[{index}]"
    own = register_width(name)
    if own == 8 and i.kind in ("s32", "u32"):
        wide = "i8" if i.kind == "s32" else "u8"
        value = f"{wide}({value}.view({code_of(DTYPE[i.kind])}))"
        return [f"{name} = full(T, {value}).view(u8)"]
    if own == 2 or WIDTH[i.kind] < 4:
        value = f"u{own}({value})"
    return [f"{name} = full(T, {value})"]


@handles("st")
def _store(t: Translator, i: Instruction) -> list[str]:
    memory, address_kind = _MEMORIES[_space_of(i)]
    width = WIDTH[i.kind]
    bits = f"b{8 * width}"
    values = ", ".join(
        f"full(T, {t.bits(x, bits)})" if is_hex_float(x) else t.array(x, bits)
        for x in registers_of(i.operands[1])
    )
    address = t.address(i.operands[0], address_kind)
    return [f"{memory}.store({address}, {width}, [{values}], {t.active(i)}, {i.line})"]


@handles("cp")
def _copy(t: Translator, i: Instruction) -> list[str]:
    what = i.parts[2] if i.parts[1] == "async" else None
    if what == "commit_group":
        return ["machine.shared.commit()"]
    if what == "wait_group":
        return [f"machine.shared.wait({int(i.operands[0], 0)})"]
    if what == "wait_all":
        return ["machine.shared.commit(); machine.shared.wait(0)"]
    if what not in ("ca", "cg"):
        raise PtxError(i.opcode)
    target, source, size, *rest = i.operands
    places = f"{t.address(target, 'b32')}, {t.address(source, 'b64')}, {int(size, 0)}"
    source_size = t.array(rest[0], "b32") if rest else "None"
    return [f"machine.shared.copy_async({places}, {source_size}, {t.active(i)}, {i.line})"]


@handles("ldmatrix")
def _load_matrices(t: Translator, i: Instruction) -> list[str]:
    if i.predicate or i.kind != "b16" or "m8n8" not in i.parts:
        raise PtxError(i.opcode)
    names = [register[1:] for register in registers_of(i.operands[0])]
    settings = f"{len(names)}, {'trans' in i.parts}, {i.line}"
    address = t.address(i.operands[1], "b32")
    return [f"{', '.join(names)}, = machine.shared.load_matrices({address}, {settings})"]


@handles("stmatrix")
def _store_matrices(t: Translator, i: Instruction) -> list[str]:
    values = ", ".join(register[1:] for register in registers_of(i.operands[1]))
    address = t.address(i.operands[0], "b32")
    transposed = "trans" in i.parts
    return [f"machine.shared.store_matrices({address}, [{values}], {transposed}, {i.line})"]


# Warps and CTAs


@handles("bar", "barrier")
def _barrier(t: Translator, i: Instruction) -> list[str]:
    if i.predicate:
        raise PtxError("predicated barrier")
    if i.parts[1] == "warp":
        return ["pass"]
    if i.parts[1] != "sync" or i.operands != ["0"]:
        raise PtxError(f"{i.opcode} {i.operands}")
    return ["machine.shared.barrier()"]


@handles("shfl")
def _shuffle(t: Translator, i: Instruction) -> list[str]:
    targets, value, b, c, lanes = i.operands
    if i.parts[1] != "sync" or lanes not in _ALL_LANES:
        raise PtxError(i.opcode)
    first, *second = targets.split("|")
    where = f"{t.value(b, 'b32')}, {t.value(c, 'b32')}"
    out = [f"moved = machine.shuffle('{i.parts[2]}', {t.array(value, 'b32')}, {where})"]
    out += t.assign(i, first, "moved[0]", "b32")
    return out + (t.assign(i, second[0], "moved[1]", "pred") if second else [])


@handles("redux")
def _reduce(t: Translator, i: Instruction) -> list[str]:
    target, value, lanes = i.operands
    if i.parts[1] != "sync" or (lanes not in _ALL_LANES and not lanes.startswith("%")):
        raise PtxError(i.opcode)
    function = {
        "max": "maximum", "min": "minimum", "add": "add", "and": "bitwise_and",
        "or": "bitwise_or", "xor": "bitwise_xor",
    }[i.parts[2]]  # fmt: skip
    warps = f"{t.array(value, i.kind)}.reshape(-1, 32)"
    return t.assign(i, target, f"np.repeat(np.{function}.reduce({warps}, 1), 32)", i.kind)


# Matrix units


@handles("mma")
def _matrix_product(t: Translator, i: Instruction) -> list[str]:
    """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"""
    shape, *layout = i.parts[3:6]
    kinds = i.parts[6:10]
    depth = re.match(r"m16n8k(\d+)", shape)
    if i.predicate or layout != ["row", "col"] or depth is None:
        raise PtxError(i.opcode)
    if (kinds[0], kinds[3]) != ("f32", "f32") or kinds[1] not in _MATRIX_KINDS:
        raise PtxError(i.opcode)
    target = ", ".join(register[1:] for register in registers_of(i.operands[0]))
    fragments = ", ".join(t.arrays(registers_of(x), "b32") for x in i.operands[1:])
    return [f"{target}, = mma('{kinds[1]}', {int(depth[1])}, {fragments})"]


@handles("wgmma")
def _group_instruction(t: Translator, i: Instruction) -> list[str]:
    if i.predicate:
        raise PtxError(i.opcode)
    if i.parts[1] == "fence":
        return ["pass"]
    if i.parts[1] == "commit_group":
        return ["machine.warpgroups.commit()"]
    if i.parts[1] == "wait_group":
        return [f"machine.warpgroups.wait({int(i.operands[0], 0)})"]
    return _group_product(t, i)


def _group_product(t: Translator, i: Instruction) -> list[str]:
    """wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {d}, a, b, keep, 1, 1, [transposed]"""
    shape, kind = re.match(r"m64n(\d+)k(\d+)", i.parts[4]), i.parts[6]
    target, a, b, keep, *rest = i.operands
    if shape is None or i.parts[5] != "f32" or kind not in _MATRIX_KINDS or rest[:2] != ["1", "1"]:
        raise PtxError(f"{i.opcode} {i.operands[3:]}")
    names = ", ".join(register[1:] for register in registers_of(target))
    in_registers = a.startswith("{")
    if in_registers:
        left = "[" + ", ".join(register[1:] for register in registers_of(a)) + "]"
    else:
        left = t.value(a, "b64")
    transposed = tuple(int(x, 0) for x in rest[2:])
    if in_registers and transposed:
        transposed = (0, transposed[0])
    keeps_old = keep[1:] if keep.startswith("%") else str(int(keep, 0) != 0)
    old = "None" if keeps_old == "False" else f"[{names}]"
    sizes = f"'{kind}', {int(shape[1])}, {int(shape[2])}"
    operands = f"{old}, {left}, {t.value(b, 'b64')}, {keeps_old}, {transposed or (0, 0)}, {i.line}"
    return [f"{names}, = machine.warpgroups.multiply({sizes}, {operands})"]


@handles("fence")
def _fence(t: Translator, i: Instruction) -> list[str]:
    return ["machine.warpgroups.fence()" if i.parts[1] == "proxy" else "pass"]


# Branches


@handles("bra")
def _branch(t: Translator, i: Instruction) -> list[str]:
    jump = f"block = {t.labels[i.operands[0]]}; continue"
    return [f"if {_taken(t, i)}: {jump}" if i.predicate else jump]


@handles("ret", "exit")
def _end(t: Translator, i: Instruction) -> list[str]:
    end = f"machine.shared.end({i.line}); return"
    return [f"if {_taken(t, i)}: {end}" if i.predicate else end]


def _taken(t: Translator, i: Instruction) -> str:
    return f"uniform({t.active(i)}, {i.line}, gang.block.threads)"
