"""Weights that cross between ranks in 8 bits, and gradients in bfloat16 (`CommOptions`). Without these tests a number
could get the scale of another block, an error could exceed its bound, and bytes could cross wide."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transfers
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import CommOptions

BOTH = CommOptions(weights="int8", gradients="bfloat16")
M, K, N = 8, 24, 20
# (sharding of x, of w, of d) on 2 x 2 devices.
SPLITS = {
    "k": (P("x"), P("x"), P("x")),
    "columns": (P("x"), P(None, "x"), P("x")),
    "k, columns over y": (P("x"), P("x", "y"), P("x", "y")),
    "k over both": (P(("x", "y")), P(("x", "y")), P(("x", "y"))),
    "columns, sums over y": (P("x", "y"), P("y", "x"), P("x")),
    "a grid": (P("x", "y"), P("x", "y"), P("x", "y")),
    "k over both, equal over y": (P("x"), P(("x", "y")), P("x")),
}
# Unit roundoffs of types of weights.
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def mesh_of(kind):
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis,) * 2, devices=jax.devices()[:4])


def product(kind, specs, mesh, comm=BOTH, **options):
    """Returns x @ w as a call of `kind`. Inside shard_map `block_matmul` gathers w."""
    if kind == "shard_map":
        multiply = functools.partial(jaxmp.block_matmul, axis_names=("x", ()), comm=comm, **options)
        return jax.shard_map(multiply, mesh=mesh, in_specs=specs[:2], out_specs=specs[2])
    given = {"in_shardings": specs[:2]} if kind == "in_shardings" else {}
    return functools.partial(jaxmp.matmul, out_sharding=specs[2], comm=comm, **given, **options)


def placed(mesh, specs, *arrays):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs[: len(arrays)], strict=True)]


def integers():
    """Small integers. Each block has a weight of 127, so its scale is 1 and no weight is rounded."""
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((M, K), (K, N)))
    w[:, ::5], w[::6] = 127, -127
    return x, w


KINDS = [(kind, name) for kind in ("explicit", "in_shardings") for name in SPLITS] + [("shard_map", "k")]


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_weights_that_need_no_rounding_are_exact(kind, name):
    """The value, the gradients, tangents and a batch, with the bytes of the compiled program."""
    mesh, specs, (x, w) = mesh_of(kind), SPLITS[name], integers()
    call = product(kind, specs, mesh)

    def program(x, w):
        d, pull = jax.vjp(call, x, w)
        return d, pull(d), jax.jvp(call, (x, w), (x, w))[1]

    with jax.set_mesh(mesh):
        _, compiled = transfers.check(program, *placed(mesh, specs, x, w))
        d, *gradients, tangent = compiled(*placed(mesh, specs, x, w))
        batch = jax.jit(jax.vmap(call))(
            *placed(mesh, [P(None, *spec) for spec in specs[:2]], *map(np.stack, ((x, x), (w, -w))))
        )
    exact = x.astype(np.float64) @ w
    np.testing.assert_array_equal(d, exact)
    np.testing.assert_array_equal(gradients[0], exact @ w.T)
    np.testing.assert_array_equal(tangent, 2 * exact)
    np.testing.assert_array_equal(batch, [exact, -exact])
    np.testing.assert_allclose(gradients[1], x.T @ exact, rtol=0, atol=2.0**-7 * (np.abs(x.T) @ np.abs(exact)).max())
    assert re.search(r" = u8\[\S* all-gather\(", compiled.as_text())


def test_bytes_of_the_compiled_program():
    """132 bytes for 128 weights, and 2 for each number of the gradient, as `explain` says."""
    mesh, specs, k, n = mesh_of("explicit"), SPLITS["k"], 64, 24
    x, w = jnp.ones((M, k)), jnp.ones((k, n))

    def gradient(x, w):
        d, pull = jax.vjp(product("explicit", specs, mesh), x, w)
        return pull(d)[1]

    with jax.set_mesh(mesh):
        rows, compiled = transfers.check(gradient, *placed(mesh, specs, x, w))
    text = compiled.as_text()
    gathered = re.findall(r" = (\w+\[\S+\])\S* all-gather\(", text)
    exchanged = re.findall(r"(\w+)\[(?:1,)?32,24\]\S*(?:, [^)]*)?\)? all-to-all\(", text)
    assert gathered == [f"u8[{k * n // 128},132]"]
    assert exchanged
    assert set(exchanged) <= {"u16", "bf16"}
    assert not re.search(r" (all-reduce|reduce-scatter)\(", text)
    said = {(row.operation, row.bytes_moved) for row in rows if row.operation != "matmul"}
    assert said == {("all_gather", k * n // 2 // 128 * 132), ("all_to_all", k * n // 2 * 2)}


def weights(dtype):
    """Weights of many magnitudes, with blocks of zeros, of the smallest and of the largest numbers."""
    rng, info = np.random.default_rng(1), jnp.finfo(dtype)
    w = rng.standard_normal(8 * 128) * 2.0 ** rng.integers(-12, 3, 8 * 128)
    w[128:256] = 0
    w[256:384] *= 2.0 ** max(info.minexp, -124)
    w[384:512] = rng.uniform(-1, 1, 128) * float(info.max)
    w[512:640] = np.linspace(-1, 1, 128)
    return jnp.asarray(w.reshape(64, 16)).astype(dtype)


@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize("narrow", ["int8", "float8_e4m3fn"])
def test_weights_keep_the_documented_bound(narrow, dtype):
    mesh, specs, w, u = mesh_of("explicit"), SPLITS["k"], weights(dtype), ROUNDOFF[dtype]
    with jax.set_mesh(mesh):
        call = product("explicit", specs, mesh, CommOptions(weights=narrow))
        rounded = call(*placed(mesh, specs, jnp.eye(64, dtype=dtype), w))
        broken = call(*placed(mesh, specs, jnp.eye(64, dtype=dtype), w.at[3, 3].set(jnp.inf).at[63, 0].set(jnp.nan)))
    blocks, given = (np.asarray(x, np.float64).reshape(-1, 128) for x in (rounded, w))
    most = np.abs(given).max(1, keepdims=True)
    error = most / 254 if narrow == "int8" else np.maximum(np.abs(given) / 16, most / 458752)
    used = np.abs(blocks - given) / ((1 + 2.0**-14) * error + u * most + 2.0**-126)
    print(f"{used.max():.1%} of what is allowed")
    assert used.max() <= 1
    assert used.max() > 0.5  # the bound is not loose
    # The product with an identity has NaN in each column of a NaN. Both NaN blocks have 8 rows of all columns.
    assert np.isnan(np.asarray(broken, np.float32)).all()


@pytest.mark.parametrize("dtype", ROUNDOFF)
def test_gradients_keep_the_documented_bound(dtype):
    """With one row of ones on each rank, the terms of a gradient are the rows of the cotangent."""
    mesh, specs, u = mesh_of("explicit"), SPLITS["k over both"], ROUNDOFF[dtype]
    ct = jnp.asarray(np.random.default_rng(2).standard_normal((4, 512)) * 2.0**5).astype(dtype)
    with jax.set_mesh(mesh):
        x, w, ct = placed(mesh, (*specs[:2], specs[2]), jnp.ones((4, 4), dtype), jnp.ones((4, 512), dtype), ct)
        call = product("explicit", specs, mesh, CommOptions(gradients="bfloat16"))
        (got,) = jax.jit(lambda w, ct: jax.vjp(lambda w: call(x, w), w)[1](ct))(w, ct)
    terms = np.asarray(ct, np.float64)
    most = np.abs(terms).sum(0)
    used = np.abs(np.asarray(got, np.float64) - terms.sum(0)) / ((1 + u) * (2.0**-8 + 4 * 2.0**-23) * most + u * most)
    print(f"{used.max():.1%} of what is allowed")
    assert used.max() <= 1
    assert used.max() > 0.2


REFUSED = {
    "batch": ({"determinism": "batch"}, NotImplementedError, "matmul: determinism='batch' has no comm.weights"),
    "topology": ({"determinism": "topology"}, NotImplementedError, "determinism='topology' has no comm.weights"),
    "gradients at a level": (
        {"determinism": "batch", "comm": CommOptions(gradients="bfloat16")},
        NotImplementedError,
        "determinism='batch' has no comm.gradients",
    ),
    "no gather": ({}, ValueError, "but this call is local; drop it"),
    "a type": ({"comm": CommOptions(weights="int4")}, ValueError, "comm.weights must be None or int8 or float8_e4m3fn"),
    "no type": ({"comm": CommOptions(gradients=3)}, TypeError, "comm.gradients must be a dtype"),
    "a type of gradients": (
        {"comm": CommOptions(gradients="float16")},
        ValueError,
        "comm.gradients must be None or bfloat16, got float16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rounded_is_refused(name):
    options, error, text = REFUSED[name]
    mesh, specs = mesh_of("explicit"), SPLITS["k"]
    specs = (*specs[:1], P(), *specs[2:]) if name == "no gather" else specs
    with jax.set_mesh(mesh):
        x, w = placed(mesh, specs, jnp.ones((M, K)), jnp.ones((K, N)))
        with pytest.raises(error, match=re.escape(text)):
            jaxmp.matmul(x, w, **{"comm": BOTH, "out_sharding": specs[2]} | options)


def test_automatic_axes_and_shards_refuse_it_without_a_gather():
    mesh, x, w = mesh_of("in_shardings"), jnp.ones((M, K)), jnp.ones((K, N))
    gathers = functools.partial(jaxmp.all_gather_matmul, axis_name="x", comm=BOTH)
    local = functools.partial(jaxmp.matmul, comm=BOTH)
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="has not chosen a pattern yet; pass in_shardings"):
            jax.jit(local)(x, w)
        for call, specs in ((gathers, (P("x"), P(None, "x"))), (local, (P("x"), P()))):
            with pytest.raises(ValueError, match=r"needs a [bw] of bfloat16, float16, float32 that the ranks gather"):
                jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(None, "x"))(x, w)
