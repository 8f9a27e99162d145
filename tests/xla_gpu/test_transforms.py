"""Transforms and levels of determinism of calls on XLA:GPU, on meshes of several devices.

The oracles are products in float64 on the host, of small integers, so that every comparison is exact.
"""

import fake_gpus
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_calls import PATTERNS, integers, mesh_over, operands, put, run_apart


def sides(name, mesh):
    """(product of a (24, 16) and b (16, 32) as the pattern has them stored, the operands, a and b, d's sharding)."""
    product, given, _ = operands(name, mesh)
    return product, given, (integers((24, 16)), integers((16, 32), 1)), PATTERNS[name][2]


def stored(name, db):
    return db.T if name == "all_reduce" else db


def jvp(name, product, given, a, b, out, mesh):
    got = jax.jit(lambda a, b: jax.jvp(product, (a, b), (2 * a, b)))(*given)
    return got, (a @ b, 3 * a @ b)


def linearize(name, product, given, a, b, out, mesh):
    def f(a, b):
        d, push = jax.linearize(product, a, b)
        return d, push(a, 2 * b)

    return jax.jit(f)(*given), (a @ b, 3 * a @ b)


def remat(name, product, given, a, b, out, mesh):
    t = put(integers((24, 32), 2), mesh, out)
    f = jax.checkpoint(lambda a, b: product(a, b) * 1.0)
    got = jax.jit(lambda a, b: jax.vjp(f, a, b)[1](t))(*given)
    t = np.asarray(t)
    return got, (t @ b.T, stored(name, a.T @ t))


def grad_in_scan(name, product, given, a, b, out, mesh):
    """The gradient of a loop, whose body is a call: what is kept for it comes back in the backward loop."""
    t = put(integers((24, 32), 2), mesh, out)

    def loss(a, b):
        total, _ = jax.lax.scan(lambda s, _: (s + jnp.sum(t * product(a, b)), None), jnp.float32(0), length=3)
        return total

    got = jax.jit(jax.grad(loss, (0, 1)))(*given)
    t = np.asarray(t)
    return got, (3 * t @ b.T, stored(name, 3 * a.T @ t))


def vmap_rows(name, product, given, a, b, out, mesh):
    """A batch of a alone is one call of more rows."""
    batch = np.stack([a, 2 * a, -a])
    spec = given[0].sharding.spec
    got = jax.jit(jax.vmap(product, (0, None)))(put(batch, mesh, P(None, *spec)), given[1])
    return got, batch @ b


def jit_in_jit(name, product, given, a, b, out, mesh):
    inner = jax.jit(product)
    return jax.jit(lambda a, b: inner(a, b) + inner(2 * a, b))(*given), 3 * a @ b


def cond(name, product, given, a, b, out, mesh):
    """Each device takes the branch by a number of its own, equal on all."""
    f = jax.jit(lambda p, a, b: jax.lax.cond(p, product, lambda a, b: -product(a, b), a, b))
    return (f(True, *given), f(False, *given)), (a @ b, -(a @ b))


TRANSFORMS = (jvp, linearize, remat, grad_in_scan, vmap_rows, jit_in_jit, cond)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.__name__)
@pytest.mark.parametrize("name", PATTERNS)
def test_transforms(name, transform):
    mesh = mesh_over((0, 1, 2, 3))
    with jax.set_mesh(mesh):
        product, given, (a, b), out = sides(name, mesh)
        fake_gpus.cublasmp_calls(2)
        got, expected = transform(name, product, given, a, b, out, mesh)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(x, y)
    assert "Matmul" in fake_gpus.cublasmp_calls(2)


def test_levels_of_determinism_are_calls_of_one_rank():
    """On a card of few multiprocessors, for the fake's threads run one by one: 512 x k x 1024."""
    said = run_apart(
        f"""
        import functools, os
        import jax, numpy as np, jaxmp
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        assert jax.devices()[0].core_count == 8
        patterns = {{name: (P(*a), P(*b), P(*out)) for name, (a, b, out) in {_PLAIN!r}.items()}}
        mesh = jax.make_mesh((2,), ("y",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
        rng = np.random.default_rng(0)
        a, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((600, 8), (8, 1100)))
        with jax.set_mesh(mesh):
            for level, name in {_LEVELS!r}:
                spec_a, spec_b, out = patterns[name]
                given = (jax.device_put(x, NamedSharding(mesh, s)) for x, s in ((a, spec_a), (b, spec_b)))
                f = jax.jit(functools.partial(jaxmp.matmul, out_sharding=out, determinism=level))
                fake_gpus.cublasmp_calls(1)
                np.testing.assert_array_equal(f(*given), a @ b)
                print(level, name, fake_gpus.cublasmp_calls(1).count("Matmul"), flush=True)
        os._exit(0)
    """,
        FAKE_CUDA_MULTIPROCESSORS="8",
        JAXMP_TIMEOUT="60",
    )
    # Two calls of 512 rows, or one where the rank has 300; two of 1024 columns, or one where it has 550.
    counts = {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 4, "local": 2}
    expected = [f"{level} {name} {counts[name]}" for level, name in _LEVELS]
    assert said.splitlines()[-len(expected) :] == expected, said


_PLAIN = {
    "all_gather": (("y", None), (None, "y"), (None, "y")),
    "reduce_scatter": ((None, "y"), ("y", None), ("y", None)),
    "all_reduce": ((None, "y"), ("y", None), (None, None)),
    "local": (("y", None), (None, None), ("y", None)),
}
_LEVELS = [*(("batch", name) for name in _PLAIN), ("topology", "reduce_scatter")]


def test_a_call_of_a_level_takes_its_rows_from_where_they_are():
    """And writes its part of d where it goes, for both lie in one piece: no kernel copies them."""
    said = run_apart(
        """
        import functools, os
        import jax, numpy as np, jaxmp
        rng = np.random.default_rng(0)
        a, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((1536, 16), (16, 1024)))
        f = jax.jit(functools.partial(jaxmp.matmul, determinism="batch"))
        text = f.lower(a, b).compile().as_text()
        np.testing.assert_array_equal(f(a, b), a @ b)
        start = text.index("%dynamic-slice-fusion")
        print(text[start : text.index("}", text.index("ROOT", start) + 200)])
        print("copies", [line for line in text.splitlines() if "kind=kLoop" in line and "slice" in line.split()[0]])
        os._exit(0)
    """,
        FAKE_CUDA_MULTIPROCESSORS="8",
        JAXMP_TIMEOUT="60",
    )
    assert "f32[3,512,16]" in said.partition("->")[0], said
    assert "dynamic-slice(" in said
    assert "dynamic-update-slice(" in said
    assert "jaxmp_matmul" in said
    assert "copies []" in said, said
