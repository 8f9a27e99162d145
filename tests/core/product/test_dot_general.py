"""`dot_general` and `einsum` against `lax` and `jnp`, exactly, on small integers. Without these tests, dimensions could
be joined and split in different orders, a reshape could move shards between devices, a batch could be summed, and a
diagonal of a sharded operand could be wrong."""

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import calls_of, collectives_of, other_products_of
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp


def integers(rng, *shape):
    return (rng.integers(1, 4, shape) * rng.choice([-1, 1], shape)).astype(np.float32)


def numbers_of(subscripts):
    """Returns dimension_numbers, and the result's indices in `lax.dot_general`'s order."""
    inputs, output = subscripts.split("->")
    left, right = inputs.split(",")
    batch = [x for x in left if x in right and x in output]
    contracted = [x for x in left if x in right and x not in output]
    numbers = tuple(tuple(tuple(map(side.index, part)) for side in (left, right)) for part in (contracted, batch))
    return numbers, "".join(batch + [x for x in left + right if x not in batch + contracted])


EXTENTS = dict(zip("abcdefg", (2, 3, 4, 5, 6, 7, 1), strict=True))
WHOLE = (
    "ab,bc->ac", "ba,bc->ac", "ab,cb->ac", "ba,cb->ac", "abc,cd->abd", "abc,bd->acd",
    "cab,cd->abd", "abc,cde->abde", "abcd,cde->abe", "abcd,dce->abe", "abcd,ecd->abe", "abcd,bde->ace",
    "abd,abe->de", "abc,abcd->d", "a,a->", "a,b->ab", "ab,b->a", "b,ba->a",
    "ab,cd->abcd", "abc,abd->abcd", "abc,acd->abd", "bac,dca->abd", "abcd,abde->abce", "abcd,ebda->abce",
    "ga,ab->gb", "ag,gb->ab",
)  # fmt: skip

# Subscripts that only einsum takes, and the shapes of the operands.
SUBSCRIPTS = {
    "transposed alone": ("ij->ji", (4, 6)),
    "diagonal alone": ("ii->i", (6, 6)),
    "trace": ("ii->", (6, 6)),
    "diagonal": ("iij,jk->ik", (4, 4, 6), (6, 8)),
    "contracted diagonal": ("ijj,jk->ik", (4, 6, 6), (6, 8)),
    "sums of both": ("ij,kl->il", (4, 6), (6, 8)),
    "spaces": (" i j , j k -> i k ", (4, 6), (6, 8)),
    "implicit result": ("ij,jk", (4, 6), (6, 8)),
    "ellipses": ("...ij,...jk->...ik", (2, 1, 4, 6), (3, 6, 8)),
    "broadcast contraction": ("ij,jk->ik", (4, 6), (1, 8)),
    "broadcast batch": ("aij,ajk->aik", (1, 4, 6), (3, 6, 8)),
    "diagonal of which one dimension is broadcast": ("ii,ij->j", (1, 4), (4, 6)),
    "diagonal of unequal extents": ("ii->i", (1, 4)),
    "diagonal of unequal extents, the last of them 1": ("ii,jj->ij", (4, 1), (1, 3)),
    "two diagonals of unequal extents": ("ii,ii->", (1, 4), (1, 4)),
    "vectors": ("i,i->", (6,), (6,)),
    "outer": ("i,j->ij", (4,), (6,)),
    "elementwise": ("ij,ij->ij", (4, 6), (4, 6)),
    "three": ("ij,jk,kl->il", (4, 6), (6, 8), (8, 3)),
    "four": ("a,ab,bc,cd->d", (4,), (4, 6), (6, 8), (8, 3)),
    "three elementwise": ("ij,ij,ij->ij", (4, 6), (4, 6), (4, 6)),
    "three of which two are disjoint": ("ab,ab,c->c", (4, 6), (4, 6), (5,)),
    "three with a diagonal and a sum": ("iij,jk,lm->ikl", (4, 4, 6), (6, 8), (2, 3)),
}


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
def test_dimension_numbers(implementation, rng):
    shapes = [[[EXTENTS[x] for x in side] for side in text.split("->")[0].split(",")] for text in WHOLE]
    operands = [[integers(rng, *shape) for shape in each] for each in shapes]
    others = [[integers(rng, *shape) for shape in each] for _, *each in SUBSCRIPTS.values()]

    def program(library, operands, others, **options):
        dot_general = lax.dot_general if library is jnp else jaxmp.dot_general
        return {
            **{text: dot_general(*x, numbers_of(text)[0], **options) for text, x in zip(WHOLE, operands, strict=True)},
            **{
                name: library.einsum(text, *x) for (name, (text, *_)), x in zip(SUBSCRIPTS.items(), others, strict=True)
            },
        }

    got = jax.jit(functools.partial(program, jaxmp, implementation=implementation))(operands, others)
    want = jax.jit(functools.partial(program, jnp))(operands, others)
    for name, value in want.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A product on a 2 x 2 mesh, the pattern of its call, and the collectives that the shardings ask for."""

    id: str
    subscripts: str
    lhs: P
    rhs: P
    out: P
    pattern: str
    collectives: tuple[str, ...] = ()

    @property
    def operands(self):
        """Returns (indices, sharding) of lhs, rhs and the result."""
        return zip(self.subscripts.replace("->", ",").split(","), (self.lhs, self.rhs, self.out), strict=True)

    def values(self, rng):
        return [integers(rng, *(8 for _ in letters)) for letters, _ in list(self.operands)[:2]]


LAYOUTS = (
    # Activations (batch, seq, d), weights (d, heads, size): sequence parallelism.
    Layout("gather seq", "bsd,dhk->bshk", P("x", "y"), P(None, "y"), P("x", None, "y"), "all_gather"),
    Layout("gather heads", "bsd,dhk->bshk", P("x", "y"), P(None, "y"), P("x", "y"), "all_gather"),
    Layout("gather size", "bd,dhk->bhk", P("y"), P(None, "x", "y"), P("y", "x"), "all_gather"),
    Layout("scatter seq", "bshk,hkd->bsd", P("x", None, "y"), P("y"), P("x", "y"), "reduce_scatter"),
    Layout("scatter columns", "bhk,hkd->bd", P("x", "y"), P("y"), P("x", "y"), "reduce_scatter"),
    Layout("scatter size", "bd,dhk->bhk", P(None, "y"), P("y", "x"), P(None, "x", "y"), "reduce_scatter"),
    Layout("reduce", "bshk,hkd->bsd", P("x", None, None, "y"), P(None, "y"), P("x"), "all_reduce"),
    Layout("reduce over two dimensions", "bsd,bsf->df", P("x", "y"), P("x", "y"), P(), "all_reduce"),
    Layout("scatter over two dimensions", "bsd,bsf->df", P("x", "y"), P("x", "y"), P(("x", "y")), "reduce_scatter"),
    Layout("contraction of one operand", "bshk,hkd->bsd", P("x", None, "y"), P(), P("x", "y"), "reduce_scatter"),
    Layout("whole rhs", "mk,kn->mn", P(None, "x"), P(), P(), "all_reduce"),
    Layout("a vector", "d,df->f", P("y"), P("y"), P("y"), "reduce_scatter"),
    Layout("an inner product", "ab,ab->", P("x", "y"), P("x", "y"), P(), "all_reduce"),
    Layout("transposed operand", "dbs,khd->bskh", P(None, None, "x"), P("y"), P(None, "x", "y"), "local"),
    Layout("gathered rows", "bsd,dk->bsk", P("x", "y"), P(), P("x"), "local", ("all-gather",)),
    Layout("gathered columns", "bd,dhk->bhk", P("x"), P(None, None, "y"), P("x"), "local", ("all-gather",)),
    Layout("grid", "mk,kn->mn", P("x", "y"), P("x", "y"), P("x", "y"), "grid"),
    Layout("grid of transposed operands", "km,nk->mn", P("x", "y"), P("x", "y"), P("x", "y"), "grid"),
    # Batch dimensions.
    Layout("batch", "bhqd,bhkd->bhqk", P("x", "y"), P("x", "y"), P("x", "y"), "local"),
    Layout("batch, gathered", "mbk,kbn->bmn", P("y", "x"), P(None, "x", "y"), P("x", None, "y"), "all_gather"),
    Layout("batch, scattered", "mkb,bnk->bmn", P(None, "y", "x"), *[P("x", None, "y")] * 2, "reduce_scatter"),
    Layout("batch, reduced", "bmk,bkn->bmn", P("x", None, "y"), P("x", "y"), P("x"), "all_reduce"),
    Layout("batch of grids", "bmk,bkn->bmn", *[P(None, "x", "y")] * 3, "grid"),
)
MESH = cases.BY_NAME["local"]


def product_of(layout, **options):
    numbers, order = numbers_of(layout.subscripts)
    assert order == layout.subscripts.split("->")[1], "the result's indices are in dot_general's order"
    return lambda a, b: jaxmp.dot_general(a, b, numbers, out_sharding=layout.out, **options)


def placed(mesh, layout, values):
    return [cases.put(x, mesh, spec) for x, (_, spec) in zip(values, layout.operands, strict=False)]


def check(layout, got, values):
    np.testing.assert_array_equal(np.asarray(got), np.einsum(layout.subscripts, *values))
    wanted = NamedSharding(got.sharding.mesh, layout.out)
    assert got.sharding.is_equivalent_to(wanted, got.ndim), f"{got.sharding.spec} instead of {layout.out}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.id)
def test_explicit_axes(layout, rng):
    values, mesh = layout.values(rng), MESH.jax_mesh()
    with jax.set_mesh(mesh):
        has_batch = bool(numbers_of(layout.subscripts)[0][1][0])
        f = product_of(layout, implementation="host" if has_batch else None)  # default: XLA's (test_batches)
        arguments = placed(mesh, layout, values)
        compiled = jax.jit(f).lower(*arguments).compile()
        check(layout, compiled(*arguments), values)
        rows = [row for row in jaxmp.explain(f)(*arguments).rows if row.operation == "matmul"]
    text = compiled.as_text()
    assert calls_of(text) == [layout.pattern]
    assert tuple(collectives_of(text)) == layout.collectives
    assert not other_products_of(text)
    assert [row.pattern for row in rows] == [layout.pattern]


# Products inside shard_map: (subscripts, specs of lhs, rhs and the result).
LOCAL = (
    ("bsd,dhk->bshk", P("x", "y"), P(), P("x", "y")),
    ("bhqd,bhkd->bhqk", P("x", "y"), P("x", "y"), P("x", "y")),
    ("sbd,fds->sbf", P("x", "y"), P(None, None, "x"), P("x", "y")),
)


@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize(("subscripts", "lhs", "rhs", "out"), LOCAL, ids=[row[0] for row in LOCAL])
def test_inside_shard_map_the_product_is_local(subscripts, lhs, rhs, out, check_vma, rng):
    layout = Layout("", subscripts, lhs, rhs, out, "local")
    numbers, _ = numbers_of(subscripts)
    values, mesh = layout.values(rng), MESH.jax_mesh(AxisType.Auto)
    body = functools.partial(jaxmp.dot_general, dimension_numbers=numbers)
    f = jax.shard_map(body, mesh=mesh, in_specs=(lhs, rhs), out_specs=out, check_vma=check_vma)
    check(layout, jax.jit(f)(*values), values)
    got = jax.jit(jax.grad(lambda a, b: jnp.sum(f(a, b) ** 2), (0, 1)))(*values)
    want = jax.grad(lambda a, b: jnp.sum(lax.dot_general(a, b, numbers) ** 2), (0, 1))(*values)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("shapes", [((0, 4), (4, 8)), ((4, 0), (0, 8)), ((0, 0), (0, 0))], ids=str)
def test_empty_operands(shapes):
    mesh = MESH.jax_mesh()
    lhs, rhs = (np.ones(shape, np.float32) for shape in shapes)
    layout = Layout("", "mk,kn->mn", P("x", "y"), P("y"), P("x"), "all_reduce")
    with jax.set_mesh(mesh):
        operands = placed(mesh, layout, (lhs, rhs))
        check(layout, jax.jit(product_of(layout))(*operands), (lhs, rhs))
        # If the result is empty, also checks each gradient alone, because XLA takes no body of empty operands.
        for i, x in enumerate(operands):
            ct = jax.jit(jax.grad(lambda *xs: jnp.sum(product_of(layout)(*xs)), i))(*operands)
            assert ct.sharding.is_equivalent_to(x.sharding, 2)
            assert ct.shape == x.shape
            assert not ct.size or not np.any(ct)  # JAX 0.10 cannot read shards without elements


def test_operands_that_are_stored_as_needed_are_not_copied(rng):
    for subscripts in ("bsd,dhk->bshk", "bshk,hkd->bsd", "dbs,hkd->bshk", "bsd,bsf->df", "bmk,bnk->bmn"):
        numbers, _ = numbers_of(subscripts)
        lhs, rhs = (integers(rng, *(4 for _ in letters)) for letters in subscripts.split("->")[0].split(","))
        jaxpr = jax.make_jaxpr(functools.partial(jaxmp.dot_general, dimension_numbers=numbers))(lhs, rhs)
        assert "transpose[" not in str(jaxpr), subscripts
