"""Programs drawn at random, before and after `jaxmp.fuse`: bitwise equal, because values are small integers.
`JAXMP_FUZZ=2000 pytest tests/fuse/test_drawn_programs.py` draws more, and `JAXMP_FUZZ_SEED` others."""

import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_alike
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

COUNT, SEED = int(os.environ.get("JAXMP_FUZZ", "16")), int(os.environ.get("JAXMP_FUZZ_SEED") or 0)
TOGETHER = 4  # programs that are compiled as one
N = 8  # extent of every dimension, before collectives


class Drawn:
    """A program in `mode`: a function of four arrays, made of steps that each add a value to a list."""

    def __init__(self, seed, mode):
        self.random = random.Random(f"{seed} {mode}")
        self.mode = mode
        self.steps = [self.random.choice(STEPS[mode]) for _ in range(self.random.randint(3, 8))]
        self.seeds = [self.random.random() for _ in self.steps]

    def __call__(self, *arrays):
        values = list(arrays)
        for step, seed in zip(self.steps, self.seeds, strict=True):
            values.append(_bounded(step(random.Random(seed), values, self.mode)))
        return values[-1] if len(values) == len(arrays) + 1 else values[-1].sum() + values[-2].sum()


def _bounded(x):
    """Clamps x to -3..3, so that no sum is rounded."""
    return lax.clamp(jnp.asarray(-3, x.dtype), x, jnp.asarray(3, x.dtype))


def _pick(rng, values):
    return rng.choice(values[-4:] if rng.random() < 0.7 else values)


def _dot(rng, values, mode):
    a, b = _pick(rng, values), _pick(rng, values)
    i, j = rng.randrange(2), rng.randrange(2)
    if mode == "explicit":
        return lax.dot_general(a, b, (((i,), (j,)), ((), ())), out_sharding=P(*rng.choice(RESULTS)))
    return lax.dot_general(a, b, (((i,), (j,)), ((), ())))


def _layer(rng, values, mode):
    d = _dot(rng, values, mode)
    kind = rng.randrange(5)
    if kind == 0:
        return jax.nn.relu(d)
    if kind == 1:
        return d + _of_type(_pick(rng, values), d)
    if kind == 2:
        bias = jnp.arange(N, dtype=d.dtype) - 3
        return jax.nn.relu(d + lax.broadcast_in_dim(bias, d.shape, (1,), out_sharding=_sharding(d)))
    if kind == 3:
        return 2 * d.T
    return d.astype(jnp.bfloat16).astype(d.dtype)


def _of_type(x, like):
    """Casts x to the type of `like` and gives it the same sharding."""
    x = x.astype(like.dtype)
    return jax.sharding.reshard(x, jax.typeof(like).sharding.spec) if jax.typeof(like).sharding.spec else x


def _sharding(x):
    sharding = jax.typeof(x).sharding
    return None if sharding.mesh.empty or sharding.mesh.manual_axes else sharding


def _elementwise(rng, values, mode):
    x = _pick(rng, values)
    return rng.choice([lambda: x + x, lambda: -x, lambda: x.T, lambda: jax.nn.relu(x), lambda: x * 2])()


def _reshard(rng, values, mode):
    return jax.sharding.reshard(_pick(rng, values), P(*rng.choice(RESULTS)))


def _scan(rng, values, mode):
    a, b = _pick(rng, values), _pick(rng, values)
    spec = None if mode != "explicit" else jax.typeof(a).sharding.spec
    has_relu = rng.random() < 0.5

    def body(c, _):
        d = lax.dot_general(c, b, (((1,), (0,)), ((), ())), out_sharding=spec)
        return _bounded(jax.nn.relu(d) - 1 if has_relu else d), None

    return lax.scan(body, a, None, length=2)[0]


def _cond(rng, values, mode):
    a = _pick(rng, values)
    spec = None if mode != "explicit" else jax.typeof(a).sharding.spec

    def product(x):
        return lax.dot_general(x, x, (((1,), (1,)), ((), ())), out_sharding=spec)

    return lax.cond(jnp.bool_(rng.random() < 0.5), product, lambda x: x, a)


def _gathered(rng, values, mode):
    x, w = _pick(rng, values), _pick(rng, values)
    d = lax.all_gather(x, "x", tiled=True) @ w
    return lax.slice_in_dim(jax.nn.relu(d), 0, N)


def _weight_gathered(rng, values, mode):
    """Multiplies by a matrix that is gathered from halves along a random dimension."""
    x, w = _pick(rng, values), _pick(rng, values)
    i, j, k = (rng.randrange(2) for _ in range(3))
    whole = lax.all_gather(lax.slice_in_dim(w, 0, N // 2, axis=i), "x", axis=i, tiled=True)
    operands = (x, whole) if rng.random() < 0.5 else (whole, x)
    d = lax.dot_general(*operands, (((j,), (k,)), ((), ())))
    return rng.choice([lambda: d, lambda: d.T, lambda: jax.nn.relu(d), lambda: d + x])()


def _scattered(rng, values, mode):
    x, w = _pick(rng, values), _pick(rng, values)
    i, j, k = (rng.randrange(2) for _ in range(3))
    d = lax.dot_general(x, w, (((j,), (k,)), ((), ())))
    d = lax.psum_scatter(d.T if rng.random() < 0.3 else d, "x", tiled=True, scatter_dimension=i)
    return jnp.concatenate([d, -d], axis=i)


def _summed(rng, values, mode):
    x, w = _pick(rng, values), _pick(rng, values)
    return lax.pcast(lax.psum(x @ w, "x"), ("x",), to="varying")


RESULTS = ((None, None), ("x", None), (None, "x"), ("y", None), (None, "y"), ("x", "y"), (("x", "y"), None))
COMMON = (_dot, _layer, _layer, _layer, _elementwise)
STEPS = {
    "none": (*COMMON, _scan, _cond),
    "auto": (*COMMON, _scan, _cond),
    "explicit": (*COMMON, _reshard, _reshard, _scan, _cond),
    "manual": (*COMMON, _gathered, _weight_gathered, _weight_gathered, _scattered, _scattered, _summed),
}


def mesh_of(mode):
    if mode == "manual":
        return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2, devices=jax.devices()[:4])


def operands(mode, mesh):
    rng = np.random.default_rng(SEED)
    arrays = [jnp.asarray(rng.integers(-2, 3, (N, N)), jnp.float32) for _ in range(4)]
    if mode == "explicit":
        return [jax.device_put(x, NamedSharding(mesh, P(*spec))) for x, spec in zip(arrays, RESULTS[:4], strict=True)]
    return arrays


def function_of(mode, mesh, seeds):
    programs = [Drawn(seed, mode) for seed in seeds]

    def run(*arrays):
        return [program(*arrays) for program in programs]

    if mode != "manual":
        return run

    def of_shards(*arrays):
        return [jnp.sum(x)[None] for x in run(*(lax.pcast(x, ("x",), to="varying") for x in arrays))]

    return jax.shard_map(of_shards, mesh=mesh, in_specs=(P(),) * 4, out_specs=P("x"))


@pytest.mark.parametrize("mode", STEPS)
@pytest.mark.parametrize("first", range(0, -(-COUNT // len(STEPS)), TOGETHER))
def test_drawn_programs_keep_their_values_types_and_gradients(mode, first):
    mesh = mesh_of(mode)
    function = function_of(mode, mesh, [f"{SEED} {first + i}" for i in range(TOGETHER)])

    def both(f):
        def total(*arrays):
            results = f(*arrays)
            return sum(x.astype(jnp.float32).sum() for x in results), results

        return lambda *arrays: jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)

    with jax.numpy_dtype_promotion("standard"), jax.set_mesh(mesh):
        args = operands(mode, mesh)
        want = jax.jit(both(function))(*args)
        for fused in (both(jaxmp.fuse(function)), jaxmp.fuse(both(function))):
            assert_alike(want, jax.jit(fused)(*args))


def test_drawn_programs_have_products_that_are_fused():
    """Random programs must communicate, or they would prove nothing."""
    for mode in ("explicit", "manual"):
        mesh = mesh_of(mode)
        with jax.numpy_dtype_promotion("standard"), jax.set_mesh(mesh):
            function = function_of(mode, mesh, [f"0 {i}" for i in range(TOGETHER)])
            found = jaxmp.explain(jaxmp.fuse(function), quiet=True)(*operands(mode, mesh))
        assert found.calls > TOGETHER, str(found)
