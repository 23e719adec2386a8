"""Check the paper's theory on a kernel: is it conditionally positive definite?

tools/check_kernel.py kerple_log                           a method, as it starts
tools/check_kernel.py examples.custom_kernel:RationalKernel  a class of your own
tools/check_kernel.py --power 2.5                          -d^p for a p of your choice

For 4, 8, 16, ... points: whether every head's bias is conditionally positive definite (CPD), its
smallest eigenvalue on coefficients that sum to zero, and the smallest constant c (to 1%) that makes
c + kernel positive definite (PD) for all heads. A weight, which multiplies scores, must be PD.

A bias that is not bounded from below needs a larger c the more points there are, without end: the
paper's Lemma 1 gives a c for each finite set of positions, not one for all. Softmax needs none.

The exit code is 1 if a kernel fails.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.errors import KerpleError

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST, LARGEST = 4, 128


def build_parser() -> argparse.ArgumentParser:
    head, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="check_kernel.py",
        description=head,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a method, or module:Class")
    parser.add_argument("--power", type=float, action="append", default=[], metavar="P")
    parser.add_argument("--heads", type=int, default=12, help="(12)")
    parser.add_argument("--head-dim", type=int, default=64, help="(64)")
    parser.add_argument("--points", type=int, default=LARGEST, help=f"most points ({LARGEST})")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    if not options.names and not options.power:
        raise KerpleError("name a method, a module:Class, or give --power P")
    if options.points < SMALLEST:
        raise KerpleError(f"--points {options.points}: at least {SMALLEST}")
    good = True
    for name in options.names:
        good &= _check_method(name, options)
    for power in options.power:
        good &= _check_power(power, options.points)
    return 0 if good else 1


def _sizes(most: int) -> list[int]:
    sizes = [SMALLEST << i for i in range(20) if SMALLEST << i < most]
    return [*sizes, most]


def _check_method(name: str, options: argparse.Namespace) -> bool:
    import torch

    from megatron.model.standalone import kernel
    from megatron.neox_arguments import allow_kernel

    if ":" in name:
        allow_kernel(name)  # the user has named it here
    module = kernel(name, heads=options.heads, head_dim=options.head_dim)
    with torch.no_grad():
        tables = module(options.points)
    good = True
    if tables.bias is not None:
        good &= _report_bias(f"{name}: bias of {options.heads} heads", tables.bias, options.points)
    if tables.weight is not None:
        good &= _report_weight(
            f"{name}: weight of {options.heads} heads", tables.weight, options.points
        )
    return good


def _check_power(power: float, points: int) -> bool:
    import torch

    if power <= 0:
        raise KerpleError(f"--power {power}: must be above 0")
    table = -(torch.arange(points, dtype=torch.float64) ** power)
    return _report_bias(f"-d^{power:g}", table[None], points)


def _report_bias(title: str, bias: Tensor, most: int) -> bool:
    from megatron.model.kernel_theory import counterexample, cpd_margin, is_cpd

    print(f"{title}\n  points  CPD  smallest eigenvalue  shift c")
    good = True
    for points in _sizes(most):
        fine = is_cpd(bias, points)
        margin = float(cpd_margin(bias, points).min())
        shift = _largest_shift(bias, points) if fine else "none"
        print(f"  {points:6}  {'yes' if fine else 'NO':>3}  {margin:19.3g}  {shift:>7}")
        if good and not fine:
            worst = int(cpd_margin(bias, points).argmin())
            found = counterexample(bias[worst], points)
            if found is not None:
                listed = ", ".join(f"{value:.3f}" for value in found.tolist())
                print(
                    f"          head {worst + 1}: these sum to 0, their form is negative: {listed}"
                )
        good &= fine
    return good


def _largest_shift(bias: Tensor, points: int) -> str:
    from megatron.errors import KernelAnalysisError
    from megatron.model.kernel_theory import smallest_shift

    try:
        return f"{max(smallest_shift(head, points, 0.01) for head in bias):.4g}"
    except KernelAnalysisError:
        return "none"  # conditionally definite, but not strictly: as -d^2


def _report_weight(title: str, weight: Tensor, most: int) -> bool:
    import torch

    from megatron.model.kernel_theory import is_pd, kernel_matrix

    print(f"{title}\n  points   PD  smallest eigenvalue")
    good = True
    for points in _sizes(most):
        fine = is_pd(weight, points)
        margin = float(torch.linalg.eigvalsh(kernel_matrix(weight, points)).min())
        print(f"  {points:6}  {'yes' if fine else 'NO':>3}  {margin:19.3g}")
        good &= fine
    return good
