"""Judges rounded numbers in all tests. The bound is componentwise, |D - D*| <= c * (u_acc * |A| |B| + u_out * |D*|),
with D* from float64. A relative tolerance would depend on k, and one score for a whole matrix would hide a lost tile.
For whole programs (gradients, tangents, Hessians) |A| |B| generalises to a *majorant*: the same program run on absolute
values, with every function replaced by one with dominating derivatives. Sums of products of non-negative numbers do not
cancel, so the majorant bounds the contribution of every rounding."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

# Roundings of a product. The error of a sum of k random terms grows like k, as |A| |B| does (k roundings of partial
# sums that grow like sqrt(k)): about 0.6 of it is one standard deviation, and a large matrix contains six of them.
PRODUCT = 4.0
# Roundings of a whole program: each term of the majorant passes through a few operations.
PROGRAM = 4.0


def unit_roundoff(dtype) -> float:
    """Returns half the distance between 1 and the next number of `dtype`."""
    return float(jnp.finfo(dtype).eps) / 2


def judge(name: str, got, want, allowed) -> float:
    """Asserts |got - want| <= allowed for every element; prints and returns the largest error in % of `allowed`."""
    got, want, allowed = np.asarray(got), np.asarray(want), np.asarray(allowed)
    assert got.shape == want.shape == allowed.shape, f"{name}: shapes {got.shape}, {want.shape}, {allowed.shape}"
    if got.size == 0:
        return 0.0
    wide = np.complex128 if np.iscomplexobj(want) or np.iscomplexobj(got) else np.float64
    error = np.abs(got.astype(wide) - want.astype(wide))
    with np.errstate(divide="ignore", invalid="ignore"):
        used = np.where(error == 0, 0.0, error / allowed)
    used = np.where(np.isnan(error), np.inf, used)  # a NaN exceeds every bound
    worst = np.unravel_index(np.argmax(used), used.shape)
    percentage = 100 * float(used[worst])
    print(f"{name}: {percentage:.1f} % of the bound")
    assert percentage <= 100, (
        f"{name}: {np.count_nonzero(used > 1)} of {used.size} elements are out of bounds; the worst, at "
        f"{tuple(map(int, worst))}, is {got[worst]} instead of {want[worst]}, {percentage:.3g} % of the bound"
    )
    return percentage


def judge_special(name: str, got, want, allowed, may_overflow=False) -> float:
    """Judges like `judge` if `want` may contain NaN and infinities: the same elements must be NaN or the same infinity.
    For complex numbers only finiteness is judged. If `may_overflow`, an infinity of the right sign is accepted."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{name}: shapes {got.shape}, {want.shape}"
    if np.iscomplexobj(want) or np.iscomplexobj(got):
        is_right, is_special = np.isfinite(got) == np.isfinite(want), ~np.isfinite(want)
    else:
        got = got.astype(np.float64)
        overflows = np.isinf(got) & np.isfinite(want) & may_overflow & (np.sign(got) == np.sign(want))
        is_special = ~np.isfinite(want) | overflows
        is_right = np.where(is_special, (got == want) | (np.isnan(got) & np.isnan(want)) | overflows, np.isfinite(got))
    if not is_right.all():
        first = tuple(map(int, np.argwhere(~is_right)[0]))
        raise AssertionError(
            f"{name}: {np.count_nonzero(~is_right)} of {want.size} elements are NaN, infinite or finite where they "
            f"should not be; the first, at {first}, is {got[first]} instead of {want[first]}"
        )
    got, want, allowed = (np.where(is_special, 0.0, x) for x in (got, want, allowed))
    return judge(name, got, want, allowed)


def judge_product(name: str, got, a, b, want=None, *, operands, out=None, c: float = PRODUCT) -> float:
    """Judges D = A @ B for float64 (or complex128) A and B, as products of type `operands` stored in type `out`."""
    want = a @ b if want is None else want
    u_out = unit_roundoff(out or operands)
    allowed = c * (accumulator_roundoff(operands) * (np.abs(a) @ np.abs(b)) + u_out * np.abs(want))
    return judge(name, got, want, allowed)


def accumulator_roundoff(operands) -> float:
    return min(unit_roundoff(operands), unit_roundoff(jnp.float32))
