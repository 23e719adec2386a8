"""The paper's theory as checks on a table over distance: is it conditionally positive definite
(CPD), which constant shift makes it positive definite (PD), and how far does each head look.

Corollary 1 says which formulas of `positional_embeddings.py` are CPD, Proposition 1 why exponents
end at 2, Lemma 1 that a constant c makes a CPD kernel PD. For a kernel without a lower bound that c
holds for a finite set of points and grows without bound with their number: -d needs (N - 1)/2 on N
points, -log(1 + d) needs 1.7 on 16 points and 4.9 on 512. Nothing is computed with it: softmax
cancels any c (Eq. 2).

A table is [length] (one head) or [heads, length]; entry d is the kernel at distance d, so on the
points 0..N-1 the kernel matrix is the symmetric Toeplitz matrix K[i, j] = table[|i - j|].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.errors import KernelAnalysisError
from megatron.model.position_base import TableEmbedding

EFFECTIVE_BIAS = -2.0  # attenuates by exp(-2), about 0.135: the paper's threshold
PAPER_MAX_DISTANCE = 20480

# A shift beyond this many times N * max|K| is not searched for: rounding would decide.
_SHIFT_LIMIT = 1e4


def kernel_matrix(table: Tensor, points: int | None = None) -> Tensor:
    """K[..., i, j] = table[..., |i - j|] on `points` positions, in float64."""
    points = points or table.shape[-1]
    if not 1 <= points <= table.shape[-1]:
        raise KernelAnalysisError(
            f"{points} points need a table of at least {points} distances, got {table.shape[-1]}."
        )
    positions = torch.arange(points, device=table.device)
    return table.detach().double()[..., (positions[:, None] - positions[None, :]).abs()]


def _tolerance(table: Tensor, matrix: Tensor) -> Tensor:
    """How far rounding of the table's entries can move an eigenvalue: N * eps * max|K|."""
    precision = torch.finfo(table.dtype).eps
    return 4 * precision * matrix.shape[-1] * matrix.abs().amax((-2, -1))


def _on_zero_sums(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel matrix as it acts on the zero-sum subspace, and an orthonormal basis of that."""
    if matrix.shape[-1] < 2:
        raise KernelAnalysisError("one point has no zero-sum combinations; use at least 2 points.")
    from scipy.linalg import helmert

    basis = torch.from_numpy(helmert(matrix.shape[-1]).T).to(matrix.device)
    return basis.T @ matrix @ basis, basis


def cpd_margin(table: Tensor, points: int | None = None) -> Tensor:
    """The smallest eigenvalue on the zero-sum subspace, per head: CPD where it is >= 0."""
    return torch.linalg.eigvalsh(_on_zero_sums(kernel_matrix(table, points))[0])[..., 0]


def is_cpd(table: Tensor, points: int | None = None) -> bool:
    """Whether every head's kernel is conditionally positive definite on 0..points-1."""
    allowed = _tolerance(table, kernel_matrix(table, points))
    return bool((cpd_margin(table, points) >= -allowed).all())


def counterexample(table: Tensor, points: int | None = None) -> Tensor | None:
    """Coefficients that sum to zero with a negative quadratic form (one head); None if CPD.

    They are the eigenvector of the smallest eigenvalue on the zero-sum subspace, of length one.
    """
    if table.dim() != 1:
        raise KernelAnalysisError("counterexample takes one head: pass table[h].")
    if is_cpd(table, points):
        return None
    acting, basis = _on_zero_sums(kernel_matrix(table, points))
    _, vectors = torch.linalg.eigh(acting)
    return basis @ vectors[:, 0]


def pd_margin(table: Tensor, points: int | None = None) -> Tensor:
    """The smallest eigenvalue, per head: PD where it is >= 0."""
    return torch.linalg.eigvalsh(kernel_matrix(table, points))[..., 0]


def is_pd(table: Tensor, points: int | None = None) -> bool:
    """Whether every head's kernel is positive (semi)definite on 0..points-1."""
    allowed = _tolerance(table, kernel_matrix(table, points))
    return bool((pd_margin(table, points) >= -allowed).all())


def smallest_shift(table: Tensor, points: int | None = None, precision: float = 1.0) -> float:
    """A c that makes c + kernel PD on 0..points-1, by the paper's geometric search (one head).

    Tries 0, then 2, 4, 8, ... The default accepts the first that fits, at most twice the smallest;
    a smaller `precision` bisects until c is known to that relative error.

    A kernel that is CPD but not strictly so may have none: -d^2 is CPD, yet no c makes c - d^2 PD
    on three points or more. Softmax does not mind, since it never needs c.
    """
    if table.dim() != 1:
        raise KernelAnalysisError("smallest_shift takes one head: pass table[h].")
    table = table.detach().double()
    if not is_cpd(table, points):
        raise KernelAnalysisError("the table is not CPD on these points, so no shift makes it PD.")
    if is_pd(table, points):
        return 0.0
    matrix = kernel_matrix(table, points)
    limit = _SHIFT_LIMIT * matrix.shape[-1] * float(matrix.abs().max())
    low, high = 0.0, 2.0
    while not is_pd(table + high, points):
        low, high = high, 2 * high
        if high > limit:
            raise KernelAnalysisError(
                f"no shift up to {limit:.3g} makes the table PD on these points; "
                "it is CPD, but not strictly."
            )
    while high - low > precision * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_pd(table + middle, points) else (middle, high)
    return high


BF16_ERROR = 0.25
"""A bias that counts and moves by more than this, when it is rounded to bf16, changes the model."""
_COUNTS = 8.0  # softmax gives exp(-8) of the largest weight to a key this far below it


def bf16_error(bias: Tensor) -> float:
    """How far rounding to bf16 moves a bias that counts: one within 8 of its head's largest."""
    bias = bias.detach().float()
    moved = (bias.bfloat16().float() - bias).abs()
    return float(moved[bias > bias.amax(-1, keepdim=True) - _COUNTS].max())


def training_problems(module: TableEmbedding, length: int) -> list[str]:
    """Why training this method fails at the start: values, gradients or bf16; [] if it does not."""
    tables = {name: table for name, table in module(length)._asdict().items() if table is not None}
    problems = []
    for name, table in tables.items():
        for head, distance in (~table.isfinite()).nonzero()[:1].tolist():
            value = float(table[head, distance].detach())
            problems.append(f"{name} is {value} at distance {distance} (head {head + 1})")
        if name == "bias" and not problems and (error := bf16_error(table)) > BF16_ERROR:
            problems.append(f"{name}: rounding to bf16 moves it by {error:.2g} where it counts")
    lengths = [1 << power for power in range(length.bit_length()) if 1 << power < length]
    return problems + next(
        filter(None, (_bad_gradients(module, n) for n in [*lengths, length])), []
    )


def _bad_gradients(module: TableEmbedding, length: int) -> list[str]:
    """The parameters with a gradient that is not finite, from distances below `length`."""
    learned = {name: p for name, p in module.named_parameters() if p.requires_grad}
    tables = [table for table in module(length) if table is not None and table.requires_grad]
    if not learned or not tables:
        return []
    total = torch.stack([table.sum() for table in tables]).sum()
    found = torch.autograd.grad(total, list(learned.values()), allow_unused=True)
    where = "distance 0" if length == 1 else f"a distance below {length}"
    return [
        f"the gradient of {name} is not finite at {where}; every training step would be skipped"
        for name, gradient in zip(learned, found, strict=True)
        if gradient is not None and not bool(gradient.isfinite().all())
    ]


def effective_length(
    kernel: Tensor | TableEmbedding, max_distance: int = PAPER_MAX_DISTANCE
) -> list[int | None]:
    """Per head, the first distance whose bias is below EFFECTIVE_BIAS; None if it never is.

    Takes a bias table [heads, length], or an embedding, which is asked for max_distance + 1.
    """
    if isinstance(kernel, TableEmbedding):
        with torch.no_grad():
            bias = kernel(max_distance + 1).bias
        if bias is None:
            raise KernelAnalysisError(
                f"{kernel.name} multiplies scores and adds no bias; "
                "the effective length is defined by a bias."
            )
    else:
        bias = kernel.detach().reshape(-1, kernel.shape[-1])[:, : max_distance + 1]
    before = (bias < EFFECTIVE_BIAS).cumsum(-1) == 0
    first = before.sum(-1).tolist()
    return [None if d == bias.shape[-1] else d for d in first]


def heads_within(
    effective_lengths: Sequence[int | None], max_distance: int = PAPER_MAX_DISTANCE
) -> Tensor:
    """The paper's cumulative count: entry d = number of heads with effective length <= d."""
    lengths = torch.tensor([math.inf if n is None else n for n in effective_lengths])
    distances = torch.arange(max_distance + 1)
    return torch.searchsorted(lengths.sort().values, distances.to(lengths.dtype), right=True)
