"""The transform matrix: every mode x transform x pattern, against tests/reference.py in float64 under the bound.
Without these tests, a gradient could be summed over the wrong ranks, a tangent could lose one of its two terms, and
vmap could order rows by batch instead of by rank."""

import functools
import types
import zlib

import bounds
import cases
import jax
import jax.export
import jax.numpy as jnp
import modes
import numpy as np
import pytest
import reference
from jax.experimental import jet

import jaxmp

BATCH = 3


def loss_of(f):
    """Returns a loss that is quadratic in the product, so that second derivatives are not zero."""
    return lambda a, b, w: jnp.sum(w * f(a, b) ** 2)


def jvp(f, x):
    return jax.jvp(f, (x["a"], x["b"]), (x["ta"], x["tb"]))


def forward_over_reverse(f, x):
    gradient = jax.grad(lambda a, b: loss_of(f)(a, b, x["w"]), (0, 1))
    return jax.jvp(gradient, (x["a"], x["b"]), (x["ta"], x["tb"]))


def hessian(f, x):
    return jax.hessian(lambda b: loss_of(f)(x["a"], b, x["w"]))(x["b"])


def vmap_of_grad(f, x):
    return jax.vmap(jax.grad(loss_of(f), (0, 1)), (0, None, None))(x["a3"], x["b"], x["w"])


def grad_of_vmap(f, x):
    return jax.grad(loss_of(jax.vmap(f, (None, 0))), (0, 1))(x["a"], x["b3"], x["w"][None])


def scan(f, x):
    """Differentiates a loop that adds each step's product to its carry."""

    def loss(a3, b):
        total, _ = jax.lax.scan(lambda total, a: (total + x["w"] * f(a, b), None), x["w"], a3)
        return jnp.sum(total**2)

    return jax.value_and_grad(loss, (0, 1))(x["a3"], x["b"])


# The table (test_table.py) has gradients, batches and rematerialization in every mode, on every pattern.
TRANSFORMS = (jvp, forward_over_reverse, hessian, vmap_of_grad, grad_of_vmap, scan)


@functools.cache
def data(extents):
    rng = np.random.default_rng(zlib.crc32(repr(extents).encode()))
    m, n, k = extents
    shapes = {"a": (m, k), "b": (k, n), "w": (m, n), "a3": (BATCH, m, k), "b3": (BATCH, k, n)}
    shapes |= {"ta": (m, k), "tb": (k, n)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@functools.cache
def expected(transform, extents):
    """Returns a transform's results in float64, and the errors that rounding may cause."""
    wide = {name: x.astype(np.float64) for name, x in data(extents).items()}
    absolute = {name: np.abs(x) for name, x in wide.items()}
    with jax.default_device(jax.local_devices(backend="cpu")[0]), jax.enable_x64(True):
        both = ((reference.matmul, wide), (reference.matmul_majorant, absolute))
        want, major = (jax.tree.leaves(jax.jit(functools.partial(transform, f))(x)) for f, x in both)
        u = bounds.unit_roundoff("float32")
        return list(map(np.asarray, want)), [bounds.PROGRAM * u * np.asarray(x) for x in major]


def placed(mode, case):
    specs = dict(zip("ab", case.stored, strict=True)) | {"w": case.out}
    specs |= {"ta": specs["a"], "tb": specs["b"], "a3": specs["a"], "b3": specs["b"]}
    return {name: mode.put(case, x, specs[name], ahead=x.ndim - 2) for name, x in data(case.extents).items()}


def judge_all(name, got, expectation):
    got = jax.tree.leaves(got)
    for i, (x, want, allowed) in enumerate(zip(got, *expectation, strict=True)):
        assert x.dtype == jnp.float32
        bounds.judge(f"{name}[{i}]", x, want, allowed)


# Extents per shard, chosen so that all cases of the matrix have the same global extents and share the expectations.
EXTENTS = (12, 4, 8)


def sized(case):
    return case.replace(per_shard=tuple(whole // one for whole, one in zip(EXTENTS, case.extents, strict=True)))


MATRIX = modes.pairs(modes.MODES, [sized(case) for case in cases.MATRIX])


@pytest.mark.small("values")
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize(("mode", "case"), MATRIX)
def test_every_transform(mode, case, implementation):
    with mode.scope(case):
        f = mode.product(case, implementation=implementation)
        got = mode.run(lambda x: [transform(f, x) for transform in TRANSFORMS], placed(mode, case))
    for transform, results in zip(TRANSFORMS, got, strict=True):
        judge_all(f"{mode.id} {case.name} {transform.__name__}", results, expected(transform, EXTENTS))


def test_taylor_mode(rng):
    a, b, da, db = (jnp.asarray(rng.integers(-2, 3, (4, 4)), jnp.float32) for _ in range(4))
    series = ((da, a, b), (db, a, da))
    # jet's factorials are not exact, so products round; XLA's products on both sides have equal bits.
    ours = types.SimpleNamespace(matmul=functools.partial(jaxmp.matmul, implementation="xla"))
    for f in (
        lambda module, a, b: module.matmul(a * a, b),
        lambda module, a, b: jax.vmap(module.matmul)(jnp.stack([a, b]), jnp.stack([b, a])),
        lambda module, a, b: module.matmul(jnp.ones((4, 4)), b) + a,
    ):
        want, got = (jet.jet(functools.partial(f, module), (a, b), series) for module in (jnp, ours))
        jax.tree.map(np.testing.assert_array_equal, want, got)
    with pytest.raises(NotImplementedError, match="takes products without C and epilog, got epilog RELU"):
        jet.jet(lambda a, b: jaxmp.linear(a, b, activation="relu"), (a, b), series)
