"""`ragged_all_to_all` on CPU devices against slices that NumPy copies, exactly. Without these tests, rows could go to a
wrong rank or place, and cotangents could not come back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ragged import assert_same, integers

import jaxmp

RANKS, ROWS, SPACE = 2, 6, 8


def drawn(seed, per_rank=2):
    """Returns (input_offsets, send_sizes, output_offsets, recv_sizes), each for all ranks."""
    rng = np.random.default_rng(seed)
    send = rng.integers(0, 3, (RANKS, RANKS, per_rank))
    begin = rng.integers(0, ROWS - 2, send.shape)
    to = np.zeros_like(send)
    for receiver in range(RANKS):
        parts = send[:, receiver].reshape(-1)
        to[:, receiver] = (np.cumsum(parts) - parts).reshape(RANKS, per_rank)
    receive = send.swapaxes(0, 1)
    return [jnp.asarray(x.reshape(-1), jnp.int32) for x in (begin, send, to, receive)]


def theirs(x, into, begin, send, to, _):
    begin, send, to = (np.asarray(each).tolist() for each in (begin, send, to))
    slices = len(send) // RANKS**2
    for i, size in enumerate(send):
        sender, receiver = i // (RANKS * slices), i // slices % RANKS
        rows = x[sender * ROWS + begin[i] : sender * ROWS + begin[i] + size]
        into = into.at[receiver * SPACE + to[i] : receiver * SPACE + to[i] + size].set(rows)
    return into


def mesh_of(kind):
    return jax.make_mesh((RANKS,), ("p",), axis_types=(kind,), devices=jax.devices()[:RANKS])


def mapped(f, kind=AxisType.Auto):
    f = functools.partial(f, axis_name="p")
    return jax.shard_map(f, mesh=mesh_of(kind), in_specs=P("p"), out_specs=P("p"))


X, INTO = integers((RANKS * ROWS, 3)), integers((RANKS * SPACE, 3), 1)


@pytest.mark.parametrize("seed", range(2))
def test_values_derivatives_and_batches(seed):
    sizes, run = drawn(seed), mapped(jaxmp.ragged_all_to_all)

    def passes(f):
        d, pull = jax.vjp(lambda x, into: f(x, into, *sizes), X, INTO)
        _, tangent = jax.jvp(lambda x, into: f(x, into, *sizes), (X, INTO), (-X, 2 * INTO))
        batch = jax.vmap(lambda x: f(x, INTO, *sizes))(jnp.stack([X, -X]))
        return d, tangent, batch, *pull(integers(d.shape, 2))

    assert_same(jax.jit(functools.partial(passes, run))(), jax.jit(functools.partial(passes, theirs))())


@pytest.mark.parametrize(("rows", "space"), [(0, SPACE), (ROWS, 0), (0, 0)])
def test_no_rows_are_sent(rows, space):
    none = jnp.zeros(RANKS * RANKS, jnp.int32)
    run = mapped(lambda x, into, **options: jaxmp.ragged_all_to_all(x, into, *[none[:RANKS]] * 4, **options))
    x, into = X[: RANKS * rows], INTO[: RANKS * space]

    def passes(x, into):
        d, pull = jax.vjp(run, x, into)
        return d, *pull(d)

    assert_same(jax.jit(passes)(x, into), (into, jnp.zeros_like(x), into))


def test_fuse_takes_that_of_lax():
    """XLA has none on CPU devices. lax has wrong cotangents for rows that are sent twice, so each is sent once."""
    sizes = [jnp.array(x) for x in ([0, 1, 0, 3], [1, 2, 2, 1], [0, 0, 1, 2], [1, 2, 2, 1])]
    ct = integers(INTO.shape, 2)

    def pulled(f, x):
        return jax.value_and_grad(lambda x: (f(x, INTO, *sizes) * ct).sum())(x)

    fused = jaxmp.fuse(functools.partial(pulled, mapped(lax.ragged_all_to_all)))
    assert_same(jax.jit(fused)(X), jax.jit(functools.partial(pulled, theirs))(X))


S = jnp.array([1, 1])
ERRORS = {
    "shapes": ((X, INTO[:, :2], S, S, S, S), {}, ValueError, "operand and output may differ in their first"),
    "types": ((X, INTO.astype(int), S, S, S, S), {}, ValueError, r"got float32\(6, 3\) and int32\(8, 3\)"),
    "lengths": (
        (X, INTO, S, S, S, S[:1]),
        {},
        ValueError,
        r"one length, a multiple of the 2 ranks, .* recv_sizes \(1,\)",
    ),
    "ranks": ((X, INTO, *(jnp.ones(3, int),) * 4), {}, ValueError, "a multiple of the 2 ranks"),
    "integers": ((X, INTO, S, S, S, S / 1), {}, TypeError, "recv_sizes must be an array of integers"),
    "groups": ((X, INTO, S, S, S, S), {"axis_index_groups": [[0, 1]]}, NotImplementedError, "make the groups an axis"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case, standard_promotion):
    args, options, kind, message = ERRORS[case]

    def f(x, into):
        return jaxmp.ragged_all_to_all(x, into, *args[2:], axis_name="p", **options)

    with pytest.raises(kind, match=f"^ragged_all_to_all: .*{message}"):
        jax.shard_map(f, mesh=mesh_of(AxisType.Auto), in_specs=P("p"), out_specs=P("p"))(*args[:2])


def test_a_call_outside_of_shard_map_says_where_it_belongs():
    one = jnp.array([0])
    with pytest.raises(ValueError, match=r"^ragged_all_to_all: axis_name='p' names no axis here; call it inside"):
        jaxmp.ragged_all_to_all(jnp.ones(2), jnp.ones(2), one, one, one, one, axis_name="p")
