"""The products of the one-process tests, on four devices of several processes. Run by `ranks.py products`."""

from __future__ import annotations

import collections
import functools
import itertools
import re

import bounds
import cases
import chaos
import jax
import jax.numpy as jnp
import modes
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from shards import compare

import jaxmp
from jaxmp import BlockCyclic, Epilog, Scaling
from jaxmp.testing import assert_bitwise_equal

RAN: collections.Counter = collections.Counter()
FOUR = [case for case in cases.CASES if case.ndevices == 4]
ONE_OF_EACH = [case for case in FOUR if case.name in ("ag-data", "rs-data", "ar-data", "grid")]


# The others are what the gradients of these are made of, and run in `gradients_of_a_layer`.
FORWARD_EPILOGS = [epilog for epilog in cases.EPILOGS[1:] if not epilog.name.startswith(("D", "BGRAD"))]


def main(initialize, process):
    initialize()
    assert jax.device_count() == 4
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        everything()
    print("RAN", dict(RAN))


def everything():
    for case in FOUR:
        placed(case, "explicit")
    for case in ONE_OF_EACH:
        for transposition in ("NT", "TN", "TT"):
            placed(case.replace(transposition=transposition, per_shard=(1, 2, 3)), "explicit")
            times_scales(case.replace(transposition=transposition, per_shard=(2, 3, 5)))
        placed(case, "in_shardings")
        placed(case, "partitioner")
        placed(case, "shard_map")
        placed(case, "explicit-eager")
        placed(case, "explicit", implementation="xla")
        rounded(case, "bfloat16")
        rounded(case, "float16")
        rounded(case.replace(conjugation=(True, True)), "complex64")
        transformed(case)
        empty(case)
    for epilog in FORWARD_EPILOGS:
        for case in ONE_OF_EACH[:3] if epilog in (Epilog.RELU, Epilog.GELU_AUX_BIAS) else ONE_OF_EACH[:1]:
            with_epilog(case, epilog)
        for dtype in ("float32", "bfloat16"):
            has_the_bits_of_one_device(case.replace(dtype=dtype))
    operands_that_move()
    narrow_batches()
    batches_at_a_level()
    narrow_weights()
    block_cyclic()
    gradients_of_a_layer()
    every_collective_is_behind_a_barrier()
    says_where_each_group_lives()


def operands(case, mode, a, b):
    return [mode.put(case, x, spec) for x, spec in zip((a, b), case.stored, strict=True)]


def placed(case, mode_id, **options):
    """Small integers: exact, so every element has to be where it belongs."""
    mode = modes.BY_ID[mode_id]
    if not mode.serves(case):
        return
    a, b = case.integers(np.random.default_rng(0))
    with mode.scope(case):
        got = mode.run(mode.product(case, **options), *operands(case, mode, a, b))
        compare(got, np.matmul(*case.op(a, b)))
    RAN[f"placed {mode_id}"] += 1


def times_scales(case):
    """int8, with exact sums over processes, times the scales of the rows and columns that each process holds."""
    rng, mode, (m, n, _) = np.random.default_rng(9), modes.BY_ID["explicit"], case.extents
    a, b = (rng.integers(-128, 128, x.shape, np.int8) for x in case.integers(rng))
    s, t = (np.exp2(rng.integers(-2, 3, rows)).astype(np.float32) for rows in (m, n))
    op_a, op_b = (x.astype(np.int32) for x in case.op(a, b))
    outer = case.stored[0][case.transposition[0] == "T"], case.stored[1][case.transposition[1] == "N"]
    for options in ({}, {"determinism": "topology"}, {"implementation": "xla"}):
        with mode.scope(case):
            placed = [cases.put(x, case.jax_mesh(), P(dim)) for x, dim in zip((s, t), outer, strict=True)]
            got = jax.jit(
                lambda a, b, s, t, options=options: mode.product(case, scaling=Scaling(a=s, b=t), **options)(a, b)
            )(*operands(case, mode, a, b), *placed)
            compare(got, (op_a @ op_b).astype(np.float32) * s[:, None] * t)
        RAN["times scales"] += 1


def operands_that_move():
    """Shardings that no pattern serves: an operand is gathered or moved, or the result is, and so are the gradients."""
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((8, 16), (16, 12)))
    d = a @ b
    for kind in (AxisType.Explicit, AxisType.Auto):
        mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
        for specs, out in (
            ((P("x", None), P("x", None)), P("x", None)),
            ((P("x", None), P("x", "y")), P("x", "y")),
            ((P(None, "x"), P("y", None)), P("y", "x")),
            ((P("x", "y"), P(("x", "y"), None)), P(None, "x")),
        ):
            given = {} if kind == AxisType.Explicit else {"in_shardings": specs, "mesh": mesh}

            def loss(a, b, out=out, given=given):
                d = jaxmp.matmul(a, b, out_sharding=out, **given)
                return (d * d).sum(), d

            with jax.set_mesh(mesh):
                placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((a, b), specs, strict=True)]
                (_, got), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*placed)
            for x, want in zip((got, *gradients), (d, 2 * d @ b.T, a.T @ (2 * d)), strict=True):
                compare(x, want)
            RAN["moved"] += 1


def narrow_batches():
    """A batch of a narrow type is one call of groups on each device, also inside a user's shard_map."""
    rng, spec = np.random.default_rng(8), P(("x", "y"), None, None)
    a, b = (rng.integers(-3, 4, shape) for shape in ((4, 3, 5), (4, 5, 2)))
    for kind, dtype in itertools.product((AxisType.Explicit, AxisType.Auto), ("bfloat16", "int8")):
        mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
        product = functools.partial(jaxmp.einsum, "bik,bkj->bij")
        with jax.set_mesh(mesh):
            operands = [cases.put(x.astype(jnp.dtype(dtype)), mesh, spec) for x in (a, b)]
            for each in (product, jax.shard_map(product, in_specs=spec, out_specs=spec)):
                compare(jax.jit(each)(*operands), (a @ b).astype(jnp.dtype(dtype)))
                RAN["narrow batches"] += 1


def batches_at_a_level():
    """A batch at a level is a loop of local calls without a collective: XLA does not order collectives of loops."""
    rng, mesh = np.random.default_rng(7), jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    a, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((3, 6, 8), (3, 8, 10)))
    operands = cases.put(a, mesh, P(None, "x", "y")), cases.put(b, mesh, P(None, "y"))
    product = functools.partial(jnp.einsum, "eik,ekj->eij")
    compiled = jax.jit(jaxmp.fuse(product, determinism="topology")).lower(*operands).compile()
    compare(compiled(*operands), a @ b)
    loops, entry = compiled.as_text().split("ENTRY")
    assert " while(" in entry
    assert " all-gather(" not in loops
    RAN["batches at a level"] += 1


def narrow_weights():
    """Weights that are gathered in 8 bits: narrow ones as they are stored, at a level too, and wide ones rounded."""
    rng, mesh = np.random.default_rng(9), jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    x, q = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((8, 24), (24, 20)))
    q[:, ::5] = q[::6] = 127  # so that no number is rounded
    options = {"comm": jaxmp.CommOptions(weights="int8", gradients="bfloat16"), "out_sharding": P("x")}

    def gathered(x, q):
        return x @ jax.sharding.reshard(q.astype(jnp.float32), P())

    def both(x, w):
        d, pull = jax.vjp(functools.partial(jaxmp.matmul, **options), x, w)
        return d, pull(x[:, :20])

    with jax.set_mesh(mesh):
        x_placed, w, narrow = (cases.put(each, mesh, P("x")) for each in (x, q, q.astype(np.int8)))
        for given in ({}, {"determinism": "topology"}):
            compare(jax.jit(jaxmp.fuse(gathered, **given))(x_placed, narrow), x @ q)
        d, gradients = jax.jit(both)(x_placed, w)
    for got, want in zip((d, *gradients), (x @ q, x[:, :20] @ q.T, x.T @ x[:, :20]), strict=True):
        compare(got, want)
    RAN["narrow weights"] += 1


def block_cyclic():
    """Rows and columns are exchanged to be stored, in another layout, and back. A round trip hides what is stored."""
    mesh, layouts = jax.make_mesh((2, 2), ("r", "c")), [BlockCyclic((2, 2), (2, 2)), BlockCyclic((2, 2), (3, 1))]
    for m, n in ((8, 12), (10, 7)):
        x = np.arange(m * n, dtype=np.float32).reshape(m, n)
        stored = jaxmp.to_block_cyclic(jnp.asarray(x), layouts[0], mesh=mesh)
        if m == 8:
            order = [0, 1, 4, 5, 2, 3, 6, 7]
            compare(stored.data, x[order][:, [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]])
        moved = jaxmp.to_block_cyclic(stored, layouts[1])
        for each in (stored, moved):
            compare(jaxmp.from_block_cyclic(each), x)
        compare(jaxmp.from_block_cyclic(jaxmp.matmul(stored, stored, transpose_a=True)), x.T @ x)
    RAN["block cyclic"] += 1


def rounded(case, dtype):
    case = case.replace(dtype=dtype, per_shard=(3, 2, 5))
    mode = modes.BY_ID["explicit"]
    a, b = case.values(np.random.default_rng(1))
    op_a, op_b = (cases.wide(x) for x in case.op(a, b))
    with mode.scope(case):
        got = mode.run(mode.product(case), *operands(case, mode, a, b))
        for shard in got.addressable_shards:
            rows, cols = shard.index
            bounds.judge_product(f"{case.id}", np.asarray(shard.data), op_a[rows], op_b[:, cols], operands=case.dtype)
    RAN["rounded"] += 1


def transformed(case):
    """Gradients, tangents, vmap, scan and remat, on small integers, against plain jax.numpy on one device."""
    mode = modes.BY_ID["explicit"]
    a, b = case.integers(np.random.default_rng(2))
    with mode.scope(case):
        product = mode.product(case)
        x, y = operands(case, mode, a, b)

        def both(product):
            def loss(a, b):
                return jnp.sum(product(a, b) * jnp.float32(3))

            return {
                "grad": jax.grad(loss, argnums=(0, 1)),
                "remat": jax.grad(jax.checkpoint(loss), argnums=(0, 1)),
                "jvp": lambda a, b: jax.jvp(product, (a, b), (a, b))[1],
                "scan": lambda a, b: jax.lax.scan(lambda c, _: (c, product(c, b)), a, None, length=2)[1][1],
                "vmap": lambda a, b: jax.vmap(product, in_axes=(None, 0))(a, jnp.stack([b, b + b]))[1],
                "batch": lambda a, b: jax.vmap(product)(jnp.stack([a, a]), jnp.stack([b, b + b]))[1],
            }

        ours, plain = both(product), both(lambda a, b: jnp.matmul(*_op(case, a, b)))
        for name, function in ours.items():
            got = jax.jit(function)(x, y)
            with jax.default_device(jax.local_devices()[0]), jax.set_mesh(_no_mesh()):
                want = jax.jit(plain[name])(a, b)
            for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                compare(one, np.asarray(other))
            RAN[name] += 1


def _op(case, a, b):
    return a.T if case.transposition[0] == "T" else a, b.T if case.transposition[1] == "T" else b


def _no_mesh():
    return jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:1])


def has_the_bits_of_one_device(case, per_shard=(3, 5, 7)):
    """determinism="topology": the product and its gradients do not depend on the number of processes."""
    case = case.replace(per_shard=per_shard)
    mode = modes.BY_ID["explicit"]
    a, b = case.values(np.random.default_rng(6))
    m, n, _ = case.extents
    ct = cases.normal(np.random.default_rng(7), (m, n), case.dtype)

    def both(product):
        def run(a, b, ct):
            d, pull = jax.vjp(product, a, b)
            return d, *pull(ct)

        return jax.jit(run)

    with mode.scope(case):
        placed_ct = cases.put(ct, case.jax_mesh(), P(*case.out))
        got = both(mode.product(case, determinism="topology"))(*operands(case, mode, a, b), placed_ct)
    with jax.default_device(jax.local_devices()[0]), jax.set_mesh(_no_mesh()):
        want = both(functools.partial(jaxmp.matmul, determinism="topology"))(a, b, ct)
    for one, other in zip(got, want, strict=True):
        for shard in one.addressable_shards:
            assert_bitwise_equal(np.asarray(shard.data), np.asarray(other)[shard.index])
    RAN["bits"] += 1


def with_epilog(case, epilog):
    """alpha, bias, activation and aux output, on small integers: the sums are exact, and the epilog has the values of
    one device."""
    case = case.replace(epilog=epilog, per_shard=(2, 3, 4))
    mode, rng = modes.BY_ID["explicit"], np.random.default_rng(3)
    a, b = case.integers(rng)
    bias = [rng.integers(-3, 4, case.extents[1]).astype(case.dtype)] if epilog.name.endswith("BIAS") else []
    with mode.scope(case):
        placed_bias = [cases.put(x, case.jax_mesh(), P(case.out[1])) for x in bias]
        program = mode.product(case, alpha=0.5, epilog=epilog)
        got = jax.jit(lambda a, b, *bias: program(a, b, None, *bias))(*operands(case, mode, a, b), *placed_bias)
    with jax.default_device(jax.local_devices()[0]), jax.set_mesh(_no_mesh()):
        inputs = {"bias": bias[0]} if bias else None
        options = {"alpha": 0.5, "epilog": epilog, "epilog_inputs": inputs, **case.transpose}
        want = jax.jit(functools.partial(jaxmp.matmul, **options))(a, b)
    for name in ("d", "gelu_aux"):
        one, other = (_output(outputs, name) for outputs in (got, want))
        for shard in one.addressable_shards if one is not None else ():
            np.testing.assert_allclose(np.asarray(shard.data), np.asarray(other)[shard.index], rtol=1e-6, atol=1e-6)
    RAN["epilog"] += 1


def _output(outputs, name):
    if not isinstance(outputs, tuple):
        return outputs if name == "d" else None
    return outputs[0] if name == "d" else outputs[1].get(name)


def empty(case):
    case = case.replace(per_shard=(2, 3, 0))
    mode = modes.BY_ID["explicit"]
    a, b = case.integers(np.random.default_rng(4))
    with mode.scope(case):
        got = mode.run(mode.product(case), *operands(case, mode, a, b))
        compare(got, np.matmul(*case.op(a, b)))
    RAN["empty"] += 1


def gradients_of_a_layer():
    """Gradients of two dense layers with bias and relu, on small integers: also bias gradients of several ranks."""
    rng = np.random.default_rng(5)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    shapes = ((8, 4), (4, 8), (8,), (8, 4))
    layouts = (P("x", None), P(None, "x"), P("x"), P("x", None))
    values = [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]

    def ours(x, up, bias, down):
        h = jaxmp.linear(x, up, bias, activation="relu", out_sharding=P(None, "x"))
        return jnp.sum(jaxmp.matmul(h, down, out_sharding=P("x", None)) * jnp.float32(3))

    def plain(x, up, bias, down):
        return jnp.sum((jax.nn.relu(x @ up + bias[None, :]) @ down) * jnp.float32(3))

    with jax.set_mesh(mesh):
        placed_values = [cases.put(x, mesh, spec) for x, spec in zip(values, layouts, strict=True)]
        got = jax.jit(jax.grad(ours, argnums=(0, 1, 2, 3)))(*placed_values)
    with jax.default_device(jax.local_devices()[0]):
        want = jax.jit(jax.grad(plain, argnums=(0, 1, 2, 3)))(*values)
    for one, other in zip(got, want, strict=True):
        compare(one, np.asarray(other))
    RAN["layer"] += 1


COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
INSTRUCTION = r"^ +(?:ROOT )?%?([\w.-]+) = .*? ([a-z-]+)\((.*)$"


def every_collective_is_behind_a_barrier():
    """In the compiled gradients of every model, each collective needs the result of a barrier, or is one: those through
    shared memory."""
    for model in ("gather", "reduce", "data", "grid"):
        step, operands = chaos.program(model, True, "")
        text = jax.jit(step).lower(*operands).compile().as_text()
        found = 0
        for computation in re.split(r"^\}", text, flags=re.M):
            needs, kind = {}, {}
            for name, op, rest in re.findall(INSTRUCTION, computation, flags=re.M):
                needs[name], kind[name] = re.findall(r"%?([\w.-]+)", rest), op + rest
            behind = {name for name in kind if re.search("jaxmp_process_(barrier|collective)", kind[name])}
            found += sum("jaxmp_process_collective" in text for text in kind.values())
            while more := {name for name in kind if name not in behind and behind.intersection(needs[name])}:
                behind |= more
            collectives = [name for name in kind if kind[name].startswith(COLLECTIVES)]
            assert behind.issuperset(collectives), f"{model}: {set(collectives) - behind}\n{computation}"
            found += len(collectives)
        assert found, text
        RAN["barriers"] += found


def says_where_each_group_lives():
    """Axis y of a 2x2 mesh stays within a process of two devices, and within none of one device."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    found = {}
    with jax.set_mesh(mesh):
        for axis in ("x", "y"):
            a = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, P(None, axis)))
            b = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P(axis, None)))

            def product(a, b):
                return jaxmp.matmul(a, b, out_sharding=P(None, None))

            explained = jaxmp.explain(product)(a, b)
            found[axis] = explained.rows[0].implementation
            met = 1 if found[axis] == "host" else 2
            assert explained.rows[0].processes == met
            assert ("before a call of 2 processes each sends 1 message in 1 round" in str(explained)) == (met == 2)
            compare(jax.jit(product)(a, b), np.full((4, 4), 8, np.float32))
    within = "host" if jax.local_device_count() == 2 else "host+xla"
    assert found == {"x": "host+xla", "y": within}, found
