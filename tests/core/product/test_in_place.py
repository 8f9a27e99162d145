"""A donated C becomes D: no second matrix, no copy, and the same bits as without donation. Without these tests, a rank
could overwrite C before a peer has read it, or C could be added after D is written."""

import re

import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
from compiled import compiled_text

import jaxmp
from jaxmp import Epilog

EXPLICIT = modes.BY_ID["explicit"]
PATTERNS = [cases.BY_NAME[name] for name in ("local", "ag-data", "rs-data", "ar-data", "ar", "grid", "grid-2x4")]


def copies_of(text):
    """Returns the copies that are operations of their own in the entry computation."""
    entry = text[text.index("\nENTRY ") :]
    return re.findall(r" (?:copy|copy-start)\(", entry[: entry.index("\n}")])


def operands_of(case, rng):
    arrays = (*case.values(rng), cases.normal(rng, case.extents[:2], case.dtype))
    specs = (*case.stored, case.out)
    return lambda: [EXPLICIT.put(case, x, spec) for x, spec in zip(arrays, specs, strict=True)]


@pytest.mark.small("values")
@pytest.mark.parametrize("epilog", [Epilog.NONE, Epilog.GELU], ids=lambda epilog: epilog.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", cases.by_id(PATTERNS))
def test_a_donated_c_is_updated_in_place(case, dtype, epilog, rng):
    case = case.replace(per_shard=(13, 9, 7), dtype=dtype)
    fresh = operands_of(case, rng)
    f = EXPLICIT.product(case, alpha=-0.5, beta=1.5, epilog=epilog)
    with EXPLICIT.scope(case):
        want = np.asarray(jax.jit(f)(*fresh()))
        donating = jax.jit(f, donate_argnums=2)
        a, b, c = fresh()
        text = donating.lower(a, b, c).compile().as_text()
        got = donating(a, b, c)
    assert c.is_deleted()
    assert re.search(r"input_output_alias=\{ \{\}: \(2, \{\}, (?:may|must)-alias\)", text)
    assert not copies_of(text)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want.view(np.uint8))


def test_a_c_that_the_program_made_is_updated_in_place(rng):
    x = jnp.asarray(rng.standard_normal((16, 16)).astype(np.float32))
    assert not copies_of(compiled_text(lambda x: jaxmp.matmul(x, x, x * x, beta=1.0), x))


def test_a_sum_of_products_in_a_loop_has_one_matrix(rng):
    """Gradient accumulation: the loop's carry is both C and D."""
    a = rng.integers(-3, 4, (5, 16, 16)).astype(np.float32)

    def accumulated(a, total):
        return jax.lax.scan(lambda c, a: (jaxmp.matmul(a, a, c, beta=1.0), None), total, a)[0]

    start = jnp.zeros((16, 16))
    text = jax.jit(accumulated, donate_argnums=1).lower(a, start).compile().as_text()
    bodies = [part for part in text.split("\n\n") if "custom_call_target" in part]
    assert len(bodies) == 1
    assert not re.findall(r"f32\[16,16\]\S* copy\(", bodies[0])
    np.testing.assert_array_equal(np.asarray(jax.jit(accumulated)(a, start)), sum(x @ x for x in a))


def test_beta_zero_reads_and_copies_no_c():
    a, c = jnp.ones((4, 4)), jnp.full((4, 4), jnp.nan)
    f = jax.jit(lambda a, c: jaxmp.matmul(a, a, c, beta=0.0))
    assert "output_to_operand_aliasing" not in f.lower(a, c).compile().as_text()
    np.testing.assert_array_equal(np.asarray(f(a, c)), np.full((4, 4), 4.0))
