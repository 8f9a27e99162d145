"""Compares every product of a program by JAX and by jaxmp. Within `side_by_side()`, both compute the products of
`jax.numpy` and `jax.lax`, and the operator `@`, forward and in reverse mode; value, dtype, weak type, sharding and
committedness are compared. The program continues with JAX's results, so each product is judged by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import bounds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.numpy import einsum as einsums
from jax._src.numpy import tensor_contractions
from jax.sharding import PartitionSpec as P

import jaxmp


def _fused(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a product with `fuse`, as users do if jaxmp has no such function."""
    return lambda *args, **options: jaxmp.fuse(functools.partial(theirs, **options))(*args)


_OURS = {"matmul": jaxmp.matmul}
_OURS |= {name: _fused(getattr(jnp, name)) for name in ("dot", "vdot", "inner", "tensordot", "vecdot", "matvec")}
# The module that holds a product (`@` and JAX's own functions look there, too), its name, and jaxmp's product.
PRODUCTS = (
    (lax, "dot_general", jaxmp.dot_general),
    *((module, "einsum", jaxmp.einsum) for module in (jnp, einsums)),
    *((module, name, ours) for module in (jnp, tensor_contractions) for name, ours in _OURS.items()),
)


@dataclasses.dataclass
class Comparison:
    """The compared products by name, and every difference found."""

    names: list[str] = dataclasses.field(default_factory=list)
    values: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)

    def types(self, name: str, got: Any, want: Any) -> None:
        ours, theirs = type_of(got), type_of(want)
        if "committedness" in theirs and got.sharding.is_equivalent_to(want.sharding, want.ndim):
            ours["sharding"] = theirs["sharding"]
        for what in theirs:
            if ours[what] != theirs[what]:
                self.faults.append(f"{name}: {what} is {ours[what]} instead of {theirs[what]}")

    def value(self, name: str, got: Any, want: Any, majorant: Any) -> None:
        """Judges that both are roundings of one product, within the bound."""
        self.values += 1
        got, want = np.asarray(got), np.asarray(want)
        try:
            if jnp.issubdtype(got.dtype, jnp.inexact):
                wide = np.complex128 if np.iscomplexobj(want) else np.float64
                u, u_acc = bounds.unit_roundoff(got.dtype), bounds.accumulator_roundoff(got.dtype)
                allowed = u_acc * np.abs(np.asarray(majorant, wide)) + u * np.abs(want.astype(wide))
                bounds.judge_special(name, got, want.astype(wide), 2 * bounds.PRODUCT * allowed)
            else:
                np.testing.assert_array_equal(got, want)
        except AssertionError as error:
            self.faults.append(f"{name}: value is wrong: {error}")


def type_of(x: Any) -> dict[str, Any]:
    """Returns all properties of a result except its value; fewer while it is traced."""
    aval = jax.typeof(x)
    known = {"shape": aval.shape, "dtype": aval.dtype, "weak type": aval.weak_type}
    if isinstance(x, jax.core.Tracer):  # the mesh of a replicated array says nothing
        is_whole = aval.sharding.spec == P(*(None,) * aval.ndim)
        known |= {"manual axes": aval.manual_axis_type, "sharding": None if is_whole else aval.sharding}
        return known
    return known | {"sharding": x.sharding, "committedness": x.committed}


@contextlib.contextmanager
def side_by_side(products: Sequence[Any] = PRODUCTS) -> Iterator[Comparison]:
    """Compares every product that is called or first traced in the context; raises the differences at the end."""
    comparison = Comparison()
    with pytest.MonkeyPatch.context() as patch:
        for module, name, ours in products:
            theirs = getattr(module, name)
            patch.setattr(module, name, _compared(comparison, name, ours, theirs))
        yield comparison
        jax.effects_barrier()
    assert comparison.names, "no product was compared"
    assert comparison.values >= len(comparison.names), "products were traced and not run"
    assert not comparison.faults, "\n".join(dict.fromkeys(comparison.faults))


def _compared(
    comparison: Comparison, name: str, ours: Callable[..., Any], theirs: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def product(*args: Any, **options: Any) -> Any:
        # Flax passes einsum its product as `_dot_general`; that one is compared when it is called.
        if _INSIDE or "_dot_general" in options or sys._getframe(1).f_globals["__name__"].startswith("jaxmp."):
            return theirs(*args, **options)
        leaves, tree = jax.tree.flatten(args, is_leaf=lambda x: x is None)
        places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

        def of_operands(f: Callable[..., Any], *operands: Any) -> Any:
            given = dict(enumerate(leaves)) | dict(zip(places, operands, strict=True))
            return f(*jax.tree.unflatten(tree, given.values()), **options)

        both = functools.partial(_both, comparison, name)
        f, g = (functools.partial(of_operands, each) for each in (ours, theirs))
        return _differentiable(both, f, g)(*(leaves[i] for i in places))

    return product


_INSIDE: list[None] = []  # not empty while a product is compared


def _differentiable(both: Callable[..., Any], ours: Callable[..., Any], theirs: Callable[..., Any]) -> Any:
    """Returns both products as one function; its gradients are compared, too."""

    def pull(f: Callable[..., Any]) -> Callable[..., Any]:
        def pulled(ct: jax.Array, *operands: Any) -> Any:
            y, vjp = jax.vjp(f, *operands)
            return vjp(ct.astype(y.dtype))  # a different type is already reported

        return pulled

    product = jax.custom_vjp(lambda *operands: both("", ours, theirs, *operands))
    product.defvjp(
        lambda *operands: (both("", ours, theirs, *operands), operands),
        lambda operands, ct: both("gradient of ", pull(ours), pull(theirs), ct, *operands),
    )
    return product


def _both(
    comparison: Comparison, name: str, what: str, ours: Callable[..., Any], theirs: Callable[..., Any], *operands: Any
) -> Any:
    """Compares jaxmp's results with JAX's; returns JAX's."""
    _INSIDE.append(None)
    try:
        want, got = theirs(*operands), ours(*operands)
        exact = [_widened(x) for x in operands]
        reference = theirs(*exact)
        majorant = theirs(*(jnp.abs(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in exact))
    finally:
        _INSIDE.pop()
    shapes = " x ".join(f"{x.dtype}{list(x.shape)}" for x in operands)
    comparison.names.append(name)
    for x, like, *judged in zip(*map(jax.tree.leaves, (got, want, reference, majorant)), strict=True):
        if like.dtype == jax.dtypes.float0:
            continue
        comparison.types(f"{what}{name} of {shapes}", x, like)
        judge = functools.partial(comparison.value, f"{what}{name} of {shapes}")
        is_traced = any(isinstance(each, jax.core.Tracer) for each in (x, *judged))
        jax.debug.callback(judge, x, *judged) if is_traced else judge(x, *judged)
    return want


def _widened(x: Any) -> Any:
    """Returns 16-bit values in float32; XLA skips a rounding before a conversion unless it is explicit."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return x
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=info.nexp, mantissa_bits=info.nmant)
