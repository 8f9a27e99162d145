"""Weights of 8 bits and fewer, decoded and scaled by the model, through `jaxmp.fuse`. Without these tests, a scale
could multiply wrong columns, a gradient could lose it, and weights could be decoded in memory. Small integers and
powers of two keep sums exact, so results are compared bitwise."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

pytestmark = pytest.mark.usefixtures("promotion_of_users")

M, K, N = 6, 16, 24
DECODED = rf"convert .*tensor<({K}x{N}|{N}x{K})x(i8|i4|f8E4M3FN)>"


def decode(q, s, dtype):
    return q.astype(dtype) * s.astype(dtype)


@jax.jit
def decode_columns(q, s):
    return q.astype(s.dtype) * s


FORMS = {
    "no scale": lambda x, q, s: x @ q.astype(x.dtype),
    "two types": lambda x, q, s: lax.dot_general(x, q, (((1,), (0,)), ((), ())), preferred_element_type=x.dtype),
    "a column": lambda x, q, s: x @ decode(q, s, x.dtype),
    "a column, in float32": lambda x, q, s: x @ decode(q, s, "float32").astype(x.dtype),
    "a column, behind": lambda x, q, s: (x @ q.astype(x.dtype)) * s.astype(x.dtype),
    "a column, jitted": lambda x, q, s: x @ decode_columns(q, s.astype(x.dtype)),
    "a column, repeated": lambda x, q, s: x @ (q.astype(x.dtype) * jnp.broadcast_to(s.astype(x.dtype), q.shape)),
    "the tensor": lambda x, q, s: x @ decode(q, s[3], x.dtype),
    "a constant": lambda x, q, s: x @ (0.25 * q.astype(x.dtype)),
    "a row of k": lambda x, q, s: x @ decode(q, jnp.resize(s, (K, 1)), x.dtype),
    "a row and a column": lambda x, q, s: x @ (decode(q, s, x.dtype) * jnp.resize(s, (K, 1)).astype(x.dtype)),
    "stored (n, k)": lambda x, q, s: jnp.einsum("mk,nk->mn", x, decode(q.T, s[:, None], x.dtype)),
    "on the left": lambda x, q, s: (decode(q, s, x.dtype).T @ x.T).T,
    "heads": lambda x, q, s: jnp.einsum(
        "mk,khd->mhd", x, decode(q.reshape(K, 4, -1), s.reshape(4, -1), x.dtype)
    ).reshape(M, N),
}


def of_blocks(q, s, dtype, width=None):
    """Decodes q with a scale for each of 4 blocks of k, and each column or group of `width` columns."""
    s, width = jnp.stack([s, 2 * s, s / 2, s]), width or len(s)
    return decode(q.reshape(4, K // 4, width, -1), s.reshape(4, 1, width, -1)[..., :1], dtype).reshape(q.shape)


BLOCKS = {
    "a block": lambda x, q, s: x @ of_blocks(q, s, x.dtype),
    "a block, in float32": lambda x, q, s: x @ of_blocks(q, s, "float32").astype(x.dtype),
    "a block of k and columns": lambda x, q, s: x @ of_blocks(q, s, x.dtype, 6),
    "a block of k alone": lambda x, q, s: x @ of_blocks(q, s, x.dtype, 1),
    "a block, repeated": lambda x, q, s: (
        x @ (q.astype(x.dtype) * jnp.repeat(jnp.stack([s, s / 2]).astype(x.dtype), K // 2, axis=0))
    ),
    "a block and a column": lambda x, q, s: x @ (of_blocks(q, s, x.dtype) * s.astype(x.dtype)),
    "a block, on the left": lambda x, q, s: lax.dot_general(of_blocks(q, s, x.dtype), x, (((0,), (1,)), ((), ()))).T,
    "a block, heads": lambda x, q, s: jnp.einsum("mk,khd->mhd", x, of_blocks(q, s, x.dtype).reshape(K, 4, -1)).reshape(
        -1, N
    ),
}


def operands(narrow, wide="bfloat16"):
    rng = np.random.default_rng(1)
    x, q = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((M, K), (K, N)))
    return jnp.asarray(x, wide), jnp.asarray(q).astype(narrow), jnp.asarray(2.0 ** rng.integers(-2, 3, N), "float32")


def check_same(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def exact(forms, x, q, s):
    return [f(x.astype("float32"), q, s).astype(x.dtype) for f in forms]


@pytest.mark.parametrize(("narrow", "wide"), [("int8", "bfloat16"), ("int4", "float32"), ("float8_e4m3fn", "bfloat16")])
def test_weights_stay_narrow(narrow, wide):
    forms = list(FORMS.values())
    x, q, s = operands(narrow, wide)
    run = jax.jit(lambda *args: [jaxmp.fuse(f)(*args) for f in forms])
    lowered = run.lower(x, q, s)
    check_same(run(x, q, s), exact(forms, x, q, s))
    assert not re.findall(DECODED, lowered.as_text())
    text = lowered.compile().as_text()  # equal calls are merged
    assert "jaxmp_matmul" in text
    assert not re.findall(r" dot\(", text)


@pytest.mark.parametrize("narrow", ["int8", "uint8", "int4", "float8_e4m3fn"])
def test_scales_of_blocks(narrow):
    """With few rows, blocks stay narrow; with many rows, or one order of sums, the program decodes the weights."""
    x, q, s = operands("int8")
    q = jnp.abs(q).astype(narrow) if narrow == "uint8" else q.astype(narrow)
    for rows, options in ((1, {}), (M, {}), (1, {"determinism": "batch"})):

        def run(x, q, s, options=options):
            return [jaxmp.fuse(f, **options)(x, q, s) for f in BLOCKS.values()]

        each, is_narrow = jax.jit(run), rows == 1 and not options
        check_same(each(x[:rows], q, s), exact(BLOCKS.values(), x[:rows], q, s))
        text = each.lower(x[:rows], q, s).as_text()
        assert ("jaxmp_grouped" in text, "jaxmp_matmul" in text) == (is_narrow, not is_narrow)


def test_blocks_inside_of_other_programs():
    x, q, s = operands("int8", "float32")
    x, form, ct = x[:1], BLOCKS["a block"], jnp.resize(s, (1, N))

    def programs(f):
        def loss(x, s):
            return jnp.sum(f(x, q, s) * ct)

        return [
            lambda x, q, s: jax.grad(loss, (0, 1))(x, s),
            lambda x, q, s: jax.grad(jax.checkpoint(loss), (0, 1))(x, s),
            lambda x, q, s: jax.vmap(f, (0, None, None))(jnp.stack([x, 2 * x]), q, s),
            lambda x, q, s: lax.scan(lambda x, _: (f(x, q, s)[:, :K], None), x, None, length=2)[0],
        ]

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = [(P(), P(None, "x"), P("x")), (P(None, "x"), P("x"), P()), (P(), P(), P())]
    on_mesh = [jax.jit(jaxmp.fuse(form), in_shardings=[NamedSharding(mesh, p) for p in each]) for each in specs]
    on_shards = jax.shard_map(jaxmp.fuse(form), mesh=mesh, in_specs=specs[0], out_specs=P(None, "x"))
    pairs = [*zip(programs(jaxmp.fuse(form)), programs(form), strict=True), *((run, form) for run in on_mesh)]
    pairs.append((on_shards, form))
    for ours, theirs in pairs:
        run = jax.jit(ours)
        assert "jaxmp_grouped" in run.lower(x, q, s).compile().as_text()
        check_same(jax.tree.leaves(run(x, q, s)), jax.tree.leaves(theirs(x, q, s)))


def test_gradients():
    """Gradients in x and in the scale, which JAX's rules sum in bfloat16: of the fused function, and of a fused
    backward pass."""
    x, q, s = operands("int8")
    ct = jnp.asarray(np.random.default_rng(2).integers(-2, 3, (M, N)), "float32")
    forms = [f for name, f in FORMS.items() if "row" not in name] + list(BLOCKS.values())

    def gradients(wrap_loss, wrap, x):
        return [
            wrap_loss(jax.grad(lambda x, s, f=f: jnp.sum(wrap(f)(x, q, s).astype("float32") * ct), (0, 1)))(x, s)
            for f in forms
        ]

    def same(f):
        return f

    wanted = gradients(same, same, x.astype("float32"))
    both = jax.jit(lambda x: (gradients(same, jaxmp.fuse, x), gradients(jaxmp.fuse, same, x)))
    assert not re.findall(rf"tensor<{K}x{N}xi8>\) -> tensor<{K}x{N}xbf16>", both.lower(x).as_text().split("@main")[0])
    for found in both(x):
        for (dx, ds), (dx_wanted, ds_wanted) in zip(found, wanted, strict=True):
            check_same([dx], [dx_wanted.astype(dx.dtype)])
            np.testing.assert_allclose(ds, ds_wanted, rtol=2**-5, atol=2**-5 * float(jnp.max(jnp.abs(ds_wanted))))


def test_loops_and_functions_called_twice():
    x, q, s = operands("int8")
    square, qs, ss = jnp.asarray(x[:, :K]), jnp.stack([q[:, :K]] * 2), jnp.stack([s[:K] / 4] * 2)

    def layer(x, q, s):
        return jnp.clip(jnp.round(x @ decode_columns(q, s.astype(x.dtype))), -3, 3)

    def programs(x):
        def stacked(step):
            return lax.scan(lambda x, w: (step(x, *w), None), x, (qs, ss))[0]

        once = jax.jit(layer)
        return [stacked(layer), stacked(jax.checkpoint(layer)), once(once(x, qs[0], ss[0]), qs[0], ss[0])]

    run = jax.jit(jaxmp.fuse(programs))
    check_same(run(square), [d.astype(x.dtype) for d in programs(square.astype("float32"))])
    assert not re.findall(r"convert .*tensor<16x16xi8>", run.lower(square).as_text())


def of_groups(decode):
    """Returns a product of groups of rows that decodes matrices (4, K, N) with scales (4, 2, N)."""
    return lambda x, q, s: lax.ragged_dot(x, decode(q, s, x.dtype), jnp.array([1, 0, 1, 0]))


GROUPS = {
    "no scale": of_groups(lambda q, s, dtype: q.astype(dtype)),
    "a column": of_groups(lambda q, s, dtype: decode(q, s[:, :1], dtype)),
    "a matrix": of_groups(lambda q, s, dtype: decode(q, s[:, :1, :1], dtype)),
    "the tensor": of_groups(lambda q, s, dtype: decode(q, s[0, 0, 0], dtype)),
    "a block": of_groups(lambda q, s, dtype: decode(q.reshape(4, 2, K // 2, N), s[:, :, None], dtype).reshape(4, K, N)),
    "stored (n, k)": of_groups(lambda q, s, dtype: decode(q.swapaxes(1, 2), s[:, 0, :, None], dtype).swapaxes(1, 2)),
}


@pytest.mark.parametrize("form", GROUPS)
def test_matrices_of_groups_stay_narrow(form):
    x, q, s = operands("int8", "float32")
    x, q, s = x[:2], jnp.stack([q, -q, 2 * q, q]), jnp.stack([jnp.stack([s, 2 * s]) * 2.0**i for i in range(4)])
    q = q.swapaxes(1, 2).reshape(q.shape) if "stored" in form else q
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    theirs = GROUPS[form]

    def both(f, x, q, s):
        return f(x, q, s), *jax.grad(lambda x, s: (f(x, q, s) ** 2).sum(), (0, 1))(x, s)

    wanted = both(theirs, x, q, s)
    for options in ({}, {} if "block" in form else {"determinism": "batch"}):
        run = jax.jit(functools.partial(both, jaxmp.fuse(theirs, **options)))
        check_same(run(x, q, s), wanted)
        text = jax.jit(jaxmp.fuse(theirs, **options)).lower(x, q, s).as_text()
        assert "jaxmp_grouped" in text
        assert not re.search(r"convert .*xi8>\) -> tensor<.*xf32>", text)
    placed = [jax.device_put(y, NamedSharding(mesh, P("x"))) for y in (x, q, s)]
    check_same([jax.jit(jaxmp.fuse(theirs))(*placed)], wanted[:1])


# Shardings of x, q, s and the result, on two devices.
SPLITS = {
    "columns": (P(), P(None, "x"), P("x"), P(None, "x")),
    "gathered rows": (P("x"), P(None, "x"), P("x"), P(None, "x")),
    "k, scattered": (P(None, "x"), P("x"), P(), P("x")),
    "k, summed": (P(None, "x"), P("x"), P(), P()),
}


@pytest.mark.parametrize("kind", ["explicit", "auto", "shard_map"])
def test_meshes(kind):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit if kind == "explicit" else AxisType.Auto,))
    x, q, s = operands("int8")
    form = FORMS["a column"]
    placed, runs = [], []
    for of_x, of_q, of_s, of_d in SPLITS.values():
        in_specs = tuple(NamedSharding(mesh, spec) for spec in (of_x, of_q, of_s))

        def local(x, q, s, of_x=of_x, of_d=of_d, of_q=of_q):
            x = lax.all_gather(x, "x", axis=0, tiled=True) if of_x == P("x") else x
            d = form(x, q, s)
            if of_q != P("x"):
                return d
            return lax.psum_scatter(d, "x", tiled=True) if of_d == P("x") else lax.psum(d, "x")

        def on_mesh(x, q, s, of_d=of_d):
            return jnp.matmul(x, decode(q, s, x.dtype), out_sharding=of_d)

        placed.append([jax.device_put(v, where) for v, where in zip((x, q, s), in_specs, strict=True)])
        if kind == "explicit":
            run = jaxmp.fuse(on_mesh)
        elif kind == "auto":
            run = jax.jit(jaxmp.fuse(form), in_shardings=in_specs, out_shardings=NamedSharding(mesh, of_d))
        else:
            run = jax.shard_map(jaxmp.fuse(local), mesh=mesh, in_specs=(of_x, of_q, of_s), out_specs=of_d)
        runs.append(run)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda operands: [f(*each) for f, each in zip(runs, operands, strict=True)])
        text = run.lower(placed).compile().as_text()
        check_same(run(placed), exact([form], x, q, s) * len(runs))
    assert text.count('custom_call_target="jaxmp_matmul') == len(runs)
    for name in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all"):
        assert f" {name}(" not in text


def test_scaled_weights_have_the_bits_of_one_device(mesh_of):
    """Scales that are no powers of two, so that it matters what is rounded."""
    x, q, s = (jnp.sin(v.astype(jnp.float32)) for v in operands("int8"))
    given = x.astype(jnp.bfloat16), jnp.round(100 * q).astype(jnp.int8), s
    for form in (FORMS["a column"], FORMS["a row of k"]):
        fused = jax.jit(jaxmp.fuse(form, determinism="topology"))
        wanted = fused(*given)
        with jax.set_mesh(mesh_of({"x": 2}, AxisType.Auto)):
            placed = [jax.device_put(v, spec) for v, spec in zip(given, (P("x"), P(), P()), strict=True)]
            check_same([fused(*placed)], [wanted])


def gradient(form):
    return jax.grad(lambda x, q, gather: form(x, q, gather).astype(jnp.float32).sum())


FIRST, LATER = lambda x, q, gather: x @ gather(q.astype(x.dtype)), lambda x, q, gather: x @ gather(q).astype(x.dtype)
# Programs that gather the weights q along k.
GATHERED = {
    "first a cast": FIRST,
    "later a cast": LATER,
    "a transpose": lambda x, q, gather: (gather(q.astype(x.dtype)).T @ x.T).T,
    "a scale of columns": lambda x, q, gather: (
        x @ gather(q.astype(x.dtype) * jnp.exp2(jnp.arange(N) % 3).astype(x.dtype))
    ),
    "a scale of the tensor": lambda x, q, gather: x @ gather((q.astype(jnp.float32) * 0.25).astype(x.dtype)),
    "a batch": lambda x, q, gather: jax.vmap(lambda q: FIRST(x, q, gather))(jnp.stack([q, -q]))[0],
    "two products": lambda x, q, gather: (lambda w: x @ w + -x @ w)(gather(q.astype(x.dtype))),
    "a gradient": gradient(FIRST),
    "a gradient, gathered again": gradient(
        lambda *given: jax.checkpoint(lambda x, q: FIRST(x, q, given[2]))(*given[:2])
    ),
}


@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
@pytest.mark.parametrize("narrow", ["int8", "float8_e4m3fn"])
def test_gathered_weights_cross_in_8_bits(kind, narrow):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit if kind == "explicit" else AxisType.Auto,))
    x, q, _ = operands(narrow)
    if kind == "explicit":
        gather = functools.partial(jax.sharding.reshard, out_shardings=P())
    else:
        gather = functools.partial(lax.all_gather, axis_name="x", tiled=True)

    def program(x, q):
        return [form(x, q, gather) for form in GATHERED.values()]

    wanted = [form(x, q, lambda w: w) for form in GATHERED.values()]
    if kind != "explicit":
        program = jax.shard_map(program, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(v, NamedSharding(mesh, P("x"))) for v in (x, q)]
        compiled = jax.jit(jaxmp.fuse(program, implementation="xla")).lower(*placed).compile()
        for d, exact in zip(compiled(*placed), wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(d, np.float32), np.asarray(exact, np.float32))
    types = re.findall(r" = (\w+)\[\S* all-gather\(", compiled.as_text())
    assert types
    assert set(types) <= {"u8", "s8"}
