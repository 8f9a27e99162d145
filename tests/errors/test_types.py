"""A product of any two types of JAX, weak ones too, raises where JAX raises, and elsewhere has JAX's type and value."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp

NAMES = ("bool", "int2", "int4", "int8", "int16", "int32", "uint2", "uint4", "uint8", "uint16", "uint32")
NAMES += ("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz")
NAMES += ("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16", "float16", "float32", "complex64")
WIDE = ("int64", "uint64", "float64", "complex128")
WEAK = ("int32", "bfloat16", "float32", "complex64")
BELOW_8_BITS = {"int2", "int4", "uint2", "uint4", "float4_e2m1fn"}
NN = (((1,), (0,)), ((), ()))


def of(module):
    """The products of a module by name."""
    lax_like = jaxmp if module is jaxmp else lax
    return {
        "matmul": module.matmul,
        "einsum": functools.partial(module.einsum, "ij,jk->ik"),
        "dot_general": lambda a, b, **options: lax_like.dot_general(a, b, NN, **options),
    }


@pytest.fixture(autouse=True)
def on_host():
    cases.require("host")


def preferred(dtype):
    return {} if dtype is None else {"preferred_element_type": dtype}


def types_of(product, combinations, types):
    """(dtype, whether it is weak) of each product, None where it raises; all in one trace, which takes least time."""
    found = []

    def trace(arrays):
        for a, b, out in combinations:
            try:
                d = product(arrays[a], arrays[b], **preferred(out))
                found.append((d.dtype.name, d.weak_type))
            except (TypeError, ValueError, NotImplementedError):
                found.append(None)

    jax.eval_shape(trace, types)
    return found


def check_types(name, wide, npreferred):
    names = NAMES + WIDE if wide else NAMES
    types = {name: jax.ShapeDtypeStruct((16, 16), name) for name in names}
    types |= {f"weak {name}": jax.ShapeDtypeStruct((16, 16), name, weak_type=True) for name in WEAK}
    combinations = []
    for i, (a, b) in enumerate(itertools.product(types, types)):  # with others of the types from pair to pair
        outs = (None, *(names[(7 * i + 5 * j) % len(names)] for j in range(npreferred)))
        combinations += [(a, b, out) for out in outs]
    want, got = (types_of(of(module)[name], combinations, types) for module in (jnp, jaxmp))
    wrong = [case for case in zip(combinations, want, got, strict=True) if case[1] != case[2]]
    assert not wrong, (len(wrong), wrong[:10])
    assert None in want  # there is something to refuse
    assert len(set(want)) > len(names)


@pytest.mark.parametrize("name", ["matmul", "einsum", "dot_general"])
def test_types_of_every_pair(name):
    with jax.numpy_dtype_promotion("standard"):
        check_types(name, wide=False, npreferred=1 if name == "einsum" else 2)


@pytest.mark.parametrize("name", ["matmul", "dot_general"])
def test_types_of_every_pair_under_strict_promotion(name):
    with jax.numpy_dtype_promotion("strict"):
        check_types(name, wide=False, npreferred=1)


def test_types_of_every_pair_of_sixty_four_bits():
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(True):
        check_types("dot_general", wide=True, npreferred=1)


# Values ----------------------------------------------------------------------------------------------------------


def is_compiled(a, b, out, dtype):
    """Whether XLA (JAX 0.10 to 0.12) compiles a product, and its result may be 0.

    It has none of 2 bits, and of fewer than 8 none into another type.
    """
    changes = out is not None and not BELOW_8_BITS.isdisjoint({out, a if a == b else out})
    return not changes and dtype not in ("int2", "uint2", "float8_e8m0fnu")


def test_values_of_pairs():
    """Some of the pairs, into their own type or another, in one program."""
    pairs = itertools.product(NAMES, NAMES)
    combinations = [(a, b, (None, *NAMES)[i % (1 + len(NAMES))]) for i, (a, b) in enumerate(pairs)][::5]
    types = {name: jax.ShapeDtypeStruct((4, 4), name) for name in NAMES}
    known = types_of(of(jnp)["dot_general"], combinations, types)
    combinations = [
        case for case, found in zip(combinations, known, strict=True) if found and is_compiled(*case, found[0])
    ]
    assert len(combinations) > 70
    bits = np.arange(16).reshape(4, 4) % 3 % 2
    x = {name: jnp.asarray(bits + (name == "float8_e8m0fnu")).astype(name) for name in NAMES}

    def run(product, x):
        return [product(x[a], x[b].T, **preferred(out)) for a, b, out in combinations]

    want, got = (jax.jit(functools.partial(run, of(module)["dot_general"]))(x) for module in (jnp, jaxmp))
    for case, w, g in zip(combinations, want, got, strict=True):
        w, g = (np.asarray(d).astype(np.complex64) for d in (w, g))
        np.testing.assert_array_equal(g, w, err_msg=str(case))
