"""What the literature says a product of dense matrices has to communicate, and the grid that comes nearest to it.

A is m x k, B k x n, D m x n, on P devices of which each begins with 1/P of A and B and ends with 1/P of D.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Reference:
    """The communication-optimal grid of a product.

    Attributes:
      grid: (pm, pn, pk), the devices along m, n and k. With pk > 1 partial products are summed, as in 2.5D and 3D
        algorithms.
      elements: what each device receives on that grid, in elements: its part of the rows of A and of the columns of B
        by gathers, its part of the sum by a reduce-scatter.
      held: elements that each device holds: its shares of A and B, and its block of sums.
      lower_bound: elements that some device has to receive, whatever the algorithm.
    """

    grid: tuple[int, int, int]
    elements: float
    held: float
    lower_bound: float


def reference(m: int, k: int, n: int, devices: int, memory: float) -> Reference:
    """The grid of `devices` devices with the least communication whose devices hold at most `memory` elements.

    Where none fits, the one that holds least.
    Sources: Solomonik, Demmel, "Communication-optimal parallel 2.5D matrix multiplication and LU factorization
    algorithms", Euro-Par 2011; Kwasniewski et al., "Red-blue pebbling revisited: near optimal parallel matrix-matrix
    multiplication" (COSMA), SC 2019.
    """
    bound = lower_bound(m, k, n, devices, memory)
    found = [
        Reference(grid, communicated(m, k, n, grid), held(m, k, n, grid), bound)
        for grid in _grids(devices)
        if grid[0] <= m and grid[1] <= n and grid[2] <= k
    ]
    fitting = [each for each in found if each.held <= memory]
    if fitting:
        return min(fitting, key=lambda each: (each.elements, each.held))
    return min(found, key=lambda each: each.held, default=Reference((devices, 1, 1), 0.0, 0.0, bound))


def communicated(m: int, k: int, n: int, grid: tuple[int, int, int]) -> float:
    """Elements that each device of a grid receives: it has 1/pn of its block of A, 1/pm of that of B, and keeps 1/pk of
    its block of D.

    Worked example: 4 x 4 x 4 on a grid of (2, 2, 1): each device has a block of 2 x 4 of A and half of it to begin
    with, so it receives 4 elements of A, and 4 of B.
    """
    pm, pn, pk = grid
    a, b, d = m * k / (pm * pk), k * n / (pk * pn), m * n / (pm * pn)
    return a * (1 - 1 / pn) + b * (1 - 1 / pm) + d * (1 - 1 / pk)


def held(m: int, k: int, n: int, grid: tuple[int, int, int]) -> float:
    """Elements that each device of a grid holds: its share of A and B, of which the rest streams by, and its block of D
    or of the partial sums of D."""
    pm, pn, pk = grid
    return (m * k + k * n) / (pm * pn * pk) + m * n / (pm * pn)


def lower_bound(m: int, k: int, n: int, devices: int, memory: float) -> float:
    """Elements that some device has to receive, whatever the algorithm.

    The larger of two bounds. Whatever the memory: Al Daas, Ballard, Grigori, Kumar, Rouse, "Tight memory-independent
    parallel matrix multiplication communication lower bounds", SPAA 2022, theorem 3. With a memory of S elements:
    2mnk / (P sqrt(S)) - S, Smith, Lowery, Langou, van de Geijn, "A tight I/O lower bound for matrix multiplication",
    2019 (of which COSMA's is the parallel form).
    """
    small, middle, large = sorted((m, k, n))
    total = m * k + k * n + m * n
    if devices <= large / middle:
        access = (large * middle + large * small) / devices + middle * small
    elif devices <= large * middle / small**2:
        access = 2 * (large * middle * small**2 / devices) ** 0.5 + large * middle / devices
    else:
        access = 3 * (m * n * k / devices) ** (2 / 3)
    limited = 2 * m * n * k / (devices * memory**0.5) - memory
    return float(max(access - total / devices, limited, 0.0))


def factors(number: int) -> list[int]:
    """The divisors of a number, in their order."""
    low = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*low, *(number // i for i in low)})


def _grids(devices: int) -> Iterator[tuple[int, int, int]]:
    for pm in factors(devices):
        for pn in factors(devices // pm):
            yield pm, pn, devices // pm // pn
