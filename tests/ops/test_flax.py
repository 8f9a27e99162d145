"""Flax layers with `dot_general=jaxmp.dot_general`: NNX and Linen, forward and gradients, as with `lax.dot_general`.

What would be silently wrong without it: a layer that passes something we ignore, or a gradient that is one rank's part.
"""

import bounds
import cases
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import calls_of, collectives_of
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp

MESH = cases.BY_NAME["local"]
ROWS, COLUMNS = P("x", "y"), P("x", None, "y")
BATCH, LENGTH, WIDTH, HIDDEN = 4, 6, 8, 16


class Mlp(nnx.Module):
    """Column-parallel, then row-parallel; `out_sharding` only where the axes are explicit."""

    def __init__(self, dot_general, is_explicit, dtype=None):
        rngs, self.is_explicit = nnx.Rngs(0), is_explicit
        metadata = [{"out_sharding": (None, "y")}, {"out_sharding": ("y", None)}] if is_explicit else [{}, {}]
        layer = {"dot_general": dot_general, "rngs": rngs, "dtype": dtype, "bias_init": nnx.initializers.normal()}
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_metadata=metadata[0], **layer)
        self.down = nnx.Linear(HIDDEN, WIDTH, kernel_metadata=metadata[1], **layer)

    def __call__(self, x):
        columns, rows = ({"out_sharding": spec} if self.is_explicit else {} for spec in (COLUMNS, ROWS))
        return self.down(nnx.gelu(self.up(x, **columns)), **rows)


class Heads(nnx.Module):
    """Several features at once, as attention's projections have them."""

    def __init__(self, dot_general, is_explicit, dtype=None):
        rngs, self.is_explicit = nnx.Rngs(0), is_explicit
        metadata = [{"out_sharding": (None, "y", None)}, {"out_sharding": ("y", None, None)}]
        metadata = metadata if is_explicit else [{}, {}]
        layer = {"dot_general": dot_general, "rngs": rngs, "dtype": dtype, "use_bias": False}
        self.split = nnx.LinearGeneral(WIDTH, (4, 3), kernel_metadata=metadata[0], **layer)
        self.merge = nnx.LinearGeneral((4, 3), WIDTH, axis=(-2, -1), kernel_metadata=metadata[1], **layer)

    def __call__(self, x):
        columns, rows = ({"out_sharding": spec} if self.is_explicit else {} for spec in (COLUMNS, ROWS))
        return self.merge(self.split(x, **columns), **rows)


@nnx.jit
def loss_and_gradients(model, x):
    return nnx.value_and_grad(lambda model, x: jnp.sum(model(x) ** 2), argnums=(0, 1))(model, x)


def run(model, dot_general, axis_type, x, dtype=None):
    """[loss, gradients...] on the mesh, or on one device where `axis_type` is None."""
    if axis_type is None:
        return jax.tree.leaves(loss_and_gradients(model(dot_general, False, dtype), x))
    mesh = MESH.jax_mesh(axis_type)
    with jax.set_mesh(mesh):
        x = cases.put(x, mesh, ROWS)
        return jax.tree.leaves(loss_and_gradients(model(dot_general, axis_type == AxisType.Explicit, dtype), x))


@pytest.mark.small("values")
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto, None], ids=["explicit", "bare jit", "no mesh"])
@pytest.mark.parametrize("model", [Mlp, Heads])
def test_nnx(model, axis_type, rng):
    """Both runs are as far from each other as two roundings of every operation may be."""
    cases.require(None)
    x = rng.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
    got, want = (run(model, f, axis_type, x) for f in (jaxmp.dot_general, jax.lax.dot_general))
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        if axis_type == AxisType.Explicit:
            assert g.sharding.is_equivalent_to(w.sharding, g.ndim)
        # Sums of some hundred terms no larger than the largest result: so well conditioned is a small model.
        bounds.judge(f"leaf {i}", g, w, np.full(w.shape, 256 * bounds.unit_roundoff("float32") * np.abs(w).max()))


def test_nnx_model_that_the_program_makes_itself(rng):
    """Parameters, input and the first call in one program on automatic axes: nothing comes in with a sharding."""
    cases.require(None)

    @nnx.jit(static_argnums=0)
    def create(dot_general):
        model = Mlp(dot_general, is_explicit=False)
        return model, loss_and_gradients(model, jnp.ones((BATCH, LENGTH, WIDTH)))

    with jax.set_mesh(MESH.jax_mesh(AxisType.Auto)):
        got, want = (jax.tree.leaves(create(f)) for f in (jaxmp.dot_general, jax.lax.dot_general))
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        bounds.judge(f"leaf {i}", g, w, np.full(w.shape, 256 * bounds.unit_roundoff("float32") * np.abs(w).max()))


def test_nnx_in_bfloat16_with_float32_parameters(rng):
    cases.require(None)
    x = rng.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
    got, want = (run(Mlp, f, AxisType.Explicit, x, jnp.bfloat16) for f in (jaxmp.dot_general, jax.lax.dot_general))
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.dtype == w.dtype
        w = np.asarray(w, np.float32)
        allowed = np.full(w.shape, 8 * bounds.unit_roundoff("bfloat16") * np.abs(w).max())
        bounds.judge(f"leaf {i}", np.asarray(g, np.float32), w, allowed)


def test_nnx_layers_are_the_fused_calls():
    """Forward: an all-gather and a reduce-scatter inside our calls, and nothing beside them."""
    cases.require(None)
    mesh = MESH.jax_mesh()
    for model in (Mlp, Heads):
        with jax.set_mesh(mesh):
            x = cases.put(np.ones((BATCH, LENGTH, WIDTH), np.float32), mesh, ROWS)
            graph, state = nnx.split(model(jaxmp.dot_general, True))
            text = jax.jit(lambda state, x, graph=graph: nnx.merge(graph, state)(x)).lower(state, x).compile().as_text()
        assert calls_of(text) == ["all_gather", "reduce_scatter"]
        assert not collectives_of(text)


class LinenMlp(flax.linen.Module):
    dot_general: object

    @flax.linen.compact
    def __call__(self, x):
        x = flax.linen.gelu(flax.linen.Dense(HIDDEN, dot_general=self.dot_general)(x))
        x = flax.linen.DenseGeneral((4, 4), dot_general=self.dot_general)(x)
        return flax.linen.DenseGeneral(WIDTH, axis=(-2, -1), dot_general=self.dot_general)(x)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto, None], ids=["explicit", "bare jit", "no mesh"])
def test_linen(axis_type, rng):
    """Linen's layers have no `out_sharding`, so here they are data-parallel: no contraction is sharded."""
    cases.require(None)
    x = rng.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)

    def gradients(dot_general):
        module = LinenMlp(dot_general)
        params = module.init(jax.random.key(0), x)
        program = jax.jit(jax.value_and_grad(lambda params, x: jnp.sum(module.apply(params, x) ** 2), (0, 1)))
        if axis_type is None:
            return jax.tree.leaves(program(params, x))
        mesh = MESH.jax_mesh(axis_type)
        with jax.set_mesh(mesh):
            params = jax.tree.map(lambda p: cases.put(p, mesh, P()), params)
            return jax.tree.leaves(program(params, cases.put(x, mesh, ROWS)))

    for i, (g, w) in enumerate(zip(gradients(jaxmp.dot_general), gradients(jax.lax.dot_general), strict=True)):
        bounds.judge(f"leaf {i}", g, w, np.full(w.shape, 256 * bounds.unit_roundoff("float32") * np.abs(w).max()))


@pytest.mark.parametrize("kind", [nnx.Param, nnx.Variable])
def test_a_parameter_is_an_operand_as_it_is_to_jnp(kind, rng):
    cases.require(None)
    x, w, bias = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((4, 6), (6, 6), (6,)))
    kept, bias_kept = kind(jnp.asarray(w)), kind(jnp.asarray(bias))
    for got, want in (
        (jaxmp.matmul(x, kept), x @ w),
        (jaxmp.linear(x, kept, bias_kept), x @ w + bias),
        (jaxmp.mlp(x, kept, bias_kept, kept, None, activation="relu"), np.maximum(x @ w + bias, 0) @ w),
        (jaxmp.einsum("ij,jk->ik", x, kept), x @ w),
    ):
        np.testing.assert_array_equal(got, want)
