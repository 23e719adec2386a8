"""An emulator that executes the PTX that Triton compiles our kernels to, on a CPU, with checks.

`parsing.py` reads PTX; `program.py` translates a kernel once to the source of one Python function,
one line per instruction (`expressions.py` operands, `number_instructions.py` and
`machine_instructions.py` what each opcode does); `launch.py` runs the CTAs of a grid. All threads
of a CTA run in lockstep: a register is a NumPy array with one element per thread. sm_80 (mma.sync,
ldmatrix, cp.async, shfl, redux) and sm_90 (wgmma with swizzled descriptors) are known.
`host.py` replaces `Launch.run` of the product: host code, grids, strides and workspaces are the
product's own; kernels are compiled as tools/compile_triton.py does, without ptxas.

Checked beside the numbers (each finding is reported with the line of PTX and of Triton):
  * global memory: only elements that belong to an argument may be touched (strides and holes
    included), vector accesses are aligned, no address is written by two CTAs, no CTA reads what
    another one writes in the same launch, threads that store to one place agree;
  * shared memory: bounds, alignment, bytes that were never written, races between warps (a word
    written and touched by another warp without a barrier in between; looked for in a third of the
    gangs of CTAs unless `track_all`), threads that store to one place agree;
  * cp.async: copied at wait_group, not before; a read of a word whose copy is under way, a new copy
    into a word that another warp has read since the last barrier, copies left open at the end;
  * wgmma: reads that are overwritten before their wait, writes that no proxy fence has shown to it,
    registers of its result that are used before their wait (on every path of the code, not only on
    those that run), descriptors that differ inside a warpgroup;
  * registers that are read before they are set; branches that are not uniform in a CTA;
  * memory of `torch.empty` holds NaN, so what a kernel leaves out shows in the numbers.

Not modelled: ptxas and machine code, time, bank conflicts, the order of instructions inside a warp,
independent thread scheduling, rounding inside the tensor cores (float64 sums, rounded once), the
approximation errors of ex2, lg2 and div.full, memory order between CTAs, real launches and streams,
NCCL.
"""
