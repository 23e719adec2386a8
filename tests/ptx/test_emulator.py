"""The emulator itself: what PTX computes, and that each kind of mistake is found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ptx import arithmetic
from tests.ptx.findings import PtxError, Report
from tests.ptx.global_memory import GlobalMemory
from tests.ptx.launch import launch
from tests.ptx.parsing import parse, split_operands
from tests.ptx.program import Program

HEAD = """
.visible .entry sample(
    .param .u64 .ptr .global .align 1 sample_param_0,
    .param .u64 .ptr .global .align 1 sample_param_1
)
.reqntid {threads}
{{
    .loc 1 7 3 // sample.py:7:3
    ld.param.b64 %rd1, [sample_param_0];
    ld.param.b64 %rd2, [sample_param_1];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    shl.b32 %r2, %r1, 2;
"""
LOAD = "ld.global.b32 %r3, [%rd4];"
STORE = "st.global.b32 [%rd5], %r4;"


def run(
    *body: str, given: Tensor, out: Tensor, threads: int = 64, grid: Sequence[int] = (1,)
) -> Report:
    ptx = HEAD.format(threads=threads) + "\n".join(body) + "\n    ret;\n}\n"
    memory = GlobalMemory([(given, "given"), (out, "out")])
    values = [given.data_ptr(), out.data_ptr()]
    return launch(ptx, grid, values, memory, 1024, track_all=True)


def kinds(report: Report) -> list[str]:
    return [kind for kind, _ in report.counts]


def test_a_kernel_computes() -> None:
    given, out = torch.randn(64), torch.zeros(64)
    half = "0f3F000000"
    assert kinds(run(LOAD, f"fma.rn.f32 %r4, %r3, {half}, %r3;", STORE, given=given, out=out)) == []
    assert torch.equal(out, given * 1.5)


def test_a_loop_and_a_predicate() -> None:
    given, out = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    body = (
        LOAD, "mov.b32 %r4, 0;", "mov.b32 %r5, 0;", "$L1:", "add.s32 %r4, %r4, %r3;",
        "add.s32 %r5, %r5, 1;", "setp.lt.s32 %p1, %r5, 5;", "@%p1 bra $L1;",
        "setp.gt.s32 %p2, %r1, 31;", "@%p2 mov.b32 %r4, -1;", STORE,
    )  # fmt: skip
    assert kinds(run(*body, given=given, out=out)) == []
    assert out.tolist() == [5 * i for i in range(32)] + [-1] * 32


def test_a_finding_names_the_line_of_triton() -> None:
    report = run(LOAD, "mov.b32 %r4, %r3;", STORE, given=torch.zeros(60), out=torch.zeros(64))
    assert kinds(report) == ["out of bounds load"]
    assert "(sample.py:7)" in report.lines()[0]


def test_holes_of_a_strided_tensor_are_out_of_bounds() -> None:
    given = torch.zeros(64, 2)[:, 0]
    report = run(LOAD, "mov.b32 %r4, %r3;", STORE, given=given, out=torch.zeros(64))
    assert kinds(report) == ["out of bounds load"]


def test_a_misaligned_vector_and_two_ctas_at_one_address() -> None:
    body = ("ld.global.v2.b32 {%r3, %r4}, [%rd4];", STORE)
    report = run(*body, given=torch.zeros(66), out=torch.zeros(64), grid=(2,))
    assert kinds(report) == ["misaligned global", "written by two CTAs"]


def exchange(*between: str) -> tuple[str, ...]:
    """Each thread reads what one of the other warp has stored."""
    read = ("xor.b32 %r5, %r2, 128;", "ld.shared.b32 %r4, [%r5];")
    return (LOAD, "st.shared.b32 [%r2], %r3;", *between, *read, STORE)


def test_a_missing_barrier_is_a_race() -> None:
    given, out = torch.randn(64), torch.zeros(64)
    assert kinds(run(*exchange("bar.sync 0;"), given=given, out=out)) == []
    assert torch.equal(out, given.roll(32))
    report = run(*exchange(), given=given, out=out)
    assert kinds(report) == ["race: reads what another warp wrote without a barrier"]


COPY = "cp.async.ca.shared.global [%r2], [%rd4], 0x4;"
BACK = ("ld.shared.b32 %r4, [%r2];", STORE)


@pytest.mark.parametrize(
    ("wait", "found"),
    [
        (("cp.async.commit_group;", "cp.async.wait_group 0;"), []),
        (
            ("cp.async.commit_group;", "cp.async.wait_group 1;"),
            [
                "reads shared memory that cp.async still fills",
                "reads shared memory never written",
                "ends with cp.async under way",
            ],
        ),
    ],
)
def test_a_copy_is_there_when_it_has_been_waited_for(wait: Sequence[str], found: list[str]) -> None:
    given, out = torch.randn(64), torch.zeros(64)
    assert kinds(run(COPY, *wait, *BACK, given=given, out=out)) == found
    assert torch.equal(out, given) == (not found)


def test_shared_memory_that_nobody_wrote_and_its_bounds() -> None:
    given, out = torch.zeros(64), torch.zeros(64)
    assert kinds(run(*BACK, given=given, out=out)) == ["reads shared memory never written"]
    far = ("add.s32 %r2, %r2, 1024;", "st.shared.b32 [%r2], %r1;")
    assert kinds(run(*far, given=given, out=out)) == ["out of bounds shared store"]


def test_threads_that_disagree_about_a_store() -> None:
    report = run("st.global.b32 [%rd2], %r1;", given=torch.zeros(64), out=torch.zeros(64))
    assert kinds(report) == ["threads disagree about a store"]


def test_a_branch_inside_a_cta_and_an_unknown_instruction_end_the_launch() -> None:
    given = torch.zeros(64)
    branch = ("setp.gt.u32 %p1, %r1, 3;", "@%p1 bra $L1;", "$L1:")
    with pytest.raises(PtxError, match="not uniform in the CTA"):
        run(*branch, given=given, out=given)
    with pytest.raises(PtxError, match=r"no tex\.1d"):
        run("tex.1d %r1, %r2;", given=given, out=given)


def test_mma_is_a_product() -> None:
    """m16n8k8 in TF32 with A = 1 everywhere and B = the lane's number."""
    given, out = torch.arange(64.0), torch.zeros(64)
    one, zero = "0f3F800000", "0f00000000"
    body = (
        LOAD, f"mov.b32 %r5, {one};", f"mov.b32 %r6, {zero};",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r7, %r8, %r9, %r4},"
        " {%r5, %r5, %r5, %r5}, {%r3, %r3}, {%r6, %r6, %r6, %r6};", STORE,
    )  # fmt: skip
    assert kinds(run(*body, given=given, out=out)) == []
    lane = np.arange(64)
    first = 32 * (lane // 32)
    column = 2 * (lane % 4) + 1  # of register 3; B's column n has lanes 4 n .. 4 n + 3, twice
    expected = 2 * (4 * (first + 4 * column) + 6)
    assert out.tolist() == expected.tolist()


def test_results_of_wgmma_are_used_after_their_wait() -> None:
    product = (
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r5, %r6, %r7, %r8}, %rd1, %rd2,"
        " 1, 1, 1, 0, 0;"
    )
    commit, wait = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned {};"
    use = "add.s32 %r4, %r5, 1;"

    def unwaited(*body: str) -> int:
        ptx = HEAD.format(threads=128) + "\n".join(body) + "\n    ret;\n}\n"
        return len(Program(ptx).unwaited)

    assert unwaited(product, product, commit, wait.format(0), use) == 0
    assert unwaited(product, commit, use) == 1
    assert unwaited(product, wait.format(0), use) == 1, "it waits for what was committed"
    assert unwaited(product, commit, wait.format(1), use) == 1
    assert unwaited(product, commit, commit, wait.format(1), use) == 0, "an older group"
    skip = ("@%p1 bra $L1;", wait.format(0), "$L1:")
    assert unwaited(product, commit, *skip, use) == 1, "one of two paths"
    loop = ("$L1:", use, product, commit, "@%p1 bra $L1;")
    assert unwaited(*loop) == 1, "in the next pass"


def test_rounding_to_bf16_is_torchs() -> None:
    x = torch.cat([torch.randn(1000) * 10.0 ** torch.randint(-30, 30, (1000,)), torch.zeros(1)])
    bits = x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (arithmetic.to_bf16(x.numpy()) == bits).all()
    back = arithmetic.bf16_value(bits)
    assert (back == x.to(torch.bfloat16).float().numpy()).all()


def test_operands_and_statements_are_taken_apart() -> None:
    assert split_operands("{%r1, %r2}, [%rd1 + 16], 0x10") == ["{%r1, %r2}", "[%rd1 + 16]", "0x10"]
    module = parse(HEAD.format(threads=32) + "@!%p1 add.s32 %r1,\n  %r2, 3; ret;\n}\n")
    add, end = module.items[-2:]
    assert (add.predicate, add.negated, add.operands) == ("p1", True, ["%r1", "%r2", "3"])
    assert (module.threads, end.opcode) == (32, "ret")
