"""`audit` finds operations that differ only when they are compiled together, and recommends only what it has tried.

Without this it would say that something differs and name nothing, or recommend what does not help. Two primitives are
planted that multiply by 1, except where one module holds both and the batch has not 8 rows."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.tools.audit import together
from jaxmp._src.tools.audit.side import Side

audit = functools.partial(jaxmp.audit, quiet=True)
FIRST, SECOND = Primitive("first"), Primitive("second")
MODULES = []  # every module with FIRST


def lower_first(ctx, x):
    MODULES.append(ctx.module_context.module)
    return [x]


def lower_second(ctx, x):
    is_together = ctx.module_context.module in MODULES and ctx.avals_in[0].shape[0] != 8
    factor = np.float32(1 + 2.0**-23 * is_together)
    return mlir.lower_fun(lambda x: x * factor, multiple_results=False)(ctx, x)


for primitive, rule in ((FIRST, lower_first), (SECOND, lower_second)):
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, rule)


def planted(x):
    y = jnp.abs(FIRST.bind(-x))  # nothing that XLA rounds otherwise in another place
    return -SECOND.bind(jnp.maximum(y, 0.5))


def line_of(program, offset):
    return f"test_audit_together.py:{program.__code__.co_firstlineno + offset}"


@pytest.mark.parametrize("wanted", [{0, 39}, {3, 7, 12}, {5}, set(range(18, 24))])
def test_the_smallest_list_is_found_in_few_questions(wanted):
    asked = []

    def differs(items):
        asked.append(items)
        return wanted <= set(items)

    assert together.smallest(differs, range(40)) == sorted(wanted)
    assert len(asked) <= (len(wanted) + 1) * (math.log2(40) + 1)


def test_a_list_that_has_been_seen_to_differ_is_returned():
    """More items may hide a difference again, as where XLA fuses otherwise."""
    differing = []

    def differs(items):
        is_one = {2, 9} <= set(items) and len(items) % 3 != 1
        differing.extend([items] if is_one else [])
        return is_one

    assert together.smallest(differs, range(12)) in differing
    assert together.smallest(lambda _: False, range(12)) == []


def in_a_loop(x):
    return jax.lax.scan(lambda c, _: (jax.jit(planted)(c), None), x, length=2)[0]


@pytest.mark.parametrize("program", [planted, in_a_loop])
def test_what_differs_together_is_named_by_line(program, rng):
    x, given = rng.standard_normal((8, 6)).astype(np.float32), {"xla_cpu_experimental_ynn_fusion_type": ""}
    found = audit(program, compiler_options=given)(x)
    assert not found.rows
    assert [one.variant for one in found.outputs] == ["1 row", "4 rows", "11 rows"]
    first, second = (line_of(planted, offset) for offset in (1, 2))
    assert [one.operations for one in found.together] == [(("first", first), ("second", second))]
    # Nothing helps, so nothing is recommended; what was given is not tried again.
    assert found.trials[0].remedy == 'jaxmp.fuse(fn, determinism="batch")'
    assert {(one.differing, one.outputs) for one in found.trials} == {(1, 1)}
    assert f"jax.jit(fn, compiler_options={given})" not in [one.remedy for one in found.trials]
    text = str(found)
    assert f"\ndiffer if compiled together: first {first}, second {second}" in text
    assert "no remedy is known; tried without success: jaxmp.fuse(" in text
    assert "tried on this program" not in text


def test_a_remedy_that_helps_is_the_last_one_tried(rng, monkeypatch):
    helps = ("that", lambda side: [np.zeros(side.arrays[0].shape, "f")])
    monkeypatch.setattr(together, "_remedies", lambda *_: [("this", Side.whole), helps, ("more", Side.whole)])
    found = audit(planted)(rng.standard_normal((8, 6)).astype(np.float32))
    assert found.trials == (together.Trial("this", 1, 1), together.Trial("that", 0, 1))
    assert "tried on this program: that: 0 of 1 outputs differ then" in str(found)
    assert "without success" not in str(found)


def test_divisions_of_a_mesh_are_equal_or_have_a_remedy(mesh_of, rng):
    """XLA multiplies by the reciprocal of a broadcast divisor, on several devices in some of its divisions only."""
    mesh = mesh_of({"x": 4}, AxisType.Auto)
    x, y = (jax.device_put(rng.standard_normal((32, 64)).astype(np.float32), NamedSharding(mesh, P())) for _ in "xy")

    def program(x, y):
        root = jnp.sqrt(jnp.max(jnp.abs(x), axis=1, keepdims=True))
        return x / root, y / root

    found = audit(program, vary="mesh")(x, y)
    assert not found.rows
    assert bool(found.outputs) == bool(found.trials)
    if found.outputs:
        (piece,) = found.together
        assert set(piece.operations) <= {("div", line_of(program, 2)), ("sqrt", line_of(program, 1))}
        assert found.trials[-1].differing == 0
        assert found.trials[-1].remedy == 'jaxmp.fuse(fn, determinism="topology")'
        found = audit(jaxmp.fuse(program, determinism="topology"), vary="mesh")(x, y)
        assert not found.outputs
