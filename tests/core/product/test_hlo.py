"""The compiled program: our calls, and no collective that was not asked for. Values cannot show this: if XLA gathers
operands first, the product is right, and as slow as without jaxmp."""

import functools
import re
from collections import Counter

import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
import transfers
from compiled import calls_of, collectives_of, compiled_text, other_products_of
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog
from jaxmp._src.platform.runtime import native

# Case: what forward, gradient in a and gradient in b compile to, as (patterns of our calls, XLA's collectives). A
# gathered product's gradient in its rows is a reduce-scatter, and the reverse. The other gradient contracts over
# gathered rows: one all-gather that explain names. If data-parallel groups share an operand, the sum over them is part
# of the call ("all_reduce"). The transpose of a grid is a grid.
COMPILED = {
    "local": ((["local"], []), (["all_reduce"], []), (["all_reduce"], [])),
    # Slicing a replicated operand needs no communication; its gradient must become replicated again.
    "local-sliced": ((["local"], []), (["all_reduce"], ["all-gather"]), (["all_reduce"], ["all-gather"])),
    "ag": ((["all_gather"], []), (["reduce_scatter"], []), (["local"], ["all-gather"])),
    "ag-data": ((["all_gather"], []), (["reduce_scatter"], []), (["all_reduce"], ["all-gather"])),
    "ag-two-axes": ((["all_gather"], []), (["reduce_scatter"], []), (["local"], ["all-gather"])),
    "ag-transposed": ((["all_gather"], []), (["local"], ["all-gather"]), (["reduce_scatter"], [])),
    "rs": ((["reduce_scatter"], []), (["all_gather"], []), (["local"], ["all-gather"])),
    "rs-data": ((["reduce_scatter"], []), (["all_gather"], []), (["all_reduce"], ["all-gather"])),
    "rs-two-axes": ((["reduce_scatter"], []), (["all_gather"], []), (["local"], ["all-gather"])),
    "rs-transposed": ((["reduce_scatter"], []), (["local"], ["all-gather"]), (["all_gather"], ["all-reduce"])),
    "ar": ((["all_reduce"], []), (["local"], []), (["local"], [])),
    "ar-data": ((["all_reduce"], []), (["local"], []), (["all_reduce"], [])),
    "ar-two-axes": ((["all_reduce"], []), (["local"], []), (["local"], [])),
    "grid": ((["grid"], []), (["grid"], []), (["grid"], [])),
    "grid-2x4": ((["grid"], []), (["grid"], []), (["grid"], [])),
    # Each device multiplies its part and the result is gathered; otherwise each would compute the whole result.
    "gather-a": ((["local"], ["all-gather"]), (["local"], []), (["all_reduce"], [])),
    "gather-b": ((["local"], ["all-gather"]), (["all_reduce"], []), (["local"], [])),
}
PROGRAMS = ("forward", "gradient in a", "gradient in b")


def programs(mode, case, **options):
    """Returns (program, arguments) by name; the gradients are gradients of a weighted sum."""
    rng = np.random.default_rng(0)
    m, n, _ = case.extents
    a, b = (mode.put(case, x, s) for x, s in zip(case.values(rng), case.stored, strict=True))
    w = mode.put(case, cases.normal(rng, (m, n), case.dtype), case.out)
    f = mode.product(case, **options)

    def gradient(argument):
        return lambda a, b, w: jax.grad(lambda a, b: jnp.sum(w * f(a, b)), argument)(a, b)

    return dict(zip(PROGRAMS, ((f, (a, b)), (gradient(0), (a, b, w)), (gradient(1), (a, b, w))), strict=True))


EVERY = [cases.BY_NAME[name] for name in COMPILED]
CALLS = modes.pairs([modes.BY_ID["explicit"]], EVERY)
# On auto axes XLA chooses the sharding of a replicated operand's gradient, so no gather is needed.
CALLS += modes.pairs([modes.BY_ID["in_shardings"]], [case for case in EVERY if case.name != "local-sliced"])
CALLS += modes.pairs([modes.BY_ID["shard_map"]], cases.MATRIX)


def of_calls(mode, case, name):
    return (case.name, name), (mode.id, case.pattern, case.computes_transposed, name)


@pytest.mark.small("values", of=of_calls)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(("mode", "case"), CALLS)
def test_calls_and_collectives(mode, case, name):
    case = case.replace(per_shard=(4, 4, 4))
    with mode.scope(case):
        program, arguments = programs(mode, case)[name]
        rows, compiled = transfers.check(program, *arguments)
        text = compiled.as_text()
    calls, collectives = COMPILED[case.name][PROGRAMS.index(name)]
    assert calls_of(text) == calls
    assert collectives_of(text) == collectives
    assert not other_products_of(text)
    named = Counter(row.operation.replace("_", "-") for row in rows if not row.operation.startswith("matmul"))
    named["all-gather"] += named.pop("reshard", 0)
    assert +named == Counter(collectives), "explain names every collective, and no other"
    assert sorted(row.pattern for row in rows if row.operation.startswith("matmul")) == calls


@pytest.mark.small("values")
@pytest.mark.parametrize("transposition", cases.TRANSPOSITIONS)
@pytest.mark.parametrize("case", cases.by_id([case for case in cases.MATRIX if not case.gathers]))
def test_no_forward_product_communicates_beside_the_call(case, transposition):
    case = case.replace(transposition=transposition, per_shard=(4, 4, 4))
    mode = modes.BY_ID["in_shardings"]
    program, arguments = programs(mode, case, epilog=Epilog.GELU)["forward"]
    text = compiled_text(program, *arguments)
    assert calls_of(text) == [case.pattern]
    assert not collectives_of(text)


@pytest.mark.small("values", of=lambda case, name: (case.name, (case.pattern, name)))
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("case", cases.by_id([case for case in cases.CASES if case.ndevices > 1]))
def test_xla_is_made_of_collectives_and_no_call(case, name):
    case = case.replace(per_shard=(4, 4, 4))
    mode = modes.BY_ID["explicit"]
    with mode.scope(case):
        program, arguments = programs(mode, case, implementation="xla")[name]
        _, compiled = transfers.check(program, *arguments)
    text = compiled.as_text()
    assert not calls_of(text)
    assert name != "forward" or bool(collectives_of(text)) == (not case.name.startswith("local"))


# A grid's call contains the sum if b is stored (k, n).
BIASED = [(name, "NN") for name in ("local", "ag-data", "rs-data", "ar-data", "ag", "ar", "grid")]
BIASED += [(name, "NT") for name, _ in BIASED[:-1]]


@pytest.mark.parametrize(("name", "transposition"), BIASED)
def test_the_gradient_of_a_bias_is_a_part_of_the_weight_gradient(name, transposition):
    case, mode = cases.BY_NAME[name].replace(per_shard=(4, 4, 4), transposition=transposition), modes.BY_ID["explicit"]
    calls, collectives = COMPILED[case.name][2]
    with mode.scope(case):
        _, (a, b, w) = programs(mode, case)["gradient in b"]
        bias = mode.put(case, np.ones(case.extents[1], np.float32), case.spec_of("bias"))
        f = mode.product(case, epilog=Epilog.BIAS)
        gradient = jax.grad(lambda b, bias: jnp.sum(w * f(a, b, bias=bias)), (0, 1))
        text, rows = compiled_text(gradient, b, bias), jaxmp.explain(gradient, quiet=True)(b, bias).rows
    assert [row.epilog for row in rows if row.pattern in calls][-1] == ("BGRADB" if transposition == "NN" else "BGRADA")
    assert calls_of(text) == calls
    assert collectives_of(text) == collectives
    assert not other_products_of(text)


def test_a_profile_names_what_a_call_computes():
    a, b = np.ones((6, 4), np.float32), np.ones((4, 5), np.float32)
    for level, kernel in (("run_to_run", native.kernel_of("f32")), ("topology", "one order of sums")):
        text = compiled_text(lambda a, b, level=level: jaxmp.matmul(a, b, determinism=level), a, b)
        call = next(line for line in text.splitlines() if f'custom_call_target="{native.TARGET}"' in line)
        assert f"/jaxmp local 6x4x5 f32*f32->f32 {level} ({kernel})/" in call


def test_a_call_whose_result_is_not_used_is_removed():
    a, b = jnp.ones((8, 8)), jnp.ones((8, 8))

    def program(a, b):
        jaxmp.matmul(a, a)
        return jaxmp.matmul(a, b) + jaxmp.matmul(a, b)

    assert calls_of(compiled_text(program, a, b)) == ["local"]


def test_batched_weights_and_biases_are_one_call():
    a, b, bias = jnp.ones((8, 4)), jnp.ones((3, 4, 5)), jnp.ones((3, 5))
    f = jax.vmap(lambda b, bias: jaxmp.linear(a, b, bias))
    text = compiled_text(f, b, bias)
    assert calls_of(text) == ["local"]
    assert "while" not in text


@pytest.mark.parametrize(
    ("id_", "name"), [("explicit", "local"), ("explicit", "rs-data"), ("shard_map", "rs-data"), ("no-mesh", "local")]
)
def test_a_policy_that_saves_products_saves_ours(id_, name):
    """It also saves JAX's own products, in fused functions too."""
    case, mode = cases.BY_NAME[name].replace(per_shard=(4, 4, 4)), modes.BY_ID[id_]
    with mode.scope(case):
        _, (a, b) = programs(mode, case)["forward"]
        product = mode.product(case, epilog=Epilog.GELU)

        def products(wrap):
            layer = wrap(lambda a, b: jnp.sin(product(a, b)))
            return sum(
                row.operation.startswith("matmul")
                for row in jaxmp.explain(jax.grad(lambda a, b: jnp.sum(layer(a, b) ** 2), (0, 1)))(a, b).rows
            )

        kept, kept_too, again = (
            products(functools.partial(jax.checkpoint, policy=policy))
            for policy in (jaxmp.dots_saveable, jax.checkpoint_policies.dots_saveable, None)
        )
        assert kept == kept_too == products(lambda f: f) == again - 1
    assert jaxmp.dots_saveable(jax.lax.dot_general_p)


def test_the_packed_mask_is_the_residual_of_relu():
    """The backward pass keeps one bit per element, not the value before the activation."""
    a, b = jnp.ones((64, 48)), jnp.ones((48, 256))
    _, pullback = jax.vjp(lambda a, b: jaxmp.matmul(a, b, epilog=Epilog.RELU), a, b)
    kept = Counter((x.shape, x.dtype.name) for x in jax.tree.leaves(pullback) if x.shape not in (a.shape, b.shape))
    assert kept == {((64, 256 // 8), "uint8"): 1}


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]], ids=str)
def test_a_program_of_one_call_has_nothing_to_compile(order, rng):
    """XLA starts LLVM for any operation of its own, which took a third of the compile time of such a program."""
    mesh = Mesh(np.array(jax.devices())[order].reshape(2, 2), ("y", "x"), axis_types=(AxisType.Explicit,) * 2)
    operands = (
        cases.put(cases.integers(rng, *shape), mesh, spec)
        for shape, spec in (((8, 6), P("y", "x")), ((6, 4), P("x", None)))
    )
    product = functools.partial(jaxmp.matmul, out_sharding=NamedSharding(mesh, P("y", None)), implementation="host")
    operations = set(re.findall(r"^ *(?:ROOT )?%\S+ = \S+ ([\w-]+)\(", compiled_text(product, *operands), re.MULTILINE))
    assert operations == {"parameter", "partition-id", "custom-call"}
