"""Wrong calls of functions other than `matmul`, and of `matmul` on block-cyclic matrices. Without these tests,
dimension numbers, subscripts or layouts that do not fit could give another product, or put an element at a wrong place.
A message begins with the function; " ... " stands for any text."""

import functools
import inspect
import operator
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_block_cyclic import lay, mesh_over
from test_dot_general import MESH, numbers_of

import jaxmp.equinox
import jaxmp.flax
from jaxmp import BlockCyclic

# dot_general, einsum, and products of groups of rows
A3, B3 = np.zeros((4, 6, 8), np.float32), np.zeros((8, 6, 2), np.float32)
PLAIN = (((2,), (0,)), ((), ()))
X, W, S = jnp.ones((6, 4)), jnp.ones((2, 4, 5)), jnp.array([2, 3])
TOKENS, SIZES, BIAS = jnp.ones((8, 4)), jnp.array([3, 0, 4, 0]), jnp.ones((4, 4))
EXPERTS = GATE, UP, DOWN = jnp.ones((4, 4, 4)), jnp.ones((4, 4, 4)), jnp.ones((4, 4, 8))
Y, V = jnp.ones((5, 6)), jnp.ones((6, 8))
MLP, GATED = (Y, V, None, V.T, None), (Y, V, V, V.T)


def numbers(contracting, *ragged, groups=()):
    return lax.RaggedDotDimensionNumbers((contracting, ((), ())), ragged, groups)


ROWS = np.ones((8, 2), np.float32)
MATRICES = numbers(((1,), (1,)), 0, groups=[0])
# (function, arguments, options, exception, message)
WRONG = [
    ("dot_general", ([[1.0]], B3, PLAIN), {}, TypeError, "lhs must be an array, got list"),
    ("dot_general", (A3, B3, ((2,), (0,))), {}, ValueError, "dimension_numbers must be ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), got ((2,), (0,))"),
    ("dot_general", (A3, B3, (((2,), (1,)), ((), ()))), {}, ValueError, "dimension_numbers do not fit lhs of shape (4, 6, 8) and rhs of shape (8, 6, 2):  ... contracting dimensions to have the same shape, got (8,) and (6,)"),
    ("dot_general", (A3, B3, (((-4,), (0,)), ((), ()))), {}, ValueError, "got lhs_batch of () and lhs_contracting of (-4,) for lhs of rank 3"),
    ("einsum", (0, A3, B3), {}, TypeError, "subscripts must be a string such as 'ij,jk->ik', got int"),
    ("einsum", ("abc->abc", A3, B3), {}, ValueError, "subscripts 'abc->abc' are not valid"),
    ("einsum", ("ab,bc->ac", A3, B3), {}, ValueError, "subscripts 'ab,bc->ac' give a 2 indices, but it has 3 dimensions (shape (4, 6, 8))"),
    ("einsum", ("aac,cde->ade", A3, B3), {}, ValueError, "index 'a' has extent 4 in a but 6 in a (shapes (4, 6, 8), (8, 6, 2))"),
    ("einsum", ("abc,bde->acde", A3, B3), {}, ValueError, "index 'b' has extent 6 in a but 8 in b (shapes (4, 6, 8), (8, 6, 2))"),
    ("einsum", ("abc,cde,a->bde", A3, B3, A3[0, 0]), {}, ValueError, "index 'a' has extent 4 in operands[0] but 8 in operands[2]"),
    ("einsum", ("abc,cde,a->bde", A3, B3, None), {}, TypeError, "operands[2] must be an array, got NoneType"),
    ("einsum", (A3, [0, 1], B3, [1, 2]), {}, ValueError, "subscripts [[0, 1], [1, 2]] give a 2 indices, but it has 3 dimensions"),
    ("einsum", ("abc,cde->abz", A3, B3), {}, ValueError, "subscripts 'abc,cde->abz' are not valid: Output character 'z'"),
    ("ragged_dot", (X[0], W, S), {}, ValueError, "x must have 2 dimensions, got 1 (shape (4,))"),
    ("ragged_dot", (X, W[0], S), {}, ValueError, "w must have 3 dimensions, got 2 (shape (4, 5))"),
    ("ragged_dot", (X[:, :3], W, S), {}, ValueError, "w has k=4 but x has k=3 (global shapes (6, 3), (2, 4, 5))"),
    ("ragged_dot", (X, W, S[:1]), {}, ValueError, "group_sizes must have shape (2,) ... got (1,)"),
    ("ragged_dot", (X, W, S[:1], S[:1]), {}, ValueError, "with n of at least 2 ... got"),
    ("ragged_dot", (X, W, S.astype(float)), {}, TypeError, "group_sizes must be an array of integers, got dtype float32"),
    ("ragged_dot", (X, W, S, X[0, 0]), {}, TypeError, "group_offset must be an array of integers, got dtype float32"),
    ("ragged_dot", (X, W, S, S), {}, ValueError, "group_offset must have shape () or (1,), got (2,)"),
    ("ragged_dot", (X.astype(int), W.astype(int), S), {"activation": "relu"}, NotImplementedError, "with a result of int32 activation is None"),
    ("ragged_dot", (X.astype(int), W.astype(int), S), {"implementation": "host"}, NotImplementedError, "XLA multiplies integers other than int8"),
    ("ragged_dot", (X, W, S), {"scaling": 2.0}, TypeError, "scaling must be a jaxmp.Scaling with scales a and b alone, got 2.0"),
    ("ragged_dot", (X, W, S), {"scaling": jaxmp.Scaling(a=X)}, ValueError, "scaling.a must be float32 of shape () or (6,), got float32 (6, 4)"),
    ("ragged_dot", (X, W, S), {"scaling": jaxmp.Scaling(), "bias": W[:, 0], "determinism": "batch"}, NotImplementedError, "takes no bias with scales"),
    ("ragged_dot", (X, W, S), {"precision": "16F"}, NotImplementedError, "precision=16F takes operands of float16, got float32"),
    ("ragged_dot", (X, W, S), {"implementation": "cublasmp"}, NotImplementedError, "has no product of groups"),
    ("ragged_dot", (X, W, S), {"implementation": "xla", "determinism": "batch"}, NotImplementedError, "XLA is asked for"),
    ("ragged_dot", (X, W, S), {"out_sharding": P("p")}, ValueError, "needs a mesh"),
    ("ragged_dot", (X, W, S), {"beta": X}, TypeError, "unexpected keyword argument 'beta'"),
    ("ragged_dot", (X, W, S), {"bias": X[0]}, ValueError, "bias must have shape (2, 5), ... of w, got (4,)"),
    ("ragged_dot", (X.astype("bfloat16"), W.astype("bfloat16"), S), {"bias": W[:, 0]}, TypeError, "bias has dtype float32 but the result has dtype bfloat16"),
    ("ragged_dot", (X, W, S), {"activation": "softmax"}, ValueError, "activation must be one of relu"),
    ("ragged_dot", (X, W, S), {"activation": "silu", "determinism": "batch"}, NotImplementedError, 'takes activation=None or "relu"'),
    ("ragged_dot_general", (X, W, S, PLAIN), {}, ValueError, "must be a jax.lax.RaggedDotDimensionNumbers"),
    ("ragged_dot_general", (X, W, S, numbers(((1,), (1,)), 0, 1, groups=[0])), {}, ValueError, "with one ragged dimension of lhs, got"),
    ("ragged_dot_general", (X, W, S, numbers(((1,), (1,)), 2, groups=[0])), {}, ValueError, "must be one of its 2, got 2"),
    ("ragged_dot_general", (X, W, S, numbers(((1,), (1,)), 0)), {}, ValueError, "must have one free dimension of rhs, got"),
    ("ragged_dot_general", (X, X, S, numbers(((0,), (0,)), 0, groups=[1])), {}, ValueError, "must have no dimension of rhs, got"),
    ("ragged_dot_general", (X[:, :2], W, S, MATRICES), {}, ValueError, "contracting dimensions to have the same shape, got (2,) and (4,)"),
    ("ragged_dot_general", (X, W, S[:1], MATRICES), {}, ValueError, "group_sizes must have shape (2,), got (1,)"),
    ("moe_mlp", (TOKENS, GATE, UP[:, :3], DOWN, SIZES), {}, ValueError, "w_up has k=3 but x has k=4"),
    ("moe_mlp", (TOKENS, GATE[:3], UP, DOWN, SIZES), {}, ValueError, "w_gate must have w_up's shape (4, 4, 4), got (3, 4, 4)"),
    ("moe_mlp", (TOKENS, GATE, UP, DOWN[:, :3], SIZES), {}, ValueError, "w_down must have shape (4, 4, n), got (4, 3, 8)"),
    ("moe_mlp", (TOKENS, *EXPERTS, SIZES[:3]), {}, ValueError, "group_sizes must have shape (4,), ... of w_up, got (3,)"),
    ("moe_mlp", (TOKENS, *EXPERTS, SIZES), {"b_down": BIAS}, ValueError, "b_down must have shape (4, 8), ... of w_down"),
    ("moe_mlp", (TOKENS, None, UP, DOWN, SIZES), {"b_gate": BIAS}, ValueError, "b_gate needs w_gate"),
    ("moe_mlp", (TOKENS, *EXPERTS, SIZES), {"determinism": "batch"}, NotImplementedError, 'takes activation=None or "relu"'),
    ("moe_mlp", (TOKENS, *EXPERTS, SIZES), {"in_shardings": (P(), P())}, ValueError, "must be a triple"),
    ("moe_mlp", (TOKENS.astype(int), *(w.astype(int) for w in EXPERTS), SIZES), {}, NotImplementedError, "with a result of int32 activation is None"),
    ("linear", (X, UP[0]), {"activation": 3}, ValueError, "or a function of an array, got 3"),
    ("linear", (X, UP[0]), {"activation": lambda z: z.sum(0)}, ValueError, "activation must be elementwise"),
    ("linear", (X, UP[0]), {"activation": "silu", "determinism": "batch"}, NotImplementedError, "with determinism='batch' activ"),
    ("mlp", MLP, {"activation": "elu"}, ValueError, "activation must be one of relu, gelu, silu"),
    ("mlp", MLP, {"activation": None}, ValueError, "activation must be a name or a function, got None"),
    ("mlp", MLP, {"activation": "gelu", "alpha": 2.0}, TypeError, "got an unexpected keyword argument 'alpha'"),
    ("mlp", MLP, {"activation": "gelu", "in_shardings": (P(), P())}, ValueError, "in_shardings must be a triple"),
    ("mlp", (Y, V[:5], None, V.T, None), {"activation": "gelu"}, ValueError, "mlp (x @ w_in): w_in has k=5 but x has k=6"),
    ("mlp", (Y, V.T, None, V.T, None), {"activation": "gelu"}, ValueError, "pass w_in.T if it is stored (n, k)"),
    ("mlp", (Y[0, 0], V, None, V.T, None), {"activation": "gelu"}, TypeError, "x must have at least 2 dimensions, got 0"),
    ("gated_mlp", GATED, {"axis_name": "model"}, ValueError, "gated_mlp: works on the shards inside shard_map"),
    ("gated_mlp", GATED, {"determinism": "batch"}, NotImplementedError, 'determinism must be "run_to_run"'),
    ("gated_mlp", (Y, V, V[:5], V.T), {}, ValueError, "gated_mlp (x @ w_up): w_up has k=5 but x has k=6"),
    ("gated_mlp", (Y, V, V[:, :7], V.T), {}, ValueError, "gated_mlp: w_up must have w_gate's shape (6, 8), got (6, 7)"),
    ("gated_mlp", (Y, V, V, V.T[:7]), {}, ValueError, "gated_mlp (hidden @ w_down): w_down has k=7 but hidden has k=8"),
    ("audit", (ROWS,), {}, TypeError, "audit: takes a function, got ndarray; write audit(fn)(*args)"),
    ("audit", (jnp.sin, ROWS), {"vary": "rows"}, ValueError, '"batch", "mesh" or "processes", got \'rows\''),
    ("audit", (jnp.sin, ROWS), {"vary": "mesh", "batch_argnums": 0}, ValueError, 'batch_argnums is for vary="batch"'),
    ("audit", (jnp.sin, ROWS), {"vary": "processes"}, ValueError, "a job of several, got no mesh of 0 of 1; start the job"),
    ("audit", (jnp.sin, ROWS), {"vary": "mesh"}, ValueError, "operands on one mesh of at least 2 devices, got no mesh"),
    ("audit", (jnp.sin, jax.ShapeDtypeStruct((8,), "float32")), {}, TypeError, "takes arrays, got ShapeDtypeStruct"),
    ("audit", (lambda: 1,), {}, ValueError, "needs an argument with arrays, got none"),
    ("audit", (jnp.sin, ROWS[:1]), {}, ValueError, "one batch of at least 2 rows, got first extents [1]"),
    ("audit", (jnp.sin, ROWS), {"batch_argnums": "x"}, ValueError, "number some of the 1 arguments, got 'x'"),
    ("audit", (jnp.add, ROWS, ROWS[:2]), {"batch_argnums": (0, 1)}, ValueError, "got first extents [2, 8]; pass batch_argnums="),
    ("audit", (lambda x: jax.new_ref(x)[...], ROWS), {}, NotImplementedError, "mutable arrays, found get of one at test_functions.py:"),
    ("audit", (jnp.sin, ROWS), {"vry": "mesh"}, TypeError, "did you mean vary=?"),
]  # fmt: skip


def check_refused(call, function, exception, message):
    with pytest.raises(exception) as raised:
        call()
    assert str(raised.value).startswith((f"{function}: ", f"{function}() ", f"{function} ("))
    for part in message.split(" ... "):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("function", "arguments", "options", "exception", "message"), WRONG, ids=[f"{row[0]}: {row[-1]}" for row in WRONG]
)
def test_wrong_arguments(function, arguments, options, exception, message, standard_promotion):
    call = functools.partial(getattr(jaxmp, function), *arguments, **options)
    if function == "audit":
        fn, *arguments = arguments

        def call():
            jaxmp.audit(fn, **options)(*arguments)

    check_refused(call, function, exception, message)


class Nothing:
    """A value that no argument accepts."""


CALLS = {
    "matmul": (X, UP[0]),
    "linear": (X, UP[0]),
    "dot_general": (X, UP[0], (((1,), (0,)), ((), ()))),
    "mlp": (X, UP[0], None, UP[0], None),
    "gated_mlp": (X, UP[0], UP[0], UP[0]),
    "moe_mlp": (TOKENS, *EXPERTS, SIZES),
    "ragged_dot": (X, W, S),
    "ragged_dot_general": (X, W, S, MATRICES),
    "ragged_all_to_all": (X, X, S, S, S, S),
}
NEEDED = {"mlp": {"activation": "relu"}, "ragged_all_to_all": {"axis_name": "x"}}


@pytest.mark.parametrize("name", CALLS)
def test_each_wrong_argument_is_named(name):
    parameters = inspect.signature(getattr(jaxmp, name)).parameters.values()
    given = dict(zip((each.name for each in parameters), CALLS[name], strict=False)) | NEEDED.get(name, {})
    for argument in {each.name for each in parameters} - {"axis_index_groups"}:  # depends on the axis
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
            getattr(jaxmp, name)(**given | {argument: Nothing()})
        assert re.match(rf"{name}( \(.*?\))?: .*{argument}", str(raised.value)), (argument, str(raised.value))


LAYERS = {
    "flax.Linear": ({"activation": Nothing()}, {"inputs": X[:, :3]}, {"out_sharding": Nothing()}),
    "flax.MoE": ({"activation": 1}, {"determinism": 1}, {"scores": 1}, {"top_k": "1"}, {"inputs": X[:, :3]}),
    "equinox.Linear": ({"activation": Nothing()}, {"x": X[:, :3]}, {"out_sharding": Nothing()}),
    "equinox.MoE": ({"activation": 1}, {"determinism": 1}, {"scores": 1}, {"top_k": "1"}, {"x": X[:, :3]}, {"x": 1}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_name_themselves(name):
    layer = operator.attrgetter(name)(jaxmp)
    of_layer = {"rngs": nnx.Rngs(0)} if "flax" in name else {"key": jax.random.key(0)}
    of_layer |= {"num_experts": 4, "top_k": 2} if "MoE" in name else {}
    for wrong in LAYERS[name]:
        (argument,) = wrong
        is_of_call = argument in ("inputs", "x", "out_sharding")
        x = {"inputs" if "flax" in name else "x": X}
        with pytest.raises((TypeError, ValueError), match=rf"^jaxmp\.{name}: .*{argument}"):
            layer(4, 4, **(of_layer if is_of_call else of_layer | wrong))(**(x | wrong if is_of_call else x))


M = np.ones((4, 6), np.float32)
SQUARE, TURNED = BlockCyclic((2, 2), (2, 3)), BlockCyclic((2, 2), (3, 2))


def laid(x=M, layout=SQUARE, grid=(2, 2), **options):
    return lay(x, layout, **{"mesh": mesh_over(grid)} | options)


def product(b=None, **options):
    return jaxmp.matmul(laid(), laid(M.T, TURNED) if b is None else b, **options)


def with_c():
    c = laid(np.ones((4, 4), np.float32), BlockCyclic((2, 2), (2, 2), (1, 0)))
    return product(c=c, beta=1.0, out_sharding=BlockCyclic((2, 2), (2, 2)))


def inside_shard_map():
    return jax.shard_map(lambda x: laid(x).data, mesh=mesh_over((2, 2)), in_specs=P("x", "y"), out_specs=P("x", "y"))(M)


# (call, function, exception, message)
WRONG_LAYOUTS = [
    (lambda: BlockCyclic((2, 2), (0, 1)), "BlockCyclic", ValueError, "block must be a pair of integers of at least 1, got (0, 1)"),
    (lambda: BlockCyclic((2, 2), (1.5, 1)), "BlockCyclic", TypeError, "block must be a pair of integers, got (1.5, 1)"),
    (lambda: BlockCyclic((2, 2), (1, 1), (2, 0)), "BlockCyclic", ValueError, "first=(2, 0) must be a process of the grid (2, 2)"),
    (lambda: laid(layout=(2, 2)), "to_block_cyclic", TypeError, "layout must be a jaxmp.BlockCyclic, got tuple"),
    (lambda: laid([[1.0]]), "to_block_cyclic", TypeError, "x must be an array, got list"),
    (lambda: laid(M[0]), "to_block_cyclic", ValueError, "x must have 2 dimensions, got 1 (shape (6,))"),
    (lambda: laid(mesh=None), "to_block_cyclic", ValueError, "there is no mesh; pass mesh="),
    (lambda: laid(axes="xy"), "to_block_cyclic", ValueError, "axes must be a pair, the mesh axes of the process rows"),
    (lambda: laid(axes=("x", "z")), "to_block_cyclic", ValueError, "axis 'z' is not in the mesh, which has ('x', 'y')"),
    (lambda: laid(axes=("x", "x")), "to_block_cyclic", ValueError, "axis names ('x', 'x') repeat"),
    (lambda: laid(layout=BlockCyclic((2, 4), (1, 1))), "to_block_cyclic", ValueError, "layout has the grid (2, 4) but the mesh axes (('x',), ('y',)) have (2, 2)"),
    (lambda: jaxmp.to_block_cyclic(laid(), BlockCyclic((1, 4), (2, 3))), "to_block_cyclic", ValueError, "x is on a (2, 2) grid but layout has (1, 4)"),
    (inside_shard_map, "to_block_cyclic", ValueError, "takes global arrays, so it cannot be called inside shard_map"),
    (lambda: jaxmp.from_block_cyclic(M), "from_block_cyclic", TypeError, "x must be a jaxmp.BlockCyclicArray, got ndarray"),
    (lambda: product(jnp.asarray(M.T)), "matmul", TypeError, "b must be a jaxmp.BlockCyclicArray as the other operands are, got"),
    (lambda: product(laid(layout=TURNED)), "matmul", ValueError, "b has k=4 but a has k=6 (global shapes (4, 6), (4, 6))"),
    (lambda: product(laid(M.T, BlockCyclic((2, 2), (2, 2)))), "matmul", ValueError, "along k, a has blocks of 3 but b has 2; they must be equal: put b in blocks of 3, or a in blocks of 2"),
    (lambda: product(laid(M.T, BlockCyclic((1, 4), (3, 2)), (1, 4))), "matmul", ValueError, "a is on axes (('x',), ('y',)) of mesh {'x': 2, 'y': 2} but b on"),
    (lambda: product(out_sharding=P("x", "y")), "matmul", TypeError, "out_sharding must be a jaxmp.BlockCyclic, got P"),
    (lambda: product(out_sharding=BlockCyclic((2, 2), (4, 2))), "matmul", ValueError, "along m, a has blocks of 2 but the result has 4; they must be equal"),
    (lambda: product(out_sharding=BlockCyclic((2, 2), (2, 5))), "matmul", ValueError, "along n, b has blocks of 2 but the result has 5"),
    (lambda: product(out_sharding=BlockCyclic((4, 1), (2, 2))), "matmul", ValueError, "out_sharding has the grid (4, 1) but a is on (2, 2)"),
    (lambda: product(epilog=jaxmp.Epilog.RELU), "matmul", NotImplementedError, "epilog is not available for block-cyclic operands; leave it out"),
    (lambda: product(in_shardings=(P(), P())), "matmul", NotImplementedError, "in_shardings is not available for block-cyclic operands"),
    (lambda: product(beta=1.0), "matmul", ValueError, "beta=1.0 was given without c"),
    (lambda: product(conjugate_a=True), "matmul", TypeError, "conjugate_a=True needs a complex operand"),
    (lambda: product(comm=jaxmp.CommOptions(algorithm="split_p2p")), "matmul", ValueError, "comm.algorithm='split_p2p' needs the pattern"),
    (with_c, "matmul", ValueError, "c has the layout BlockCyclic(grid=(2, 2), block=(2, 2), first=(1, 0)) but the result"),
    # Otherwise NumPy would make an array of one object.
    (lambda: np.asarray(laid()), "BlockCyclicArray", TypeError, "is not an array in the global order; pass jaxmp.from_block_cyclic"),
    (lambda: jaxmp.einsum("ij,jk->ik", laid(), laid()), "einsum", TypeError, "a must be an array, got BlockCyclicArray"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "function", "exception", "message"), WRONG_LAYOUTS, ids=[f"{row[1]}: {row[-1]}" for row in WRONG_LAYOUTS]
)
def test_wrong_layouts(call, function, exception, message):
    check_refused(call, function, exception, message)


# id: (subscripts, specs of lhs, rhs and the result, message)
WRONG_SHARDINGS = {
    "contraction without out_sharding": ("bsd,dhk->bshk", P(None, None, "x"), P("x"), None, "dot_general: the contraction is sharded over axis 'x' and it is ambiguous how the result should be sharded; pass out_sharding"),
    "batches disagree": ("bmk,bkn->bmn", P("x"), P("y"), None, "dot_general: batch dimension 0 of lhs is sharded over 'x' but dimension 0 of rhs over 'y'; pass out_sharding, or reshard one of them"),
    "not divided": ("bsd,dhk->bshk", P(), P(), P(None, None, None, ("x", "y")), "dot_general: dimension 3 of the result has extent 2, which axis ('x', 'y') of size 4 does not divide"),
}  # fmt: skip


@pytest.mark.parametrize(("subscripts", "lhs", "rhs", "out", "message"), WRONG_SHARDINGS.values(), ids=WRONG_SHARDINGS)
def test_wrong_sharding(subscripts, lhs, rhs, out, message):
    extents = {"k": 2} if "h" in subscripts else {}
    a, b = (np.zeros([extents.get(x, 4) for x in side], np.float32) for side in subscripts.split("->")[0].split(","))
    mesh = MESH.jax_mesh()
    dims, _ = numbers_of(subscripts)
    a, b = cases.put(a, mesh, lhs), cases.put(b, mesh, rhs)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=re.escape(message)):
        jaxmp.dot_general(a, b, dims, out_sharding=out)


def test_out_sharding_inside_shard_map():
    mesh = MESH.jax_mesh(AxisType.Auto)
    body = functools.partial(jaxmp.dot_general, dimension_numbers=PLAIN, out_sharding=P())
    with pytest.raises(ValueError, match="dot_general: out_sharding was given inside shard_map, where operands are"):
        jax.shard_map(body, mesh=mesh, in_specs=(P(), P()), out_specs=P())(A3, B3)
