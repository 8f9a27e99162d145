"""Plans for the products of a function: against `explain` of the program written with them, against every other
assignment of shardings, and against what the program does.

Silently wrong without these: a plan whose time is not that of its calls, a slower plan called the best, or a sharding
that is followed through an operation which does not keep it.
"""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.advise import search as search_lib
from jaxmp._src.advise.chain import Chain
from jaxmp._src.advise.search import PlanStep, Search

H100 = jaxmp.advise(8, 8, 8, 1, hardware="h100-8", quiet=True).hardware
# Links so slow, or memories so small, that other plans are the best.
SLOW = dataclasses.replace(H100, name="slow", link_bandwidth=5e9)


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def spec_of(x, ndim):
    return P(*(tuple(x) + (None,) * (ndim - len(x))))


class Plain:
    """Products and joins of a program as JAX has them."""

    def product(self, a, b, contracted, batch=((), ())):
        return lax.dot_general(a, b, (contracted, batch))

    def joined(self, x, y):
        return x, y

    def normalized(self, x):
        return normalized(x)


def normalized(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + jnp.bfloat16(1e-6))


class Planned:
    """The same with the shardings of a plan: its reshards where they are due, and its products in turn."""

    def __init__(self, plan):
        self.steps, self.copies, self.normalized_from, self.kept = list(plan.steps), {}, {}, []

    def product(self, a, b, contracted, batch=((), ())):
        a, b = self.both(a, b)
        step = self.steps.pop(0)
        of_a, of_b, of_d = step.shardings
        return jaxmp.dot_general(
            self.at(a, of_a), self.at(b, of_b), (contracted, batch), out_sharding=spec_of(of_d, len(step.shapes[2]))
        )

    def joined(self, x, y):
        """The operands of an elementwise operation, in one sharding."""
        return (x, y) if self.lies(x, jax.typeof(y).sharding.spec) else self.both(x, y)

    def both(self, x, y):
        """The operands, after the reshards that are due now."""
        operands = [x, y]
        while self.steps and self.steps[0].operation == "reshard":
            (step, have, want) = (self.steps[0], *self.steps[0].shardings)
            found = [i for i, x in enumerate(operands) if x.shape == step.shapes[0] and self.lies(x, have)]
            if not found:
                break
            self.steps.pop(0)
            x = operands[found[0]]
            source = self.normalized_from.get(id(x), x)  # moved ahead of elementwise operations
            copy = self.moved(source, want)
            for value in (source, *(y for y, of in self.kept if of is source)):
                self.copies[id(value), spec_of(want, x.ndim)] = copy if value is source else normalized(copy)
            operands[found[0]] = self.copies[id(x), spec_of(want, x.ndim)]
        return operands

    def normalized(self, x):
        h = normalized(x)
        self.kept.append((h, x))
        self.normalized_from[id(h)] = x
        for (of, spec), copy in list(self.copies.items()):
            if of == id(x):
                self.copies[id(h), spec] = normalized(copy)
        return h

    def lies(self, x, spec):
        return spec_of(jax.typeof(x).sharding.spec, x.ndim) == spec_of(spec, x.ndim)

    def at(self, x, spec):
        copies = {spec: copy for (of, spec), copy in self.copies.items() if of == id(x)}
        if self.lies(x, spec) or not copies:
            return x if self.lies(x, spec) else self.moved(x, spec)
        wanted = spec_of(spec, x.ndim)
        return copies[wanted] if wanted in copies else self.moved(copies[P(*(None,) * x.ndim)], spec)

    def moved(self, x, spec):
        with jax.named_scope("jaxmp_test"):  # under which explain counts reshards
            return jax.sharding.reshard(x, spec_of(spec, x.ndim))


def mlp(ops, x, w_in, w_out):
    return ops.product(jax.nn.relu(ops.product(x, w_in, ((2,), (0,)))), w_out, ((2,), (0,)))


def residual(ops, x, w_in, w_out):
    hidden = jnp.tanh(ops.product(x, w_in, ((2,), (0,))))
    x, y = ops.joined(x, ops.product(hidden, w_out, ((2,), (0,))))
    return x + y


def block(ops, p, x):
    """Attention and a gated layer, with heads as a dimension of the weights."""

    h = ops.normalized(x)
    q, k, v = (ops.product(h, p[name], ((2,), (0,))) for name in "qkv")  # (batch, length, heads, features)
    scores = ops.product(q, k, ((3,), (3,)), ((0, 2), (0, 2)))
    mixed = ops.product(jax.nn.softmax(scores), v, ((3,), (1,)), ((0, 1), (0, 2)))  # (batch, heads, length, features)
    x, y = ops.joined(x, ops.product(mixed, p["o"], ((1, 3), (0, 1))))
    x = x + y
    h = ops.normalized(x)
    gate, up = ops.joined(*(ops.product(h, p[name], ((2,), (0,))) for name in ("gate", "up")))
    x, y = ops.joined(x, ops.product(jax.nn.silu(gate) * up, p["down"], ((2,), (0,))))
    return x + y


D, H, HIDDEN = 2048, 16, 8192
BLOCK = {name: array(D, H, D // H) for name in "qkv"} | {
    "o": array(H, D // H, D), "gate": array(D, HIDDEN), "up": array(D, HIDDEN), "down": array(HIDDEN, D)
}  # fmt: skip
PROGRAMS = {
    "mlp of a large batch": (mlp, (array(8, 2048, 4096), array(4096, 16384), array(16384, 4096))),
    "mlp of a long sequence": (mlp, (array(1, 4096, 4096), array(4096, 16384), array(16384, 4096))),
    "float32": (mlp, tuple(array(*shape, dtype="float32") for shape in ((2, 512, 1024), (1024, 4096), (4096, 512)))),
    "residual": (residual, (array(1, 1024, 2048), array(2048, 8192), array(8192, 2048))),
    "block": (block, (BLOCK, array(1, 2048, D))),
    "block of a batch": (block, (BLOCK, array(8, 64, D))),
}


SHARED = dataclasses.replace(H100, name="shared", is_shared=True)  # devices of one processor read in place
PLANNED = [(name, machine) for name in PROGRAMS for machine in (H100, SLOW)]
PLANNED += [(name, SHARED) for name in ("mlp of a large batch", "float32")]


@pytest.mark.parametrize(("name", "machine"), PLANNED, ids=lambda x: x if isinstance(x, str) else x.name)
def test_a_plan_takes_what_explain_says_of_the_program_written_with_it(name, machine, mesh_of):
    """Every plan of the list, the best as well."""
    program, arguments = PROGRAMS[name]
    advice = jaxmp.advise(lambda *args: program(Plain(), *args), devices=8, hardware=machine, quiet=True)(*arguments)
    mesh = mesh_of({"x": 8}, AxisType.Explicit)
    assert advice.best.mesh == (("x", 8),)
    for plan in advice.choices:
        placed = jax.tree.map(lambda x, spec: x.update(sharding=NamedSharding(mesh, spec)), arguments, plan.arguments)
        ops = Planned(plan)
        with jax.set_mesh(mesh):
            found = jaxmp.explain(lambda *args, ops=ops: program(ops, *args), quiet=True, hardware=machine)(*placed)
        assert not ops.steps
        assert [row.pattern for row in found.rows if row.flops] == [step.pattern for step in plan.products], plan.name
        assert found.seconds == pytest.approx(plan.seconds, rel=1e-9), plan.name
        assert found.exposed_seconds == pytest.approx(plan.exposed_seconds, rel=1e-9, abs=1e-12)
        shards = [(x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(placed)]
        assert plan.argument_bytes == sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shards)


# Chains in which each value is read once: (function, arguments).
CHAINS = {
    "two products": (lambda x, v, w: (x @ v) @ w, ((1024, 512), (512, 2048), (2048, 512))),
    "a transpose": (lambda x, v, w: (x @ v).T @ w, ((1024, 512), (512, 2048), (1024, 256))),
    "heads": (lambda x, v, w: jnp.einsum("lhd,hdk->lk", (x @ v).reshape(64, 16, 32), w),
              ((64, 512), (512, 512), (16, 32, 256))),
    "a joined product": (lambda x, v, y, w: (x @ v) + (y @ w), ((1024, 512), (512, 2048), (1024, 256), (256, 2048))),
    "few rows": (lambda x, v, w: (x @ v) @ w, ((8, 4096), (4096, 4096), (4096, 4096))),
}  # fmt: skip


@pytest.mark.parametrize("machine", [H100, SLOW], ids=lambda machine: machine.name)
@pytest.mark.parametrize("name", CHAINS)
def test_no_assignment_of_shardings_is_better(name, machine):
    """All plans, and of the search those that are efficient: both have the same pairs of seconds and bytes."""
    fn, shapes = CHAINS[name]
    nodes = nodes_of(fn, [array(*shape) for shape in shapes], machine)
    efficient, least = [], float("inf")
    search = Search(nodes, 8, machine)
    for seconds, memory in sorted(every_plan(nodes, search)):
        if memory < least:
            efficient, least = [*efficient, (seconds, memory)], memory
    found = costs(search)
    assert [memory for _, memory in found] == [memory for _, memory in efficient]
    assert [seconds for seconds, _ in found] == pytest.approx([seconds for seconds, _ in efficient])


def nodes_of(fn, arguments, machine=H100, devices=8):
    jaxpr = jax.make_jaxpr(fn)(*arguments).jaxpr
    return Chain(jaxpr, jaxpr.invars, devices, machine).nodes


def costs(search):
    """(seconds, bytes) of the plans that a search has found."""
    return [
        (sum(step.seconds for step in decisions if isinstance(step, PlanStep)), memory)
        for memory, decisions in search.plans()
    ]


def every_plan(nodes, search):
    """(seconds, bytes) of every choice of a sharding for each argument and join, and of an option for each product."""
    made = [i for i, node in enumerate(nodes) if node.kind != "argument"]
    arguments = [i for i, node in enumerate(nodes) if node.kind == "argument"]
    assert all(sum(view.node == i for node in nodes for view in node.operands) <= 1 for i in range(len(nodes)))
    ways = [search._ways[i] if nodes[i].kind == "product" else shardings(nodes[i]) for i in made]
    for homes in itertools.product(*(shardings(nodes[i]) for i in arguments)):
        held = sum(size(nodes[i]) // (1 if home is None else 8) for i, home in zip(arguments, homes, strict=True))
        for chosen in itertools.product(*ways):
            where, seconds, memory = dict(zip(arguments, homes, strict=True)), 0.0, held
            for i, way in zip(made, chosen, strict=True):
                is_product = nodes[i].kind == "product"
                wanted = way[0][:2] if is_product else (way,) * len(nodes[i].operands)
                for view, want in zip(nodes[i].operands, wanted, strict=True):
                    have, target = where[view.node], None if want is None else view.dims[want]
                    if have is not None and have != target:
                        move = search._reshard(view, have, target, i)
                        seconds, memory = seconds + move.seconds, memory + move.memory
                where[i] = way
                if is_product:
                    (*_, where[i]), step = way
                    seconds += step.seconds
                    memory += size(nodes[i]) // (8 if where[i] is not None else 1)
            yield seconds, memory


def shardings(node):
    return [None, *(i for i, extent in enumerate(node.shape) if extent % 8 == 0)]


def size(node):
    return int(np.prod(node.shape)) * node.dtype.itemsize


def patterns_of(fn, *arguments, machine=H100, devices=8, **options):
    advice = jaxmp.advise(fn, devices=devices, hardware=machine, quiet=True)(*arguments, **options)
    return [step.pattern for step in advice.best.products], advice


def test_the_shardings_of_a_plan_run(mesh_of, rng):
    """Straight into device_put and out_sharding, with the values of the program without them."""
    mesh = mesh_of({"x": 8}, AxisType.Explicit)
    params = {"in": rng.integers(-2, 3, (64, 128)), "out": rng.integers(-2, 3, (128, 64))}
    params = jax.tree.map(lambda w: jnp.asarray(w, "float32"), params)
    x = jnp.asarray(rng.integers(-2, 3, (16, 64)), "float32")

    def program(params, x, *, scale, specs=(None, None)):
        hidden = jax.nn.relu(jaxmp.matmul(x, params["in"], out_sharding=specs[0]))
        return jaxmp.matmul(hidden * scale, params["out"], out_sharding=specs[1])

    advice = jaxmp.advise(program, devices=8, quiet=True)(params, x, scale=2.0)
    wanted = program(params, x, scale=2.0)
    assert len({plan.name for plan in advice.choices}) > 2
    for plan in advice.choices:
        assert plan.keywords == {"scale": None}
        placed = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), (params, x), plan.arguments)
        specs = [step.shardings[2] for step in plan.products]
        with jax.set_mesh(mesh):
            found = program(*placed, scale=2.0, specs=specs)
        assert found.sharding.is_equivalent_to(NamedSharding(mesh, specs[1]), 2)
        np.testing.assert_array_equal(found, wanted)


def test_products_of_jaxmp_are_those_of_jax():
    x, w, v = array(8, 512, 1024), array(1024, 2048), array(2048, 1024)
    bias = array(2048)
    _, of_jax = patterns_of(lambda x, w, v, bias: jax.nn.relu(x @ w + bias[None, None]) @ v, x, w, v, bias)
    _, of_ours = patterns_of(
        lambda x, w, v, bias: jaxmp.matmul(jaxmp.linear(x, w, bias, activation="relu"), v), x, w, v, bias
    )
    assert [plan.seconds for plan in of_ours.choices] == pytest.approx([plan.seconds for plan in of_jax.choices])
    assert of_ours.best.arguments == of_jax.best.arguments
    assert of_ours.remarks == of_jax.remarks == ()
    steps = of_ours.best.products
    assert all(step.line.startswith("test_advise_program.py:") for step in steps)


def test_shardings_that_the_function_asks_for_are_passed_over(mesh_of):
    x, w = array(64, 128), array(128, 256)
    wanted = patterns_of(lambda x, w: jnp.tanh(x @ w), x, w)[1].best
    mesh = mesh_of({"x": 8}, AxisType.Explicit)
    placed = x.update(sharding=NamedSharding(mesh, P(None, "x")))
    with jax.set_mesh(mesh):
        for product in (
            jaxmp.matmul,
            lambda x, w: jaxmp.matmul(x, w, out_sharding=P("x", None)),
            lambda x, w: jnp.matmul(x, w, out_sharding=P(None, "x")),
        ):
            _, advice = patterns_of(lambda x, w, product=product: jnp.tanh(product(x, w)), placed, w)
            assert (advice.best.seconds, advice.best.arguments) == (wanted.seconds, wanted.arguments)
            assert advice.remarks == ()


def test_calls_of_jaxmp_between_reshards_are_counted_under_a_mesh(mesh_of):
    """Explicit axes, on which they are in shard_maps, and which reshard wants."""
    arguments = array(64, 128), array(128, 256), array(256, 64)

    def program(x, w, v):
        return reshard(jaxmp.matmul(x, reshard(w, P(None, "x")), out_sharding=P(None, "x")), P()) @ v

    wanted = patterns_of(lambda x, w, v: (x @ w) @ v, *arguments)[1]
    with jax.set_mesh(mesh_of({"x": 8}, AxisType.Explicit)):
        advice = patterns_of(program, *arguments)[1]
    assert advice.remarks == ()
    assert (advice.best.seconds, len(advice.best.products)) == (wanted.best.seconds, 2)


def test_c_has_the_sharding_of_the_result():
    nodes = nodes_of(lambda a, b, c: jaxmp.matmul(a, b, c, beta=1.0), [array(64, 64)] * 3)
    assert [node.kind for node in nodes] == ["argument"] * 3 + ["product", "join"]
    assert [view.node for view in nodes[-1].operands] == [3, 2]


# Function of x, (64, 128) and w, and the dimensions of x that those of the product's left operand are.
FOLLOWED = {
    "a transpose": (lambda x: x.T, (1, 0)),
    "a cast": (lambda x: x.astype("float32"), (0, 1)),
    "a bias": (lambda x: x + jnp.arange(128, dtype="bfloat16")[None], (0, 1)),
    "a softmax": (jax.nn.softmax, (0, 1)),
    "a gelu, jitted": (jax.jit(jax.nn.gelu), (0, 1)),
    "custom rules and remat": (jax.checkpoint(lambda x: jax.nn.silu(jax.nn.relu(x))), (0, 1)),
    "split dimensions": (lambda x: x.reshape(8, 8, 16, 8), (0, None, 1, None)),
    "small split dimensions": (lambda x: x.reshape(4, 16, 128), (None, None, 1)),
    "folded dimensions": (lambda x: x.reshape(8, 8, 128).reshape(64, 128), (0, 1)),
    "rows and columns folded": (lambda x: x.reshape(64 * 128), (0,)),
    "dimensions of 1": (lambda x: x[:, None].reshape(1, 64, 1, 128), (None, 0, None, 1)),
    "a slice": (lambda x: x[:32], (None, 1)),
    "halves": (lambda x: jnp.split(x, 2, axis=1)[1], (0, None)),
    "joined halves": (lambda x: jnp.concatenate([x[:, 64:], -x[:, :64]], axis=1), (0, None)),
    "repeats": (lambda x: jnp.broadcast_to(x[:, None], (64, 4, 128)), (0, None, 1)),
    "an empty part": (lambda x: x[:, :0].reshape(0, 64), (None, None)),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_value_is_followed_through_what_keeps_its_shards(name):
    fn, dims = FOLLOWED[name]

    def program(x):
        y = fn(x)
        return lax.dot_general(y, jnp.ones((y.shape[-1], 8), y.dtype), (((y.ndim - 1,), (0,)), ((), ())))

    nodes = nodes_of(program, [array(64, 128)])
    (product,) = (node for node in nodes if node.kind == "product")
    left = product.operands[0]
    assert (left.node, left.dims) == (0, dims)


def test_what_is_not_followed_is_named():
    def program(table, w, tokens):
        return jnp.cumsum(table[tokens], axis=1) @ w

    _, advice = patterns_of(program, array(512, 64), array(64, 64), array(8, 16, dtype="int32"))
    assert any("what comes from cumsum" in remark for remark in advice.remarks)
    assert "cumsum" in str(advice)

    def looped(x, w):
        return lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w, x) @ w

    _, advice = patterns_of(looped, array(64, 64), array(64, 64))
    (left,) = (remark for remark in advice.remarks if "not counted" in remark)
    assert re.search(r"test_advise_program\.py:\d+ inside of while", left)

    def only_looped(x, w):
        return lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w, x)

    with pytest.raises(
        ValueError, match=r"only_looped has no product whose time is predicted; not counted are .*of while"
    ):
        jaxmp.advise(only_looped, devices=8)(array(64, 64), array(64, 64))


def test_a_scan_counts_its_turns():
    layers, x, w = 6, array(4, 512, 1024), array(1024, 1024)

    def unrolled(x, ws):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    def scanned(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    _, one = patterns_of(unrolled, x, [w] * layers)
    _, two = patterns_of(scanned, x, array(layers, *w.shape))
    assert two.best.seconds == pytest.approx(one.best.seconds)
    assert two.best.memory == one.best.memory
    (step,) = two.best.products
    assert step.count == layers


def test_what_a_loop_carries_has_one_sharding():
    """Columns to rows, in each turn: unrolled it alternates for nothing, in a loop it has to be brought back."""

    def turn(x, w):
        return (x @ w).T

    x, w = array(1024, 1024), array(1024, 1024)
    nodes = nodes_of(lambda x, ws: lax.scan(lambda x, w: (turn(x, w), None), x, ws)[0], [x, array(2, 1024, 1024)])
    assert [node.kind for node in nodes] == ["argument", "argument", "join", "product", "close"]
    search = Search(nodes, 8, SLOW)
    found = costs(search)[0][0]
    product = min(step.time.total for _, step in search._ways[3])
    free = costs(Search(nodes_of(lambda x, w, v: turn(turn(x, w), v), [x, w, w]), 8, SLOW))[0][0]
    assert free == pytest.approx(2 * product)
    assert found > 1.5 * free


def test_a_plan_fits_where_there_is_one_that_does():
    """And is the fastest of these."""
    program, arguments = PROGRAMS["mlp of a long sequence"]
    nodes = nodes_of(lambda *args: program(Plain(), *args), arguments)
    front = costs(Search(nodes, 8, H100))
    assert len(front) > 2
    for seconds, memory in front:
        small = dataclasses.replace(H100, memory=memory)
        _, advice = patterns_of(lambda *args: program(Plain(), *args), *arguments, machine=small)
        assert advice.best.fits
        assert (advice.best.seconds, advice.best.memory) == (seconds, memory)
    least = dataclasses.replace(H100, memory=front[-1][1] - 1)
    _, advice = patterns_of(lambda *args: program(Plain(), *args), *arguments, machine=least)
    assert not any(plan.fits for plan in advice.choices)
    assert "does not fit" in str(advice)


def test_tables(capsys):
    advice = jaxmp.advise(lambda w, x: jax.nn.relu(x @ w["in"]) @ w["out"], devices=8)(
        {"in": array(256, 512), "out": array(512, 256)}, array(64, 256)
    )
    printed = capsys.readouterr().out
    assert printed.rstrip("\n") == str(advice)
    for text in (advice.best.name, "[0]['in']", "[1]", "test_advise_program.py:", "data sheet"):
        assert text in printed
    assert repr(advice).startswith("ProgramAdvice(<lambda> on 8 devices of h100-8, mesh (x=8): ")
    page = advice._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 3
    assert "<lambda>" not in page
    assert repr(jaxmp.advise(mlp, devices=8)).startswith("<jaxmp.advise of mlp: call it with the arguments of mlp")


def test_a_copy_serves_all_that_read_it():
    def program(x, w, v):
        h = x @ w
        return h.astype("bfloat16") @ v, jnp.tanh(h.astype("bfloat16")) @ v, h[:8].astype("bfloat16") @ v

    shapes = ((64, 64, "float32"), (64, 64, "float32"), (64, 64, "bfloat16"))
    nodes = nodes_of(program, [array(m, n, dtype=dtype) for m, n, dtype in shapes])
    search, (made, cast, again, part) = Search(nodes, 8, H100), [n for n in nodes if n.kind == "product"]
    node = nodes.index(made)

    def moves(*readers):
        views = [reader.operands[0] for reader in readers]
        assert {view.node for view in views} == {node}
        (found,) = search._acquired({node: (0,)}, [(view, None) for view in views], node)
        return [step.shapes[0] for step in found[1].decisions]

    assert moves(cast, again) == moves(part, cast) == [(64, 64)]  # a part of the rows does not show how the rows lie
    assert search._reshard(cast.operands[0], 0, None, node).memory == 64 * 64 * 2  # as it is read


def test_small_and_odd_programs(monkeypatch):
    """One device, no elements, keys and numbers among the arguments, a type without a rate, too many plans."""
    x = array(64, 64)
    patterns, advice = patterns_of(lambda x, w: x @ w, x, x, devices=1)
    assert (patterns, len(advice.choices), advice.best.exposed_seconds) == (["local"], 1, 0)
    _, advice = patterns_of(lambda x, v, w: (x @ v)[:, :0] @ w, x, x, array(0, 64))
    assert [step.shapes[2] for step in advice.best.products] == [(64, 64), (64, 64)]
    key = jax.random.split(jax.random.key(0), 8)
    dropped = lambda keys, x, w, rate: jnp.where(jax.random.bernoulli(keys[0], rate, x.shape), x, 0) @ w  # noqa: E731
    _, advice = patterns_of(dropped, key, x, x, 0.5)
    assert (advice.best.arguments[0], advice.best.arguments[3], len(advice.best.products)) == (P(), None, 1)
    wide, machine = array(64, 64, dtype="float32"), jaxmp.Hardware("no float32", {"bfloat16": 1e15}, 1e12, 1e11)
    _, advice = patterns_of(lambda x, w: (x @ x).astype("bfloat16") @ w, wide, x, machine=machine)
    assert len(advice.best.products) == 1
    assert any("of float32" in remark for remark in advice.remarks)
    program, arguments = PROGRAMS["block"]
    monkeypatch.setattr(search_lib, "CAP", 8)
    _, advice = patterns_of(lambda *args: program(Plain(), *args), *arguments)
    assert any("beginnings of plans" in remark for remark in advice.remarks)
    keys = [(not plan.fits, plan.seconds, plan.memory) for plan in advice.choices]
    assert keys == sorted(keys)
