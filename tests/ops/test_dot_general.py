"""`dot_general` and `einsum` against `lax.dot_general`, exactly, on small integers.

What would be silently wrong without it: dimensions put together in another order than they are taken apart, shards that
a reshape has moved between devices, a batch that is summed.
"""

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import calls_of, collectives_of, compiled_text, other_products_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp


def integers(rng, *shape):
    return (rng.integers(1, 4, shape) * rng.choice([-1, 1], shape)).astype(np.float32)


def numbers_of(subscripts):
    """dimension_numbers, and the result's indices in `lax.dot_general`'s order."""
    inputs, output = subscripts.split("->")
    left, right = inputs.split(",")
    batch = [x for x in left if x in right and x in output]
    contracted = [x for x in left if x in right and x not in output]
    numbers = tuple(tuple(tuple(map(side.index, part)) for side in (left, right)) for part in (contracted, batch))
    return numbers, "".join(batch + [x for x in left + right if x not in batch + contracted])


# Whole operands ------------------------------------------------------------------------------------------------

EXTENTS = dict(zip("abcdefg", (2, 3, 4, 5, 6, 7, 1), strict=True))

WHOLE = (
    "ab,bc->ac",
    "ba,bc->ac",
    "ab,cb->ac",
    "ba,cb->ac",
    "abc,cd->abd",
    "abc,bd->acd",
    "cab,cd->abd",
    "abc,cde->abde",
    "abcd,cde->abe",
    "abcd,dce->abe",
    "abcd,ecd->abe",
    "abcd,bde->ace",
    "abd,abe->de",
    "abc,abcd->d",
    "a,a->",
    "a,b->ab",
    "ab,b->a",
    "b,ba->a",
    "ab,cd->abcd",
    "abc,abd->abcd",
    "abc,acd->abd",
    "bac,dca->abd",
    "abcd,abde->abce",
    "abcd,ebda->abce",
    "ga,ab->gb",
    "ag,gb->ab",
)


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize("subscripts", WHOLE)
def test_dimension_numbers(subscripts, implementation, rng):
    cases.require(implementation)
    numbers, _ = numbers_of(subscripts)
    lhs, rhs = (integers(rng, *map(EXTENTS.get, letters)) for letters in subscripts.split("->")[0].split(","))
    got = jaxmp.dot_general(lhs, rhs, numbers, implementation=implementation)
    want = lax.dot_general(lhs, rhs, numbers)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(got, want)


@st.composite
def drawn(draw, extents=(1, 2, 3)):
    """Subscripts of a product with up to two indices of each kind, in any order, and an extent for each index."""
    counts = [draw(st.integers(0, 2)) for _ in range(4)]
    letters = iter("abcdefgh")
    batch, contracted, left, right = ("".join(next(letters) for _ in range(count)) for count in counts)
    lhs = "".join(draw(st.permutations(batch + contracted + left)))
    rhs = "".join(draw(st.permutations(batch + contracted + right)))
    output = "".join(draw(st.permutations(batch + left + right)))
    sizes = {x: draw(st.sampled_from(extents)) for x in batch + contracted + left + right}
    return f"{lhs},{rhs}->{output}", sizes


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(drawn())
def test_drawn_dimension_numbers(case):
    cases.require(None)
    subscripts, sizes = case
    rng = np.random.default_rng(0)
    lhs, rhs = (integers(rng, *map(sizes.get, letters)) for letters in subscripts.split("->")[0].split(","))
    np.testing.assert_array_equal(jaxmp.einsum(subscripts, lhs, rhs), np.einsum(subscripts, lhs, rhs))
    numbers, order = numbers_of(subscripts)
    want = np.einsum(f"{subscripts.split('->')[0]}->{order}", lhs, rhs)
    np.testing.assert_array_equal(jaxmp.dot_general(lhs, rhs, numbers), want)


def test_einsum_reads_ellipses_and_implicit_results(rng):
    cases.require(None)
    a, b = integers(rng, 2, 3, 4), integers(rng, 4, 5)
    for subscripts in ("...d,dk->...k", "abd,dk", "...d,dk", "abd , dk -> kab"):
        np.testing.assert_array_equal(jaxmp.einsum(subscripts, a, b), jnp.einsum(subscripts, a, b))


# On a mesh -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """A product on a 2 x 2 mesh, what it is there, and which collectives it was asked for."""

    id: str
    subscripts: str
    lhs: P
    rhs: P
    out: P
    pattern: str
    collectives: tuple[str, ...] = ()
    can_default: bool = False

    @property
    def operands(self):
        """Indices and sharding of lhs, rhs and the result."""
        return zip(self.subscripts.replace("->", ",").split(","), (self.lhs, self.rhs, self.out), strict=True)

    @property
    def is_batch(self):
        return bool(numbers_of(self.subscripts)[0][1][0])

    def values(self, rng):
        return [integers(rng, *(8 for _ in letters)) for letters, _ in list(self.operands)[:2]]


LAYOUTS = (
    # Activations (batch, seq, d), weights (d, heads, size): sequence parallelism.
    Layout("gather seq", "bsd,dhk->bshk", P("x", "y"), P(None, "y"), P("x", None, "y"), "all_gather"),
    Layout("gather batch", "bsd,dhk->bshk", P(("x", "y")), P(None, "y"), P("x", None, "y"), "all_gather"),
    Layout("gather heads", "bsd,dhk->bshk", P("x", "y"), P(None, "y"), P("x", "y"), "all_gather"),
    Layout("gather size", "bd,dhk->bhk", P("y"), P(None, "x", "y"), P("y", "x"), "all_gather"),
    Layout("scatter seq", "bshk,hkd->bsd", P("x", None, "y"), P("y"), P("x", "y"), "reduce_scatter"),
    Layout("scatter batch", "bshk,hkd->bsd", P("x", None, "y"), P("y"), P(("x", "y")), "reduce_scatter"),
    Layout("scatter columns", "bhk,hkd->bd", P("x", "y"), P("y"), P("x", "y"), "reduce_scatter"),
    Layout("scatter size", "bd,dhk->bhk", P(None, "y"), P("y", "x"), P(None, "x", "y"), "reduce_scatter"),
    Layout("reduce", "bshk,hkd->bsd", P("x", None, None, "y"), P(None, "y"), P("x"), "all_reduce"),
    Layout("reduce over two dimensions", "bsd,bsf->df", P("x", "y"), P("x", "y"), P(), "all_reduce"),
    Layout("scatter over two dimensions", "bsd,bsf->df", P("x", "y"), P("x", "y"), P(("x", "y")), "reduce_scatter"),
    Layout("contraction of one operand", "bshk,hkd->bsd", P("x", None, "y"), P(), P("x", "y"), "reduce_scatter"),
    Layout("a vector", "d,df->f", P("y"), P("y"), P("y"), "reduce_scatter"),
    Layout("an inner product", "ab,ab->", P("x", "y"), P("x", "y"), P(), "all_reduce"),
    Layout("both columns", "bd,dhk->bhk", P(), P(None, "x", "y"), P(None, "x", "y"), "local", can_default=True),
    Layout("an outer product", "ab,cd->abcd", P("x"), P(None, "y"), P("x", None, None, "y"), "local", can_default=True),
    Layout("finer", "bsd,dhk->bshk", P(), P(), P("x", None, None, "y"), "local"),
    Layout(
        "transposed operand", "dbs,khd->bskh", P(None, None, "x"), P("y"), P(None, "x", "y"), "local", can_default=True
    ),
    Layout("gathered rows", "bsd,dk->bsk", P("x", "y"), P(), P("x"), "local", ("all-gather",)),
    Layout("gathered columns", "bd,dhk->bhk", P("x"), P(None, None, "y"), P("x"), "local", ("all-gather",)),
    Layout("grid", "mk,kn->mn", P("x", "y"), P("x", "y"), P("x", "y"), "grid"),
    Layout("grid of transposed operands", "km,nk->mn", P("x", "y"), P("x", "y"), P("x", "y"), "grid"),
    # Batch dimensions.
    Layout("batch", "bhqd,bhkd->bhqk", P("x", "y"), P("x", "y"), P("x", "y"), "local", can_default=True),
    Layout("batch of one operand", "bmk,bkn->bmn", P("x"), P(), P("x"), "local"),
    Layout("finer batch", "bmk,bkn->bmn", P(), P(), P(("x", "y")), "local"),
    Layout("batch, gathered", "mbk,kbn->bmn", P("y", "x"), P(None, "x", "y"), P("x", None, "y"), "all_gather"),
    Layout("batch, scattered", "mkb,bnk->bmn", P(None, "y", "x"), *[P("x", None, "y")] * 2, "reduce_scatter"),
    Layout("batch, reduced", "bmk,bkn->bmn", P("x", None, "y"), P("x", "y"), P("x"), "all_reduce"),
    Layout("batch of grids", "bmk,bkn->bmn", *[P(None, "x", "y")] * 3, "grid"),
)
BY_ID = [pytest.param(layout, id=layout.id) for layout in LAYOUTS]
SOME = [
    pytest.param(layout, id=layout.id)
    for layout in LAYOUTS
    if layout.id
    in (
        "gather seq",
        "scatter size",
        "reduce over two dimensions",
        "transposed operand",
        "batch, gathered",
        "gathered columns",
    )
]
MESH = cases.BY_NAME["local"]


def product_of(layout, function="dot_general", **options):
    numbers, order = numbers_of(layout.subscripts)
    if function == "einsum":
        return lambda a, b: jaxmp.einsum(layout.subscripts, a, b, out_sharding=layout.out, **options)
    assert order == layout.subscripts.split("->")[1], "the result's indices are in dot_general's order"
    return lambda a, b: jaxmp.dot_general(a, b, numbers, out_sharding=layout.out, **options)


def placed(mesh, layout, values):
    return [cases.put(x, mesh, spec) for x, (_, spec) in zip(values, layout.operands, strict=False)]


def check(layout, got, values):
    np.testing.assert_array_equal(np.asarray(got), np.einsum(layout.subscripts, *values))
    wanted = NamedSharding(got.sharding.mesh, layout.out)
    assert got.sharding.is_equivalent_to(wanted, got.ndim), f"{got.sharding.spec} instead of {layout.out}"


@pytest.mark.parametrize("layout", BY_ID)
def test_explicit_axes(layout, rng):
    """Right, placed as asked for, one call of the pattern, and no communication beside it that nobody asked for."""
    cases.require(None)
    values, mesh = layout.values(rng), MESH.jax_mesh()
    with jax.set_mesh(mesh):
        f = product_of(layout, implementation="host" if layout.is_batch else None)  # by itself XLA's: test_batches
        arguments = placed(mesh, layout, values)
        check(layout, jax.jit(f)(*arguments), values)
        text = compiled_text(f, *arguments)
        rows = [row for row in jaxmp.explain(f)(*arguments).rows if row.operation == "matmul"]
    assert calls_of(text) == [layout.pattern]
    assert tuple(collectives_of(text)) == layout.collectives
    assert not other_products_of(text)
    assert [row.pattern for row in rows] == [layout.pattern]


@pytest.mark.parametrize("layout", SOME)
def test_explicit_axes_eager(layout, rng):
    cases.require(None)
    values, mesh = layout.values(rng), MESH.jax_mesh()
    with jax.set_mesh(mesh):
        check(layout, product_of(layout)(*placed(mesh, layout, values)), values)


@pytest.mark.parametrize("layout", [p for p in BY_ID if p.values[0].can_default])
def test_without_out_sharding_as_lax(layout, rng):
    """The result lies where `lax.dot_general` puts it."""
    cases.require(None)
    values, mesh = layout.values(rng), MESH.jax_mesh()
    numbers, _ = numbers_of(layout.subscripts)
    with jax.set_mesh(mesh):
        arguments = placed(mesh, layout, values)
        got = jaxmp.dot_general(*arguments, numbers)
        assert jax.typeof(got).sharding == jax.typeof(lax.dot_general(*arguments, numbers)).sharding
    check(layout, got, values)


@pytest.mark.parametrize("layout", BY_ID)
def test_in_shardings(layout, rng):
    cases.require(None)
    values, mesh = layout.values(rng), MESH.jax_mesh(AxisType.Auto)
    f = product_of(layout, in_shardings=(layout.lhs, layout.rhs), mesh=mesh)
    check(layout, jax.jit(f)(*placed(mesh, layout, values)), values)


@pytest.mark.parametrize("layout", SOME)
def test_in_shardings_eager(layout, rng):
    cases.require(None)
    values, mesh = layout.values(rng), MESH.jax_mesh(AxisType.Auto)
    f = product_of(layout, "einsum", in_shardings=(layout.lhs, layout.rhs), mesh=mesh)
    check(layout, f(*placed(mesh, layout, values)), values)


@pytest.mark.parametrize("layout", [p for p in BY_ID if p.values[0].pattern != "grid"])
def test_bare_jit(layout, rng):
    """XLA's partitioner chooses; `out_sharding` is a constraint."""
    cases.require(None)
    values, mesh = layout.values(rng), MESH.jax_mesh(AxisType.Auto)
    with jax.set_mesh(mesh):
        check(layout, jax.jit(product_of(layout))(*placed(mesh, layout, values)), values)


# Products of shards, as (subscripts, specs of lhs, rhs and the result).
LOCAL = (
    ("bsd,dhk->bshk", P("x", "y"), P(), P("x", "y")),
    ("bhqd,bhkd->bhqk", P("x", "y"), P("x", "y"), P("x", "y")),
    ("sbd,fds->sbf", P("x", "y"), P(None, None, "x"), P("x", "y")),
)


@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize(("subscripts", "lhs", "rhs", "out"), LOCAL, ids=[row[0] for row in LOCAL])
def test_inside_shard_map_the_product_is_local(subscripts, lhs, rhs, out, check_vma, rng):
    cases.require(None)
    layout = Layout("", subscripts, lhs, rhs, out, "local")
    numbers, _ = numbers_of(subscripts)
    values, mesh = layout.values(rng), MESH.jax_mesh(AxisType.Auto)
    body = functools.partial(jaxmp.dot_general, dimension_numbers=numbers)
    f = jax.shard_map(body, mesh=mesh, in_specs=(lhs, rhs), out_specs=out, check_vma=check_vma)
    check(layout, jax.jit(f)(*values), values)
    got = jax.jit(jax.grad(lambda a, b: jnp.sum(f(a, b) ** 2), (0, 1)))(*values)
    want = jax.grad(lambda a, b: jnp.sum(lax.dot_general(a, b, numbers) ** 2), (0, 1))(*values)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(drawn(extents=(4, 8)), st.lists(st.integers(0, 7), min_size=2, max_size=2))
def test_drawn_shardings(case, places):
    """Each mesh axis shards one index, wherever it occurs: contracted ones are summed over, the others stay."""
    cases.require(None)
    subscripts, sizes = case
    inputs, output = subscripts.split("->")
    axes = {}
    for axis, place in zip("xy", places, strict=True):
        if sizes:
            axes.setdefault(sorted(sizes)[place % len(sizes)], []).append(axis)
    specs = [P(*(tuple(axes.get(x, ())) or None for x in letters)) for letters in (*inputs.split(","), output)]
    layout = Layout("", subscripts, *specs, pattern="")
    rng, mesh = np.random.default_rng(0), MESH.jax_mesh()
    values = [integers(rng, *map(sizes.get, letters)) for letters in inputs.split(",")]
    with jax.set_mesh(mesh):
        check(layout, product_of(layout, "einsum")(*placed(mesh, layout, values)), values)


# Transforms ----------------------------------------------------------------------------------------------------


def loss(f):
    return lambda a, b: jnp.sum(f(a, b) ** 2)


@pytest.mark.parametrize("layout", BY_ID)
def test_gradients(layout, rng):
    """Integers stay exact through both gradients of a quadratic loss; each lies as its operand does."""
    cases.require(None)
    values, mesh = layout.values(rng), MESH.jax_mesh()
    with jax.set_mesh(mesh):
        arguments = placed(mesh, layout, values)
        got = jax.jit(jax.grad(loss(product_of(layout)), (0, 1)))(*arguments)
    want = jax.grad(loss(functools.partial(jnp.einsum, layout.subscripts)), (0, 1))(*values)
    for x, y, argument in zip(got, want, arguments, strict=True):
        np.testing.assert_array_equal(np.asarray(x), y)
        assert x.sharding.is_equivalent_to(argument.sharding, x.ndim)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)], ids=["lhs", "rhs", "both"])
@pytest.mark.parametrize("layout", SOME)
def test_vmap(layout, in_axes, rng):
    cases.require(None)
    values, mesh = layout.values(rng), MESH.jax_mesh()
    values = [x if axis is None else np.stack([x, -x, 2 * x]) for x, axis in zip(values, in_axes, strict=True)]
    with jax.set_mesh(mesh):
        arguments = [
            cases.put(x, mesh, spec if axis is None else P(None, *spec))
            for x, axis, (_, spec) in zip(values, in_axes, layout.operands, strict=False)
        ]
        got = jax.jit(jax.vmap(product_of(layout), in_axes))(*arguments)
    want = jax.vmap(functools.partial(jnp.einsum, layout.subscripts), in_axes)(*values)
    np.testing.assert_array_equal(np.asarray(got), want)


def test_types_and_precision_are_those_of_matmul(rng):
    cases.require(None)
    a, b = (integers(rng, 4, 4).astype(jnp.bfloat16) for _ in range(2))
    numbers = (((1,), (0,)), ((), ()))
    assert jaxmp.dot_general(a, b, numbers).dtype == jnp.bfloat16
    wide = jaxmp.dot_general(a, b, numbers, "highest", jnp.float32)
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide, a.astype(np.float32) @ b.astype(np.float32))
    np.testing.assert_array_equal(jaxmp.einsum("ij,jk->ik", a, b, preferred_element_type=jnp.float32), wide)


@pytest.mark.parametrize("shapes", [((0, 4), (4, 8)), ((4, 0), (0, 8)), ((0, 0), (0, 0))], ids=str)
def test_empty_operands(shapes):
    cases.require(None)
    mesh = MESH.jax_mesh()
    lhs, rhs = (np.ones(shape, np.float32) for shape in shapes)
    layout = Layout("", "mk,kn->mn", P("x", "y"), P("y"), P("x"), "all_reduce")
    with jax.set_mesh(mesh):
        check(layout, jax.jit(product_of(layout))(*placed(mesh, layout, (lhs, rhs))), (lhs, rhs))


def test_no_operand_that_is_stored_as_a_product_takes_it_is_copied(rng):
    """Dimensions that lie together, in either order, cost no transposition."""
    cases.require(None)
    for subscripts in ("bsd,dhk->bshk", "bshk,hkd->bsd", "dbs,hkd->bshk", "bsd,bsf->df", "bmk,bnk->bmn"):
        numbers, _ = numbers_of(subscripts)
        lhs, rhs = (integers(rng, *(4 for _ in letters)) for letters in subscripts.split("->")[0].split(","))
        jaxpr = jax.make_jaxpr(functools.partial(jaxmp.dot_general, dimension_numbers=numbers))(lhs, rhs)
        assert "transpose[" not in str(jaxpr), subscripts


def test_explain_counts_the_calls_of_a_batch():
    cases.require(None)
    x = jax.ShapeDtypeStruct((2, 3, 4, 5), "float32")
    (row,) = jaxmp.explain(lambda a, b: jaxmp.einsum("bhqd,bhkd->bhqk", a, b))(x, x).rows
    assert (row.count, row.pattern, row.local_shapes) == (6, "local", ((4, 5), (4, 5), (4, 4)))


@pytest.mark.parametrize("which", ["lhs", "rhs"])
def test_an_operand_that_is_whole_takes_its_part_of_a_sharded_contraction(which, rng):
    """And nothing is gathered, whichever of the two it is."""
    mesh = cases.BY_NAME["local"].jax_mesh()
    lhs, rhs = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((4, 6), (6, 8)))
    specs = {"lhs": (P(None, "x"), P(None, None)), "rhs": (P(None, None), P("x", None))}[which]

    def product(lhs, rhs):
        return jaxmp.dot_general(lhs, rhs, (((1,), (0,)), ((), ())), out_sharding=P(None, None))

    with jax.set_mesh(mesh):
        placed = [cases.put(x, mesh, spec) for x, spec in zip((lhs, rhs), specs, strict=True)]
        (row,) = jaxmp.explain(product)(*placed).rows
        d = jax.jit(product)(*placed)
    assert row.pattern == "all_reduce"
    np.testing.assert_array_equal(np.asarray(d), lhs @ rhs)


def test_operands_that_einsum_puts_the_other_way_round_keep_their_shardings(rng):
    cases.require(None)
    mesh = cases.BY_NAME["local"].jax_mesh(AxisType.Auto)
    a, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((4, 6), (6, 8)))
    options = {"in_shardings": (P(None, "y"), P("x", None)), "out_sharding": P("x", "y"), "mesh": mesh}

    def product(b, a):
        return jaxmp.einsum("kn,mk->mn", b, a, **options)

    placed = cases.put(b, mesh, P(None, "y")), cases.put(a, mesh, P("x", None))
    np.testing.assert_array_equal(np.asarray(jax.jit(product)(*placed)), a @ b)
    assert calls_of(compiled_text(product, *placed)) == ["local"]
