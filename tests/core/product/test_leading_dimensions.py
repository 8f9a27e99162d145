"""Leading dimensions of a and vmap, bitwise on small integers. Rows of a batch fold into rows of one product. Gathered
and scattered rows are ordered by rank first and batch second, so the fold must put the rank outermost. A wrong order
permutes rows between examples, and does not show with one example or one rank. The table (test_table.py) has vmap over
each operand in every mode."""

import functools
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog

_XY = ("x", "y")

# id: (spec of a (4, 8, 6) or (2, 4, 8, 6), spec of b (6, 4), spec of the result, pattern)
LEADING = {
    "local over the batch": (P("x", None, None), P(None, "y"), P("x", None, "y"), "local"),
    "gather rows, batch sharded": (P("x", "y", None), P(None, "y"), P("x", None, "y"), "all_gather"),
    "gather the batch": (P("y", None, None), P(None, "y"), P(None, None, "y"), "all_gather"),
    "scatter rows, batch sharded": (P("x", None, "y"), P("y", None), P("x", "y", None), "reduce_scatter"),
    "scatter the batch": (P(None, None, "y"), P("y", None), P("y", None, None), "reduce_scatter"),
    "scatter behind an axis": (P(None, "x", "y"), P("y", None), P(None, _XY, None), "reduce_scatter"),
    "scatter columns": (P("x", None, "y"), P("y", None), P("x", None, "y"), "reduce_scatter"),
    "all-reduce": (P("x", None, "y"), P("y", None), P("x", None, None), "all_reduce"),
    "two batch dimensions, gather": (P("x", None, "y", None), P(None, "y"), P("x", None, None, "y"), "all_gather"),
    "two batch dimensions, scatter": (P("x", None, None, "y"), P("y", None), P("x", "y", None, None), "reduce_scatter"),
}


def swapped_spec(spec):
    return P(*spec[:-2], spec[-1], spec[-2])


@pytest.mark.small(
    "values", of=lambda transpose_a, implementation, **layout: (str(layout), (transpose_a, implementation))
)
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize(("a_spec", "b_spec", "out", "pattern"), LEADING.values(), ids=LEADING.keys())
def test_leading_dimensions(a_spec, b_spec, out, pattern, transpose_a, implementation, rng):
    epilog = Epilog.RELU_AUX_BIAS if transpose_a else Epilog.GELU_AUX_BIAS
    mesh = cases.BY_NAME["local"].jax_mesh()
    a, b = cases.integers(rng, *(2, 4, 8, 6)[4 - len(a_spec) :]), cases.integers(rng, 6, 4)
    c, bias = cases.integers(rng, *a.shape[:-1], 4), cases.integers(rng, 4)
    stored = np.ascontiguousarray(a.swapaxes(-1, -2)) if transpose_a else a

    def program(a, b, c, bias):
        options = {"transpose_a": transpose_a, "out_sharding": out, "implementation": implementation}
        inputs = {"epilog": epilog, "epilog_inputs": {"bias": bias}}
        w = c + 1
        plain = jaxmp.matmul(a, b, **options)
        _, aux = jaxmp.matmul(a, b, c, beta=2.0, **inputs, **options)
        gradients = jax.grad(lambda a, b: jnp.sum(w * jaxmp.matmul(a, b, **options)), (0, 1))(a, b)
        return plain, aux, gradients

    with jax.set_mesh(mesh):
        specs = (swapped_spec(a_spec) if transpose_a else a_spec, b_spec, out, P(out[-1]))
        placed = [cases.put(x, mesh, s) for x, s in zip((stored, b, c, bias), specs, strict=True)]
        plain, aux, (da, db) = jax.jit(program)(*placed)
        if implementation is None:
            rows = jaxmp.explain(lambda a, b: program(a, b, *placed[2:])[0])(*placed[:2]).rows
            assert [row.pattern for row in rows] == [pattern]
    w = c + 1
    np.testing.assert_array_equal(plain, a @ b)
    z = a @ b + 2 * c + bias
    if "gelu_aux" in aux:
        np.testing.assert_array_equal(aux["gelu_aux"], z)
    else:
        shards = 1 if out[-1] is None else 2
        bits = np.unpackbits(np.asarray(aux["relu_aux"]).reshape(*z.shape[:-1], shards, 16), axis=-1, bitorder="little")
        np.testing.assert_array_equal(bits[..., : 4 // shards].reshape(z.shape), z > 0)
    np.testing.assert_array_equal(da, (w @ b.T).swapaxes(-1, -2) if transpose_a else w @ b.T)
    np.testing.assert_array_equal(db, a.reshape(-1, 6).T @ w.reshape(-1, 4))


def test_vmap_over_an_automatic_axis(mesh_of, rng):
    a, b = cases.integers(rng, 4, 6, 8), cases.integers(rng, 4, 8, 2)
    mesh = mesh_of({"x": 2, "y": 2}, AxisType.Auto)
    options = {"in_shardings": (P(), P(None, "y")), "out_sharding": P(None, "y"), "mesh": mesh}
    call = jax.jit(jax.vmap(functools.partial(jaxmp.matmul, **options), spmd_axis_name="x"))
    where = [NamedSharding(mesh, spec) for spec in (P("x"), P("x", None, "y"))]
    placed = list(map(jax.device_put, (a, b), where))
    np.testing.assert_array_equal(call(*placed), a @ b)
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective", call.lower(*placed).compile().as_text())
