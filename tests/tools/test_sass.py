"""Machine code is counted as one would by hand."""

from __future__ import annotations

from tools import sass

SASS = """
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0020*/                   LDSM.16.M88.4 R4, [R1] ;
        /*0030*/                   LDSM.16.MT88.2 R4, [R1] ;
        /*0040*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0050*/                   LDS.64 R2, [R1] ;
        /*0060*/                   LDS R2, [R1] ;
        /*0070*/                   MUFU.EX2 R2, R2 ;
        /*0080*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0090*/                   LDG.E R3, [R2.64] ;
        /*00a0*/               @P0 BRA `(.L_x_1) ;
        /*00b0*/                   EXIT ;
"""


def test_counts_of_a_loop_that_can_be_counted_by_hand() -> None:
    (loop,) = sass.inner_loops(SASS)
    assert (loop.instructions, loop.tensor_core, loop.barriers, loop.global_accesses) == (
        10,
        1,
        1,
        1,
    )
    assert loop.shared_bytes == 16 + 16 + 8 + 8 + 4
    clocks = loop.clocks(warps=8)
    assert clocks["tensor"] == 16
    assert clocks["shared"] == (52 / 4 + 1) * 8
    assert clocks["exp"] == 16
    assert clocks["issue"] == 20
    assert sass.inner_loops("/*0000*/ EXIT ;") == []


HOPPER = """
.L_x_1:
        /*0010*/                   HGMMA.64x32x16.F32.BF16 R56, gdesc[UR24], R56 ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R88, R180, gdesc[UR12].tnspB, R88, gsb0 ;
        /*0030*/                   FFMA R1, R2, R3, R4 ;
        /*0040*/                   IMAD.WIDE R1, R2, R3, R4 ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
"""


def test_hgmma_reads_shared_memory_by_itself_unless_its_rows_are_in_registers() -> None:
    (loop,) = sass.inner_loops(HOPPER)
    assert loop.tensor_bytes * 4 == 16 * 2 * (64 + 32) + 16 * 2 * 64  # by four warps
    clocks = loop.clocks(warps=4, flop_per_clock=4096, fp32_lanes=128)
    assert clocks["shared"] == (16 * 2 * (64 + 32) + 16 * 2 * 64) / 128
    assert clocks["tensor"] == 2 * 64 * (32 + 64) * 16 / 4096
    assert clocks["fma"] == 2  # an fp32 and an integer product; the integer's lanes are half
    assert loop.clocks(warps=4)["fma"] == 4
