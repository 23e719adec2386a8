"""Tables over distance seen as matrices over (query, key), and the way back.

A table holds one number per head and distance. The matrix of a block of `rows` queries and `cols`
keys, whose last query stands `last` positions after the block's first key, has
`distance(i, j) = last - (rows - 1 - i) - j`: constant along diagonals, so no matrix needs storing.
Reversed, and padded with a fill value for the future, the table itself is the matrix, read through
overlapping strides, last query first:

    reversed table      t3 t2 t1 t0 ..        (.. is the fill: keys in the future)
    last query, row 0   t3 t2 t1 t0
    query before, row 1    t2 t1 t0 ..

Hence "flipped" in the names below: row 0 belongs to the block's last query.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reversed_table(table: Tensor, length: int, padding: int, fill: float) -> Tensor:
    """`[heads, length + padding]`: distances length-1 .. 0, then `padding` times `fill`."""
    out = table.new_full((table.shape[0], length + padding), fill)
    out[:, :length] = table[:, :length].flip(-1)
    return out


def flipped_view(reversed_: Tensor, start: int, rows: int, cols: int) -> Tensor:
    """`[heads, rows, cols]` whose entry (r, c) is `reversed_[:, start + r + c]`; not a copy."""
    stride_head, stride = reversed_.stride()
    return reversed_[:, start:].as_strided(
        (reversed_.shape[0], rows, cols), (stride_head, stride, stride)
    )


def dense_matrix(table: Tensor, q_len: int, k_len: int, fill: float) -> Tensor:
    """`[heads, q_len, k_len]` with `table[:, distance]`, and `fill` where the key is in the future.

    The queries are the last `q_len` of the `k_len` positions.
    """
    padded = reversed_table(table, k_len, q_len - 1, fill)
    return flipped_view(padded, 0, q_len, k_len).flip(-2)


def sum_flipped_diagonals(matrix: Tensor) -> Tensor:
    """Adjoint of `flipped_view`: `[heads, rows, cols]` to sums over r + c, `[heads, rows+cols-1]`.

    Each row is padded by `rows` zeros and the whole read again one element narrower, which moves
    row r by r places: diagonals become columns.
    """
    heads, rows, cols = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, rows))
    width = rows + cols - 1
    flat = padded.reshape(heads, rows * (rows + cols))
    return flat[:, : rows * width].view(heads, rows, width).sum(1)


def sum_by_distance(matrix: Tensor) -> Tensor:
    """Adjoint of `dense_matrix`: `[heads, q_len, k_len]` to `[heads, k_len]` over distances 0...

    Entries in the future are left out.
    """
    k_len = matrix.shape[-1]
    return sum_flipped_diagonals(matrix.flip(-2))[:, :k_len].flip(-1)
