"""A product of any two types of JAX, including weak ones, raises if JAX raises, and otherwise has JAX's type and value,
even if no kernel multiplies them. Results and cotangents have JAX's weak types."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

NAMES = ("bool", "int2", "int4", "int8", "int16", "int32", "uint2", "uint4", "uint8", "uint16", "uint32")
NAMES += ("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz")
NAMES += ("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16", "float16", "float32", "complex64")
WIDE = ("int64", "uint64", "float64", "complex128")
WEAK = ("int32", "bfloat16", "float32", "complex64")
BELOW_8_BITS = {"int2", "int4", "uint2", "uint4", "float4_e2m1fn"}
NN = (((1,), (0,)), ((), ()))


def of(module):
    """Returns the products of a module by name."""
    lax_like = jaxmp if module is jaxmp else lax
    return {
        "matmul": module.matmul,
        "einsum": functools.partial(module.einsum, "ij,jk->ik"),
        "dot_general": lambda a, b, **options: lax_like.dot_general(a, b, NN, **options),
    }


def preferred(dtype):
    return {} if dtype is None else {"preferred_element_type": dtype}


def types_of(product, combinations, types):
    """Returns (dtype, whether it is weak) or the error's type of each product, from a single trace to save time."""
    found = []

    def trace(arrays):
        for a, b, out in combinations:
            try:
                d = product(arrays[a], arrays[b], **preferred(out))
                found.append((d.dtype.name, d.weak_type))
            except (TypeError, ValueError, NotImplementedError) as error:
                found.append(type(error))

    jax.eval_shape(trace, types)
    return found


def agrees(want, got):
    """True if the types are equal, or if code that catches JAX's error also catches ours."""
    return want == got or (isinstance(want, type) and isinstance(got, type) and issubclass(got, want))


PAIRS = [("matmul", "standard", 2), ("einsum", "standard", 1), ("dot_general", "standard", 2)]
PAIRS += [("matmul", "strict", 1), ("dot_general", "strict", 1), ("dot_general", "64 bits", 1)]


@pytest.mark.parametrize(("name", "rules", "npreferred"), PAIRS)
def test_types_of_every_pair(name, rules, npreferred):
    is_wide = rules == "64 bits"
    names = NAMES + WIDE if is_wide else NAMES
    with jax.numpy_dtype_promotion("standard" if is_wide else rules), jax.enable_x64(is_wide):
        types = {each: jax.ShapeDtypeStruct((16, 16), each) for each in names}
        types |= {f"weak {each}": jax.ShapeDtypeStruct((16, 16), each, weak_type=True) for each in WEAK}
        combinations = []
        for i, (a, b) in enumerate(itertools.product(types, types)):  # the requested types change from pair to pair
            outs = (None, *(names[(7 * i + 5 * j) % len(names)] for j in range(npreferred)))
            combinations += [(a, b, out) for out in outs]
        want, got = (types_of(of(module)[name], combinations, types) for module in (jnp, jaxmp))
    wrong = [case for case in zip(combinations, want, got, strict=True) if not agrees(*case[1:])]
    assert not wrong, (len(wrong), wrong[:10])
    assert any(isinstance(x, type) for x in want)  # some pairs are refused
    assert len(set(want)) > len(names)


A, B = np.ones((4, 6), np.float32), np.ones((6, 5), np.float32)
WRONG_OPERANDS = [(A, A), (A, A[0, :3]), (A, 1.0), (2, B), (A[0, 0], B), (A, None), ("a", B), ({}, B), (A, [[1.0]])]
WRONG_OPERANDS += [(jax.random.key(0), B), (A[None], B[None, :5]), (A[:, :0], B), (A.astype(object), B), (jnp.sin, B)]
WRONG_NUMBERS = [((2,), (0,), (), ()), ((1,), (1,), (), ()), ((1,), (0, 1), (), ()), ((1, 1), (0, 0), (), ())]
WRONG_NUMBERS += [((1,), (0,), (0,), ()), ((1,), (0,), (1,), (0,)), (("a",), (0,), (), ()), ((1,), (0,), (2,), (2,))]


@pytest.mark.parametrize("name", ["matmul", "einsum", "dot_general"])
def test_errors_are_caught_as_those_of_jax(name, mesh_of):
    ours, theirs = of(jaxmp)[name], of(jnp)[name]
    for operands in WRONG_OPERANDS:
        assert_same_error(lambda: ours(*operands), lambda: theirs(*operands))  # noqa: B023
    unknown = lax.DotAlgorithm(np.float32, np.float16, np.float32)
    for options in ({"precision": unknown}, {"precision": 3}, {"preferred_element_type": object()}, {"foo": 1}):
        assert_same_error(lambda: ours(A, B, **options), lambda: theirs(A, B, **options))  # noqa: B023
    with jax.set_mesh(mesh_of({"x": 4})):
        x, w = jax.device_put(np.ones((8, 8)), P(None, "x")), jax.device_put(np.ones((8, 8)), P("x", None))
        assert_same_error(lambda: ours(x, w), lambda: theirs(x, w))  # the contraction is sharded
        assert_same_error(lambda: ours(w, x), lambda: theirs(w, x))  # rows and columns over one axis
        with pytest.raises(ValueError, match="axis 'x' for two dimensions"):
            ours(w, w, out_sharding=P("x", "x"))


def test_dimension_numbers_are_read_as_by_jax():
    for lhs_contract, rhs_contract, lhs_batch, rhs_batch in WRONG_NUMBERS:
        numbers = (lhs_contract, rhs_contract), (lhs_batch, rhs_batch)
        assert_same_error(lambda: jaxmp.dot_general(A, B, numbers), lambda: lax.dot_general(A, B, numbers))  # noqa: B023
    np.testing.assert_array_equal(jaxmp.dot_general(A, B, ((1, 0), ((), ()))), A @ B)
    np.testing.assert_array_equal(jaxmp.dot_general(A, B, None), A @ B)
    np.testing.assert_array_equal(jaxmp.einsum("ij,jk,kl", A, B, B.T, optimize=None), A @ B @ B.T)


W, SIZES = np.ones((2, 6, 5), np.float32), np.array([1, 3])
WRONG_GROUPS = [(A[0], W, SIZES), (A, W[0], SIZES), (A[:, :3], W, SIZES), (A, W, SIZES[:1]), (A, W, SIZES[0])]
WRONG_GROUPS += [(jax.random.key(0), W, SIZES), (A, jax.random.split(jax.random.key(0), 2), SIZES), (2, W, SIZES)]


def test_errors_of_groups_are_caught_as_those_of_jax():
    for operands in WRONG_GROUPS:
        assert_same_error(lambda: jaxmp.ragged_dot(*operands), lambda: lax.ragged_dot(*operands))  # noqa: B023


def test_keys_of_random_numbers_are_refused_by_name():
    for layer in (lambda k: jaxmp.linear(A, B, k[0, 0]), lambda k: jaxmp.mlp(A, k, None, B, None, activation="relu")):
        with pytest.raises(TypeError, match="must be an array of numbers, got dtype key"):
            layer(jax.random.split(jax.random.key(0), (6, 4)))


def assert_same_error(ours, theirs):
    with pytest.raises(Exception) as want:  # noqa: PT011
        theirs()
    with pytest.raises(type(want.value)):
        ours()


def is_compiled(a, b, out, dtype):
    """True if XLA (JAX 0.10 to 0.12) compiles a product and its result can be 0. XLA lacks products with 2-bit results,
    and products of types below 8 bits with a result of another type."""
    changes = out is not None and not BELOW_8_BITS.isdisjoint({out, a if a == b else out})
    return not changes and dtype not in ("int2", "uint2", "float8_e8m0fnu")


USED = ("bool", "int8", "uint8", "int16", "int32", "uint32", "float8_e4m3fn", "float8_e5m2")
USED += ("bfloat16", "float16", "float32", "complex64")
MIXED = (("int32", "float32"), ("bool", "bfloat16"), ("int8", "float32"), ("int8", "uint8"), ("bfloat16", "float16"))


def test_values_of_pairs(standard_promotion):
    some = [(a, b, (None, *NAMES)[i % (1 + len(NAMES))]) for i, (a, b) in enumerate(itertools.product(NAMES, NAMES))]
    combinations = [(a, a, out) for i, a in enumerate(USED) for out in (None, *USED[i % 2 :: 2])]
    combinations += [*((*pair, None) for pair in MIXED), *some[::10]]
    types = {name: jax.ShapeDtypeStruct((4, 4), name) for name in NAMES}
    known = types_of(jnp.matmul, combinations, types)
    combinations = [
        case
        for case, found in zip(combinations, known, strict=True)
        if not isinstance(found, type) and is_compiled(*case, found[0])
    ]
    assert len(combinations) > 100
    bits = np.arange(16).reshape(4, 4) % 3 % 2
    x = {name: jnp.asarray(bits + (name == "float8_e8m0fnu")).astype(name) for name in NAMES}

    def transposed(product):
        """Wraps a product so that b is stored transposed, as kernels of float8 need."""
        return lambda a, b, **options: product(a, b, transpose_b=True, **options)

    forms = {
        "jnp": [lambda a, b, **options: jnp.matmul(a, b.T, **options)],
        "jaxmp": [transposed(jaxmp.matmul), lambda a, b, **options: jaxmp.matmul(a, b.T, **options)],
    }

    def run(products, x):
        return [products[i % len(products)](x[a], x[b], **preferred(out)) for i, (a, b, out) in enumerate(combinations)]

    want, got = (jax.jit(functools.partial(run, forms[name]))(x) for name in forms)
    for case, w, g in zip(combinations, want, got, strict=True):
        assert (w.dtype, w.shape) == (g.dtype, g.shape), case
        w, g = (np.asarray(d).astype(np.complex64) for d in (w, g))
        np.testing.assert_array_equal(g, w, err_msg=str(case))


@pytest.mark.parametrize("activation", [None, "relu"])
def test_biases_of_integers_are_added_as_jax_adds_them(activation, rng, standard_promotion):
    """Sums of int8 wrap around before the activation; a bias that the result does not hold is not truncated."""
    x, w = (jnp.asarray(rng.integers(-128, 128, (4, 4)), jnp.int8) for _ in range(2))
    act = jax.nn.relu if activation else lambda y: y
    np.testing.assert_array_equal(jaxmp.linear(x, w, activation=activation), act(x @ w))
    for dtype in ("int8", "bool", "uint8", "int16", "int32"):
        bias = jnp.asarray([0, 1, 1, 0] if dtype == "bool" else [100, 101, 127, 3], dtype)
        got, want = jaxmp.linear(x, w, bias, activation=activation), act(x @ w + bias[None])
        assert got.dtype == want.dtype
        if want.dtype == np.int8:
            np.testing.assert_array_equal(got, want)
        else:  # the unwrapped sums
            sums = x.astype("int32") @ w.astype("int32")
            np.testing.assert_array_equal(got, act(sums + bias[None]).astype(want.dtype))
    four = x.astype(jnp.int4)
    assert_same_error(lambda: jaxmp.linear(four, four, x[0], activation=activation), lambda: four @ four + x)
    with pytest.raises(TypeError, match="bias has dtype float8_e4m3fn but the result has dtype int32"):
        jaxmp.linear(x, w, jnp.ones(4, jnp.float8_e4m3fn), activation=activation)


def test_a_sum_is_rounded_once_to_the_requested_type(rng):
    a, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((8, 64), (64, 8)))
    want = jnp.asarray(np.asarray(a, np.float64) @ np.asarray(b, np.float64), jnp.bfloat16)
    got = jaxmp.matmul(a, b, preferred_element_type="bfloat16")
    assert np.mean(np.asarray(got != want)) < 0.05  # differs only by double rounding
    with jax.enable_x64(True):
        wide = jaxmp.matmul(a, b, preferred_element_type="float64")
        exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
        assert wide.dtype == np.float64
        np.testing.assert_allclose(wide, exact, rtol=1e-13, atol=1e-13)
        both = jaxmp.matmul(a, b, preferred_element_type="complex128")
        np.testing.assert_allclose(both, exact, rtol=1e-13, atol=1e-13)


def test_the_other_options_apply(rng):
    """Epilogs with further results, levels and c apply before the result is converted."""
    a, b = (jnp.asarray(rng.integers(-2, 3, (8, 8)), jnp.float32) for _ in range(2))
    bias = jnp.arange(8, dtype=jnp.float32)
    row = bias[None]
    epilog = {"epilog": jaxmp.Epilog.GELU_AUX_BIAS, "epilog_inputs": {"bias": bias}}
    d, more = jaxmp.matmul(a, b, **epilog, preferred_element_type="float16")
    assert (d.dtype, more["gelu_aux"].dtype) == (np.float16, np.float32)
    np.testing.assert_array_equal(more["gelu_aux"], a @ b + row)
    d = jaxmp.matmul(a, b, row + a * 0, beta=2.0, determinism="topology", preferred_element_type="float16")
    np.testing.assert_array_equal(d, (a @ b + 2 * row).astype("float16"))
    d = jaxmp.linear(a, b, bias, activation="silu", preferred_element_type="bfloat16")
    np.testing.assert_allclose(d.astype("float32"), jax.nn.silu(a @ b + row), rtol=1e-2)
    grad = jax.grad(lambda a: jaxmp.matmul(a, b, preferred_element_type="float16").astype("float32").sum())(a)
    assert grad.dtype == np.float32
    np.testing.assert_array_equal(grad, jnp.ones((8, 8)) @ b.T)


@pytest.mark.parametrize("out", ["bfloat16", "int32"])
def test_conversions_on_meshes(out, mesh_of):
    mesh = mesh_of({"x": 4})
    a, b = (np.random.default_rng(0).integers(0, 2, shape).astype(np.float32) for shape in ((8, 16), (16, 8)))
    with jax.set_mesh(mesh):
        x, y = jax.device_put(a, P(None, "x")), jax.device_put(b, P("x", None))
        d = jax.jit(lambda x, y: jaxmp.matmul(x, y, out_sharding=P("x", None), preferred_element_type=out))(x, y)
        local = functools.partial(jaxmp.matmul_reduce_scatter, axis_name="x", preferred_element_type=out)
        specs = {"in_specs": (P(None, "x"), P("x", None)), "out_specs": P("x", None)}
        by_hand = jax.jit(jax.shard_map(local, **specs))(x, y)
    assert d.sharding == NamedSharding(mesh, P("x", None))
    np.testing.assert_array_equal(np.asarray(d), np.asarray(by_hand))
    np.testing.assert_array_equal(np.asarray(d), np.asarray(jnp.matmul(a, b, preferred_element_type=out)))


def weak(dtype=jnp.float32, shape=(8, 8)):
    x = lax.full(shape, 1.0 if jnp.issubdtype(dtype, jnp.floating) else 1)
    return x if x.dtype == dtype else jax.jit(lambda: lax.full(shape, 1).astype(dtype) * 1)()


def type_of(x):
    return x.dtype.name, x.weak_type


# Functions of a module's products and two arrays, some with options.
PRODUCTS = {
    "matmul": lambda m, a, b, **options: m.matmul(a, b, **options),
    "vectors": lambda m, a, b, **options: m.matmul(a[0], b[:, 0], **options),
    "batches": lambda m, a, b: m.matmul(jnp.stack([a, a]), jnp.stack([b, b])),
    "einsum": lambda m, a, b, **options: m.einsum("ij,jk->ki", a, b, **options),
    "transpose": lambda m, a, b, **options: m.einsum("ij->ji", a, **options),
    "sum": lambda m, a, b: m.einsum("ij->j", a, preferred_element_type="bfloat16"),
    "sums": lambda m, a, b: m.einsum("ij,kl->il", a, b),
    "three": lambda m, a, b, **options: m.einsum("ij,jk,kl->il", a, b, a, **options),
    "numbers": lambda m, a, b: m.einsum(",ij->ij", 2.0, a),
    "dot_general": lambda m, a, b, **options: of(m)["dot_general"](a, b, **options),
    "linear": lambda m, a, b, **options: (jaxmp.linear if m is jaxmp else m.matmul)(a, b, **options),
    "bias": lambda m, a, b: jaxmp.linear(a, b, b[0]) if m is jaxmp else a @ b + b[:1],
    "bias of bfloat16": lambda m, a, b: (
        jaxmp.linear(a, b, b[0].astype("bfloat16")) if m is jaxmp else a @ b + b[:1].astype("bfloat16")
    ),
    "bias that gives way": lambda m, a, b: (
        jaxmp.linear(_half(a), _half(b), a[0]) if m is jaxmp else _half(a) @ _half(b) + a[:1]
    ),
    "fuse": lambda m, a, b: jaxmp.fuse(lambda a, b: (a @ b, a @ a * 2.0))(a, b)[0] if m is jaxmp else a @ b,
}
PRODUCTS["float32"] = functools.partial(PRODUCTS["matmul"], preferred_element_type="float32")
PRODUCTS["dot_general to bfloat16"] = functools.partial(PRODUCTS["dot_general"], preferred_element_type="bfloat16")


def _half(x):
    return x.astype("bfloat16")


OPERANDS = {
    "weak": (True, True),
    "first": (True, False),
    "second": (False, True),
    "with bfloat16": (True, jnp.bfloat16),
    "with int8": (True, jnp.int8),
}


def operand(kind):
    return weak() if kind is True else jnp.ones((8, 8), kind or jnp.float32)


@pytest.mark.parametrize("kinds", OPERANDS.values(), ids=OPERANDS)
def test_results_and_cotangents_are_as_weak_as_those_of_jax(kinds, standard_promotion):
    def types(module):
        found = {}

        def trace(a, b, name):
            f = functools.partial(PRODUCTS[name], module)
            d, backward = jax.vjp(lambda a: f(a, b), a)
            mapped = jax.vmap(f)(jnp.stack([a, a]), jnp.stack([b, b]))
            tangent = jax.jvp(lambda a: f(a, b), (a,), (a,))[1]
            found[name] = [type_of(x) for x in (f(a, b), jax.jit(f)(a, b), mapped, d, tangent, *backward(d))]

        for name in PRODUCTS:
            if name != "bias of bfloat16" or kinds == (True, True):  # no bias narrows a strongly typed product
                jax.eval_shape(functools.partial(trace, name=name), *map(operand, kinds))
        return found

    assert types(jaxmp) == types(jnp)


def test_values_and_types_of_eager_calls():
    a, h = weak(), jnp.ones((8, 8), jnp.bfloat16)
    for name in ("matmul", "einsum", "dot_general", "linear", "fuse"):
        for d in (PRODUCTS[name](jaxmp, a, a), PRODUCTS[name](jaxmp, a, a)):  # also from the cache of eager calls
            assert type_of(d) == ("float32", True)
            np.testing.assert_array_equal(d, np.full((8, 8), 8.0))
            assert (d * h).dtype == jnp.bfloat16
    fused = jaxmp.fuse(lambda a, h: (a @ a) * h)
    assert fused(a, h).dtype == jax.jit(fused)(a, h).dtype == jnp.bfloat16


def test_weak_types_on_meshes(mesh_of):
    with jax.set_mesh(mesh_of({"x": 4})):
        a, b = (_weakened(jax.device_put(jnp.ones((8, 8)), spec)) for spec in SPECS)
        for out in (P(None, None), P("x", None)):
            f = functools.partial(jaxmp.matmul, out_sharding=out)
            gradients = jax.grad(lambda a, b, f=f: f(a, b).sum(), (0, 1))(a, b)
            for d in (f(a, b), jax.jit(f)(a, b), *gradients):
                assert type_of(d) == ("float32", True)
        by_jaxmp = functools.partial(jaxmp.matmul_reduce_scatter, axis_name="x")
        for local in (by_jaxmp, lambda a, b: lax.psum_scatter(a @ b, "x", tiled=True)):
            d = jax.jit(jax.shard_map(local, in_specs=SPECS, out_specs=P("x", None)))(a, b)
            assert type_of(d) == ("float32", True)


def test_layers_of_weak_operands_have_a_strong_type(mesh_of, standard_promotion):
    """The type is the same on any mesh. A weak x gives way to the weights, as in `linear`."""
    x, narrow = _weakened(jnp.ones((8, 8))), jnp.ones((8, 8), "bfloat16")
    layers = lambda x, w: jaxmp.mlp(x, w, None, w, None, activation="relu"), lambda x, w: jaxmp.gated_mlp(x, w, w, w)
    for mesh, layer, w in itertools.product((None, mesh_of({"x": 4})), layers, (x, narrow)):
        with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
            y, pull = jax.vjp(lambda x, f=layer, w=w: f(x, w), x)
            assert type_of(y) == (w.dtype.name, False)
            assert pull(y)[0].dtype == np.float32


SPECS = (P(None, "x"), P("x", None))


def _weakened(x):
    bind = lax.convert_element_type_p.bind
    return jax.jit(lambda x: bind(x, new_dtype=x.dtype, weak_type=True, sharding=None))(x)


def test_a_weak_integer_does_not_become_narrower():
    """`jnp.matmul` also promotes int32 to int16, and has no such product."""
    a, b = jnp.ones((2, 2), jnp.int16), jnp.full((2, 2), 1)
    for multiply in (jaxmp.matmul, functools.partial(jaxmp.einsum, "ij,jk")):
        with pytest.raises(
            NotImplementedError, match=r"operands of dtype int16 \(a int16, b int32\) are not supported"
        ):
            multiply(a, b)
        with pytest.raises(TypeError):
            jnp.matmul(a, b)


@pytest.fixture(params=["allow", "error", "warn"])
def explicit_x64(request):
    before = jax.config.jax_explicit_x64_dtypes
    jax.config.update("jax_explicit_x64_dtypes", request.param)
    yield request.param
    jax.config.update("jax_explicit_x64_dtypes", before)


@pytest.mark.parametrize("wide", ["float64", "complex128"])
def test_explicit_types_of_64_bits(explicit_x64, wide):
    a = jnp.ones((3, 3))
    for name in ("matmul", "vectors", "einsum", "transpose", "three", "dot_general", "linear"):
        for module in (jnp, jaxmp):
            multiply = functools.partial(PRODUCTS[name], module, a, a, preferred_element_type=wide)
            wanted = f"Explicitly requested dtype {wide}"
            if explicit_x64 == "error":
                with pytest.raises(ValueError, match=wanted):
                    multiply()
                continue
            if explicit_x64 == "warn":
                jax.clear_caches()
            with pytest.warns(UserWarning, match=wanted) if explicit_x64 == "warn" else contextlib.nullcontext():
                d = multiply()
            is_wide = explicit_x64 == "allow"
            assert d.dtype == (wide if is_wide else {"float64": "float32", "complex128": "complex64"}[wide]), name
            np.testing.assert_array_equal(d, np.full(d.shape, {"three": 9, "transpose": 1}.get(name, 3)))
