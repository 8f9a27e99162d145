"""The rows of a compiled program are true: who needs a collective, in which line, and why."""

import re

import cases
import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp


@pytest.fixture
def explained(mesh_of):
    """Returns a function that explains a function on a mesh of data and model. Its arrays are (shape, spec...), or
    functions of the mesh."""
    mesh = mesh_of({"data": 2, "model": 2}, AxisType.Auto)

    def typed(arg):
        return cases.typed(mesh, *arg) if isinstance(arg, tuple) else arg(mesh) if callable(arg) else arg

    def of(fn, *args):
        types = jax.tree.map(typed, list(args), is_leaf=lambda arg: isinstance(arg, tuple))
        with jax.set_mesh(mesh):
            return jaxmp.explain(fn, compiled=True, quiet=True)(*types)

    return of


@pytest.fixture
def rows_of(explained):
    return lambda *args: explained(*args).collectives


def ints(*arg):
    return lambda mesh: cases.typed(mesh, *arg, dtype="int32")


def only_asks(x, *spec):
    return jax.lax.with_sharding_constraint(x, P(*spec))


def called_twice(x, y):
    x = only_asks(x * 2) + 1
    return x, only_asks(jnp.tanh(y)) @ y


def called_in_a_loop(x, y):
    return jax.lax.scan(lambda carry, _: (only_asks(jnp.tanh(carry)) @ y, None), x, None, length=3)[0]


def line_in(fn, number):
    return f"test_compiled_words.py:{fn.__code__.co_firstlineno + number}"


def test_a_line_that_several_lines_call_has_its_caller(rows_of):
    helper = only_asks.__code__.co_firstlineno + 1
    rows = rows_of(called_twice, ((8, 16), "data"), ((16, 16), "model"))
    assert {row.line for row in rows} == {f"{line_in(called_twice, n)} -> only_asks:{helper}" for n in (1, 2)}
    assert {row.cause_kind for row in rows} == {"constraint"}


def flat_and_back(x, y):
    return jnp.tanh(x.reshape(-1, 16) @ y).reshape(x.shape)


def called_again(x, y):
    x = x.reshape(4, 4, 16)
    return jax.checkpoint(flat_and_back)(x, y) ** 2


@pytest.mark.parametrize("fn", [called_in_a_loop, called_again])
def test_lines_with_one_caller_are_alone_in_loops_and_remat(fn, rows_of):
    rows = rows_of(jax.grad(lambda x, y: fn(x, y).sum()), ((16, 16), "data"), ((16, 16), "model"))
    assert rows
    assert not [row for row in rows if "->" in row.line]


def test_no_cause_names_an_axis_that_the_argument_lacks(rows_of):
    rows = rows_of(
        lambda tok, pos, tokens: jnp.take(tok, tokens, axis=0) * 16.0 + pos[None],
        *(((64, 16), "model"), ((8, 16), None, "model"), ints((4, 8), "data")),
    )
    assert {row.cause_kind for row in rows} == {"whole"}
    assert all(re.search("model shards dimension 0 of tok|of tok whole, but model", row.cause) for row in rows)
    assert not any(re.search("tok, which data|tables?", row.cause + row.remedy) for row in rows)
    assert {"leave dimension 0 of tok whole; shard another dimension over model"} == {row.remedy for row in rows}


def rotary(x):
    a, b = jnp.split(x, 2, axis=1)
    return jnp.concatenate([a - b, a + b], axis=1)


def test_moves_of_an_operation_at_the_result_are_its_own(rows_of):
    rows = rows_of(rotary, ((8, 16), None, "model"))
    assert {row.cause_kind for row in rows} == {"whole"}
    last = f"concatenate wants dimension 1 of the result of sub ({line_in(rotary, 2)})"
    assert rows[-1].cause.startswith(last)


def first_scan(xs):
    return jax.lax.scan(lambda carry, x: (carry + x, None), xs[0] * 2, xs)[0]


def second_scan(xs):
    carry = jnp.tanh(xs[1])
    return jax.lax.scan(lambda carry, x: (carry * x, None), carry, xs)[0]


def test_a_scan_has_its_own_line_after_another_was_traced(rows_of):
    for fn, number in ((first_scan, 1), (second_scan, 2)):
        lines = {row.line for row in rows_of(fn, ((4, 8, 16), "model")) if row.cause.startswith("the scan wants")}
        assert lines == {line_in(fn, number)}


def carried(x, w):
    def body(carry, _):
        return jax.lax.with_sharding_constraint(jnp.tanh(carry @ w), P("data", "model")), None

    return jax.lax.scan(body, x, None, length=3)[0]


def kept_otherwise(x, w):
    def body(carry, _):
        carry = jnp.tanh(only_asks(carry, "data", "model") @ w)
        return jax.lax.with_sharding_constraint(carry, P("model", "data")), None

    return jax.lax.scan(body, x, None, length=3)[0]


def inner(x):
    return jax.jit(jnp.tanh, in_shardings=P("data"))(x * 2)


@jax.custom_vjp
def scaled(x):
    return x


scaled.defvjp(lambda x: (x, x), lambda x, g: (g / jnp.max(x),))


@jax.custom_vjp
def normed(x):
    return x


def divided(x, g):
    return (g / jnp.sum(g * x, -1, keepdims=True),)


normed.defvjp(lambda x: (x, x), divided)


def by_devices(x):
    return jax.shard_map(jnp.sin, in_specs=P("model"), out_specs=P("model"))(jnp.tanh(x))


def cached(cache, new, at):
    return cache.at[jnp.arange(8), at].set(new)


def led(x, first):
    return jnp.concatenate([jnp.broadcast_to(first, (8, 1, 16)), x], 1) * 2


def shared(w, x):
    local = jax.shard_map(lambda w, x: jax.lax.psum(jnp.sin(x @ w), "data"), in_specs=(P(), P("data")), out_specs=P())
    return local(w, x).sum()


def convolved(x, w):
    return jax.lax.conv(x, w, (1, 1), "SAME")


def constrained_norm(x):
    x = only_asks(jnp.tanh(x), None, "model")
    return x / jnp.mean(x * x, -1, keepdims=True)


def momentum(w, m, x):
    return w - m, 0.9 * m + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


def slices_of_a_reshape(x):
    return jax.lax.scan(lambda carry, part: (carry + part.sum(), None), 0.0, x.reshape(4, 2, 16))[0]


def layers(ps, x):
    for p in ps:
        x = jnp.tanh(x @ p["in"]) @ p["out"]
    return x


def decode(cache, x, w):
    return jax.lax.dynamic_update_slice(cache, x @ w, (3, 0))


LAYER = {"in": ((16, 32), None, "model"), "out": ((32, 16), "model")}


# (function, arguments for `rows_of`, words of a cause, of this collective, its axes and its kind of cause)
CASES = [
    (lambda x, w: x @ w, [((8, 16), "model", None), ((16, 32), None, "model")], "",
     "collective-permute data model product"),
    (lambda x, w: x @ w, [((8, 16), None, "model"), ((16, 32),)],
     "sums dimension 1 of x, which model shards, with dimension 0 of w, which is whole", "all-gather model product"),
    (lambda x: jax.lax.with_sharding_constraint(x * 2, P()) + 1, [((8, 16), "data")], "", "all-gather data constraint"),
    (lambda x, y: (x + y) @ y.T, [((8, 16), "data"), ((8, 16), "model")], "", "all-gather data elementwise"),
    (jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)), [((16, 32), None, "model"), ((8, 16), "data")],
     "^the gradient of this product sums", "all-reduce data gradient"),
    (jax.grad(lambda b, x: jnp.sum(jnp.tanh(x + b[None]))), [((16,),), ((8, 16), "data")],
     "^the gradient sums dimension 0 of ", "all-reduce data gradient"),
    (lambda x: jnp.sort(x, 1), [((8, 16), None, "model")], "", "all-to-all model whole"),
    (lambda x: x.reshape(-1)[3:80] + 1, [((6, 16), None, "model")],
     "^a reshape from 6x16 to 96 wants dimension 1 of x whole, but model shards it$", "all-gather model reshape"),
    (jax.jit(lambda x, w: x @ w, out_shardings=P()), [((8, 16),), ((16, 32), None, "model")],
     "^out_shardings have model on no dimension", "all-gather model out_shardings"),
    (lambda x: jax.shard_map(lambda x: jax.lax.psum(x, "model"), in_specs=P("model"), out_specs=P())(x),
     [((8, 16), "model")], r"^the program runs jax.lax.psum \(or pmean\)$", "all-reduce model written"),
    # Where shardings begin.
    (constrained_norm, [((8, 16),)],
     r"^this sum reduces dimension 1 of .* \(from with_sharding_constraint in \S+:\d+ ?.*\), which model",
     "all-reduce model reduction"),
    (
        lambda b, x, w: jnp.tanh(b + x) @ w,  # XLA chooses b's sharding, so b is no origin
        [jax.ShapeDtypeStruct((1, 16), "float32"), ((8, 16), None, "model"), ((16, 32), None, "model")],
        r"sums dimension 1 of the result of tanh .* \(from dimension 1 of x\) and keeps .* of w, but model",
        "product",
    ),
    (momentum, [((16, 32), None, "model"), ((16, 32), "model"), ((8, 16), "data")],
     r"^the gradient.s product has model on dimension 1 \(to meet dimension 0 of m in \S+:\d+\), but", "product"),
    (slices_of_a_reshape, [((8, 16), "data")],
     r"^the scan wants dimension 0 of the result of reshape \(\S+:\d+\) \(from dimension 0 of x\)", "whole"),
    (layers, [[LAYER] * 2, ((8, 16),)],
     r"from dimension 1 of ps\[1\]\['in'\]\) and dimension 0 of ps\[1\]\['out'\]", "all-reduce model product"),
    (decode, [((8, 16), "model"), ((1, 16),), ((16, 16), None, "model")],
     "dimension 0 of cache whole, .*; model shards dimension 1 of the result of dot_general .*dimension 1 of w",
     "whole"),
    (lambda x, settings: (x * settings["scale"]) @ settings["w"],
     [((8, 16),), {"scale": 2.0, "w": ((16, 4), "model")}],
     r"dimension 0 of settings\['w'\], which model shards", "product"),
    (kept_otherwise, [((16, 16), "model", "data"), ((16, 16),)],
     "^the loop's carry has data on dimension 0.*, but model shards dimension 0 .*" +
     rf"\(from with_sharding_constraint in {re.escape(line_in(kept_otherwise, 3))}\)", "carry"),
    (lambda x: jnp.fft.fft(x, axis=0).real, [((8, 16), "data")],
     "^fft wants dimension 0 of x whole, but data shards it$", "whole"),
    # All rows have these words.
    (carried, [((8, 16), "data"), ((16, 16),)], r"the loop.s carry \(.*?\) \(from with_sharding_constraint in "),
    (inner, [((8, 16), "data", "model")],
     "^in_shardings of an inner jax.jit have data on dimension 0, but model shards dimension 1 of x$"),
    (jax.grad(lambda x: scaled(x).sum()), [((8, 16), "data")], "^this max reduces dimension 0 of x"),
    (jax.grad(lambda x: normed(jnp.sin(x)).sum()), [((8, 16), None, "model")],
     "^this sum reduces dimension 1 of .*from "),
    (by_devices, [((8, 16), "data")], "^in_specs of shard_map have model on dimension 0, but data shards dimension 0"),
    (lambda x, i: jnp.zeros((4, 16)).at[i.astype(int)].add(x), [((8, 16), "data"), ((8,), "data")],
     "^this scatter sums dimension 0 of x, which data shards$"),
    (
        jax.jit(lambda c, n: c * 0.9 + n, out_shardings=P("data")),  # both steps of the move have one cause
        [((16, 16), "data"), ((16, 16), "model")],
        r"^add has data on dimension 0 \(from dimension 0 of c\), but model shards dimension 0 of n$",
    ),
    (jax.grad(shared), [((16, 4),), ((8, 16), "data")], r"^the gradient runs jax.lax.psum \(or pmean\)$"),
    (lambda x, y: jnp.concatenate([x, y]) * 2, [((8, 16), "model")] * 2,
     "^concatenate wants dimension 0 of [xy] whole, but model shards it$"),
    (lambda x, y: x @ y.T, [((8, 16), "data")] * 2,
     "^this product keeps dimension 0 of y and dimension 0 of x, but data shards both$"),
    (
        jax.grad(lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x) @ w.T) ** 2), (0, 1)),  # both products have one name
        [((64, 32), "data", "model"), ((16, 32), "data")],
        "^(the gradient of )?this product (sums|keeps) ",
    ),
    (lambda x: jnp.tanh(x) + x.T, [((16, 16), "data")],
     "^add has data on dimension 0.*, but data shards dimension 0 of x, transposed$"),
    (lambda x, y: jax.lax.with_sharding_constraint(jax.vmap(jnp.outer)(x, y), P()).sum(0),
     [((64, 8), ("data", "model")), ((64, 64), ("data", "model"))],
     "has data and model on no dimension, but data and model shard dimension 0 of x$"),
    (convolved, [((4, 8, 16, 16), None, "model"), ((8, 8, 3, 3), None, "model")],
     "^this convolution sums dimension 1 of x and dimension 1 of w, which model shards$"),
    (jax.grad(lambda w, x: jnp.sin(convolved(x, w)).sum()), [((8, 8, 3, 3),), ((4, 8, 16, 16), "data")],
     "^the gradient of this convolution sums dimension 0 of x and dimension 0 of "),
    (convolved, [((4, 8, 16, 16), "data", "model"), ((8, 8, 3, 3), "model")],
     "^this convolution sums dimension 1 of x and keeps dimension 0 of w, but model shards both$"),
    (jax.jit(jnp.tanh, out_shardings=P()), [((8, 16), None, "model")],
     r"^out_shardings have model on no dimension, but model shards dimension 1 of .* x\)$"),
    (lambda x: jnp.sort(x, 0)[4] * 2, [((8, 16), "data")], "^(sort|slice) wants dimension 0 of "),
    (led, [((8, 4, 16), "data", "model"), ((16,),)], "^(concatenate wants dimension 1 of|a result .* 5 of) "),
    (
        jax.jit(
            lambda w, m, x: only_asks(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), None, "model") + m,
            out_shardings=P("model"),
        ),
        [((16, 32), None, "model"), ((16, 32), "model"), ((8, 16),)],
        r"^add has model on dimension 0 \(from dimension 0 of m\), but .* dimension 1 of the result of dot_general \(",
    ),
    (lambda x: jax.lax.with_sharding_constraint(by_devices(x), P()), [((8, 16), "model")],
     "has model on no dimension, but .*from out_specs of shard_map in "),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "args", "words", "row"), [(*case, "")[:4] for case in CASES], ids=range(len(CASES)))
def test_a_row_says_what_asks_for_it(fn, args, words, row, explained):
    explanation = explained(fn, *args)
    rows = explanation.collectives
    named = [(" ".join([each.kind, *each.axes, each.cause_kind]), each) for each in rows]
    found = [each for name, each in named if name.endswith(row) and re.search(words, each.cause)]
    assert found == list(rows) if not row else found, f"{explanation}"
    assert all(each.line.startswith("test_compiled_words.py:") and each.cause_kind != "unplaced" for each in rows)
    assert all(len(line) <= 80 for line in str(explanation).splitlines())
    assert "<table>" in explanation._repr_html_()


@jax.checkpoint
def block(w, v, x):
    return jnp.sin(jnp.tanh(x @ w) @ v)


def test_what_a_checkpoint_computes_again_is_no_gradient(rows_of):
    args = [((16, 64), None, "model"), ((64, 16), "model"), ((8, 16),)]
    rows = rows_of(jax.grad(lambda w, v, x: block(w, v, block(w, v, x)).sum(), 2), *args)
    again = [row for row in rows if row.cause.endswith("; jax.checkpoint computes it again for the gradient")]
    assert {(row.line, row.cause_kind) for row in again} == {(line_in(block.__wrapped__, 2), "recomputed")}
    assert all("save_only_these_names" in row.remedy for row in again)
    assert {row.line for row in rows if row.cause.startswith("the gradient of this")} == {line_in(block.__wrapped__, 2)}


def longer(x):
    x = jnp.concatenate([x[:, :1], x], 1)
    return jnp.tanh(x)


def test_a_result_that_no_axis_divides_says_so(rows_of):
    rows = rows_of(longer, ((8, 16), None, "model"))
    (row,) = (row for row in rows if row.cause_kind == "out_shardings")
    assert row.line == line_in(longer, 1)  # this makes the extent; tanh only returns it
    assert re.search(r"^a result is whole, because model does not divide the 17 of dimension 1 of ", row.cause)
    assert row.remedy.startswith("take extents that the axis divides")


def along_a_dimension(x):
    h = jnp.tanh(x)
    last = h[:, -1] * 2
    most = jax.lax.cummax(x, 1)
    near = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3), (1, 1), "SAME")
    return last, most, near, jnp.tile(x, (1, 2))


def asked_ahead(x):
    y = jnp.tanh(x * 2)
    y = jnp.exp(y)
    return jax.lax.with_sharding_constraint(y, P("model")) + 1


def asked_ahead_by_a_result(x):
    return jnp.tanh(x * 2) + 1


def turned_carry(x):
    def body(_, carry):
        carry = jnp.sin(carry)
        return carry.T

    return jax.lax.fori_loop(0, 3, body, x)


def turned_ahead(x):
    def body(_, carry):
        return jnp.exp((carry / 2).T)

    return jax.lax.fori_loop(0, 3, body, x)


def given_otherwise(x):
    def body(_, carry):
        carry = jax.lax.with_sharding_constraint(carry, P("data", "model"))
        carry = jnp.sin(carry)
        return jax.lax.with_sharding_constraint(carry, P(("data", "model")))

    return jax.lax.fori_loop(0, 3, body, x)


def written_otherwise(x):
    x = jax.lax.dynamic_update_slice(x, jnp.ones((1, 16)), (3, 0))
    return jax.lax.with_sharding_constraint(x, P("model")) * 2


def turned_after_writing(x):
    x = x.at[:, 3].set(2.0)
    return x[:, ::-1]


def whole_in_a_branch(x):
    y = jnp.sin(x)
    return jax.lax.cond(x[0, 0] > 0, lambda y: jnp.tanh(jax.lax.with_sharding_constraint(y, P())), jnp.exp, y)


# (function, line and kind of each row's cause)
BLAMED = [
    (along_a_dimension, {(2, "whole"), (3, "whole"), (4, "whole"), (5, "reshape")}),
    (asked_ahead, {(3, "constraint")}),
    (asked_ahead_by_a_result, {(1, "out_shardings")}),
    (turned_carry, {(3, "carry")}),
    (turned_ahead, {(4, "carry")}),
    (turned_after_writing, {(2, "whole")}),
    (written_otherwise, {(2, "constraint")}),
    (given_otherwise, {(4, "constraint"), (4, "carry")}),
]


@pytest.mark.parametrize(("fn", "blamed"), BLAMED, ids=[fn.__name__ for fn, _ in BLAMED])
def test_a_row_names_the_line_that_asks_for_the_data(fn, blamed, rows_of):
    is_asked = fn is asked_ahead_by_a_result
    rows = rows_of(jax.jit(fn, out_shardings=P("model")) if is_asked else fn, ((16, 16), None, "model"))
    assert {(row.line, row.cause_kind) for row in rows} == {(line_in(fn, line), kind) for line, kind in blamed}
    assert {row.cause.split()[0] for row in rows if row.line == line_in(along_a_dimension, 3)} <= {"cummax"}


def test_a_branch_that_asks_is_named(rows_of):
    rows = rows_of(whole_in_a_branch, ((16, 16), None, "model"))
    assert (line_in(whole_in_a_branch, 2), "constraint") in {(row.line, row.cause_kind) for row in rows}, rows


def test_shardings_of_an_exported_function_are_causes(rows_of, mesh_of):
    rows = NamedSharding(mesh_of({"data": 2, "model": 2}, AxisType.Auto), P("model"))
    program = jax.jit(jnp.tanh, in_shardings=rows, out_shardings=rows)
    exported = jax.export.export(program)(jax.ShapeDtypeStruct((8, 16), "float32"))
    (row,) = rows_of(lambda w: exported.call(w), ((8, 16), None, "model"))
    asks = "in_shardings of the exported function have model on dimension 0, but model shards dimension 1 of w"
    assert row.cause == asks


def test_a_remedy_moves_less(rows_of):
    (row, *_) = rows_of(cached, ((8, 16, 4), "data"), ((8, 4), "data"), ints((8,), "data"))
    assert row.remedy.endswith("; or jax.vmap over it, so that each device indexes in its own shard")
    (row, *_) = rows_of(lambda x: sum(jnp.split(x, 3, 1)), ((8, 48), None, "model"))
    assert "reshape to (parts, n)" in row.remedy
    (row,) = rows_of(lambda x, i: x[i], ((64,), "model"), ints((8,)))
    assert (row.cause_kind, row.remedy) == ("whole", "leave dimension 0 of x whole")  # a vector has no other


def rotated(w, x):
    x = jnp.tanh(rotary(x))
    return jnp.sum(x @ w)


def test_rows_of_one_line_and_cause_merge_with_needed_ones_last(explained):
    explanation = explained(jax.grad(rotated), ((16, 4),), ((8, 16), "data", "model"))
    found = {(row.kind, row.line, row.axes, row.cause_kind, row.is_needed) for row in explanation.collectives}
    lines = str(explanation).partition("product ")[0].splitlines()
    assert len(found) <= sum(line.startswith(("test_", "...")) for line in lines) < len(explanation.collectives)
    assert [row.is_needed for row in explanation.collectives].count(True) == 1
    assert str(explanation).index("concatenate wants") < str(explanation).index("\n    needed")


def test_layers_that_one_line_makes_share_a_row_of_the_table(explained):
    explanation = explained(layers, [LAYER] * 3, ((8, 16),))
    assert len({row.cause for row in explanation.collectives}) == 3
    assert "ps[*]['out']" in str(explanation)
    assert str(explanation).count("all-reduce  ") == 1


def two_layers(w, v, x):
    x = jnp.tanh(jnp.einsum("bsd,df->bsf", x, w))
    return jnp.sum(jnp.tanh(jnp.einsum("bsd,df->bsf", x, v)))


def test_sums_that_xla_has_combined_keep_their_lines(rows_of):
    rows = rows_of(jax.grad(two_layers, (0, 1)), ((16, 64),), ((64, 32),), ((4, 8, 16), "data", "model"))
    found = {(row.line, row.axes, "16" in row.shape) for row in rows}
    assert found == {(line_in(two_layers, n), (axis,), n == 1) for n in (1, 2) for axis in ("data", "model")}, rows
