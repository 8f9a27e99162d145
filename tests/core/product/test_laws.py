"""The laws of docs/architecture.md that Python can see: plans are pure, operands are only read, bits do not change. A
kernel that reads C although beta is 0, writes into an operand's padding, or depends on the order of threads passes
every test of values; each would show months later as a training run that cannot be repeated."""

import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog

EXPLICIT = modes.BY_ID["explicit"]
ROUNDED = tuple(case.replace(per_shard=(17, 13, 29)) for case in cases.MATRIX)


def placed(mode, case, rng):
    a, b = (mode.put(case, x, s) for x, s in zip(case.values(rng), case.stored, strict=True))
    m, n, _ = case.extents
    return a, b, mode.put(case, cases.normal(rng, (m, n), case.dtype), case.out)


def bits(x):
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(x)]
    assert all(map(np.any, leaves)), "zeros have the same bits whatever computed them"
    return [leaf.tobytes() for leaf in leaves]


@pytest.mark.parametrize("case", cases.by_id(ROUNDED))
def test_a_gradient_recomputed_by_remat_has_the_same_bits(case, rng):
    with EXPLICIT.scope(case):
        a, b, w = placed(EXPLICIT, case, rng)
        f = EXPLICIT.product(case, epilog=Epilog.GELU)

        def gradients(f):
            return jax.jit(jax.grad(lambda a, b: jnp.sum(w * f(a, b)), (0, 1)))(a, b)

        assert bits(gradients(jax.checkpoint(f))) == bits(gradients(f))


@pytest.mark.small("values")
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("case", cases.by_id(ROUNDED))
def test_no_operand_is_written(case, implementation, rng):
    with EXPLICIT.scope(case):
        a, b, c = placed(EXPLICIT, case, rng)
        bias = EXPLICIT.put(case, cases.normal(rng, case.extents[1], case.dtype), P(case.out[1]))
        before = bits((a, b, c, bias))
        f = EXPLICIT.product(case, beta=0.5, epilog=Epilog.GELU_AUX_BIAS, implementation=implementation)
        jax.block_until_ready(EXPLICIT.run(f, a, b, c, bias))
    assert bits((a, b, c, bias)) == before


@pytest.mark.parametrize("case", cases.by_id(ROUNDED))
def test_results_do_not_depend_on_what_memory_held(case, rng):
    """Every byte of D and aux is written: runs over freed memory full of NaN give the same bits."""
    with EXPLICIT.scope(case):
        a, b, _ = placed(EXPLICIT, case, rng)
        program = jax.jit(EXPLICIT.product(case, epilog=Epilog.RELU_AUX))
        want = bits(program(a, b))
        for _ in range(3):
            waste = [EXPLICIT.put(case, np.full(case.extents[:2], np.nan, np.float32), case.out) for _ in range(8)]
            jax.block_until_ready(waste)
            del waste
            assert bits(program(a, b)) == want


def test_equal_calls_share_a_plan_and_a_second_step_hits(rng):
    """Example 01 promises this: all plans are made in the first step."""
    case = cases.BY_NAME["rs-data"].replace(per_shard=(3, 5, 7))
    jax.clear_caches()
    jaxmp.plan_cache_clear()
    info = jaxmp.plan_cache_info()
    assert info == {"hits": 0, "misses": 0, "size": 0, "capacity": info["capacity"]}
    with EXPLICIT.scope(case):
        a, b, w = placed(EXPLICIT, case, rng)
        f = EXPLICIT.product(case)
        step = jax.jit(jax.grad(lambda a, b: jnp.sum(w * f(a, b) ** 2), (0, 1)))
        jax.block_until_ready(step(a, b))
        first = jaxmp.plan_cache_info()
        assert first["misses"] == first["size"] == 3  # forward and two gradients
        for _ in range(3):
            jax.block_until_ready(step(a, b))
        assert jaxmp.plan_cache_info()["misses"] == 3
        jax.block_until_ready(jax.jit(lambda a, b: f(a, b) + 1)(a, b))  # another program, the same call
        after = jaxmp.plan_cache_info()
    assert after["misses"] == 3
    assert after["hits"] > first["hits"]


def test_a_cleared_cache_leaves_compiled_programs_running(rng):
    a, b = jnp.asarray(rng.standard_normal((9, 7)), jnp.float32), jnp.ones((7, 5))
    program = jax.jit(jaxmp.matmul)
    want = bits(program(a, b))
    jaxmp.plan_cache_clear()
    assert bits(program(a, b)) == want
    assert jaxmp.plan_cache_info()["size"] == 0
