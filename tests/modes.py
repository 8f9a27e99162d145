"""The ways to call the library: one `Mode` per row of docs/matmul.md's table, named like its test ids."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import cases
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.core.spec import epilogs

# The function for each pattern inside shard_map.
IN_SHARD_MAP = {
    "local": lambda case: jaxmp.matmul,
    "all_gather": lambda case: functools.partial(jaxmp.all_gather_matmul, axis_name=case.group),
    "reduce_scatter": lambda case: functools.partial(jaxmp.matmul_reduce_scatter, axis_name=case.group),
    "all_reduce": lambda case: functools.partial(jaxmp.matmul_all_reduce, axis_name=case.group),
    "grid": lambda case: functools.partial(jaxmp.block_matmul, axis_names=tuple(case.a)),
}


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to call a product; `product(case)` is f(a, b, c=None, bias=None, **epilog_inputs) on arrays placed by
    `put`."""

    id: str
    product: Callable
    is_jitted: bool = True
    axis_type: AxisType | None = AxisType.Auto

    def serves(self, case: cases.Case) -> bool:
        """True if this mode can express the case."""
        if self.axis_type is None:
            return case.name == "local"
        if self.id.startswith("shard_map"):
            return not (case.computes_transposed or case.gathers or case.name == "local-sliced")
        return True

    @contextlib.contextmanager
    def scope(self, case: cases.Case):
        if self.axis_type == AxisType.Explicit:
            with jax.set_mesh(case.jax_mesh()):
                yield
        else:
            yield

    def put(self, case: cases.Case, x: np.ndarray, spec: P, ahead: int = 0):
        """Puts `x` in the case's sharding; `ahead` counts leading dimensions, which are not sharded."""
        if self.axis_type is None:
            return jax.device_put(x)
        return cases.put(x, case.jax_mesh(self.axis_type), P(*(None,) * ahead, *spec))

    def run(self, program: Callable, *args):
        return (jax.jit(program) if self.is_jitted else program)(*args)


def _inputs(bias, more) -> dict:
    inputs = more if bias is None else more | {"bias": bias}
    return {"epilog_inputs": inputs} if inputs else {}


def _matmul(case, options, **where):
    def product(a, b, c=None, bias=None, **more):
        flags = case.transpose | case.conjugate | _inputs(bias, more) | options
        return jaxmp.matmul(a, b, c, **flags, **where)

    return product


def with_types(case, **options):
    """Returns a product that takes shardings from the operands' types."""
    return _matmul(case, options, out_sharding=case.out)


def with_in_shardings(case, **options):
    mesh = case.jax_mesh(AxisType.Auto)
    return _matmul(case, options, in_shardings=case.stored, out_sharding=case.out, mesh=mesh)


def with_nothing(case, **options):
    """Returns a product for XLA's partitioner, which chooses; `out_sharding` is a constraint."""
    return _matmul(case, options, out_sharding=NamedSharding(case.jax_mesh(AxisType.Auto), case.out))


def without_mesh(case, **options):
    return _matmul(case, options)


def in_shard_map(case, check_vma=True, **options):
    fn = IN_SHARD_MAP[case.pattern](case)
    epilog = options.get("epilog", jaxmp.Epilog.NONE) & ~jaxmp.Epilog.ALLREDUCE
    outputs = epilogs.RULES[jaxmp.Epilog(epilog)].outputs
    out_specs = (case.out, {name: case.spec_of(name) for name in outputs}) if outputs else case.out
    rows = () if case.out[0] is None else (case.out[0],) if isinstance(case.out[0], str) else case.out[0]
    data_axes = tuple(axis for axis in rows if axis not in case.group)

    def body(a, b, extra):
        out = fn(a, b, c=extra.pop("c", None), **case.transpose, **case.conjugate, **_inputs(None, extra), **options)
        for name in outputs:
            if name in ("drelu_bgrad", "dgelu_bgrad") and data_axes:  # the call sums over its own group only
                out[1][name] = jax.lax.psum(out[1][name], data_axes)
        return out

    def product(a, b, c=None, bias=None, **more):
        extra = {name: x for name, x in ({"c": c, "bias": bias} | more).items() if x is not None}
        specs = {"in_specs": (*case.stored, {name: case.spec_of(name) for name in extra}), "out_specs": out_specs}
        mapped = jax.shard_map(body, mesh=case.jax_mesh(AxisType.Auto), check_vma=check_vma, **specs)
        return mapped(a, b, extra)

    return product


MODES = (
    Mode("explicit", with_types, axis_type=AxisType.Explicit),
    Mode("explicit-eager", with_types, is_jitted=False, axis_type=AxisType.Explicit),
    Mode("in_shardings", with_in_shardings),
    Mode("in_shardings-eager", with_in_shardings, is_jitted=False),
    Mode("partitioner", with_nothing),
    Mode("shard_map", in_shard_map),
    Mode("shard_map-unchecked", functools.partial(in_shard_map, check_vma=False)),
    Mode("no-mesh", without_mesh, axis_type=None),
    Mode("no-mesh-eager", without_mesh, is_jitted=False, axis_type=None),
)
BY_ID = {mode.id: mode for mode in MODES}


def pairs(some_modes, some_cases):
    """Returns `parametrize` arguments (mode, case) for every case that the mode can express."""
    return [
        pytest.param(mode, case, id=f"{mode.id}-{case.name}")
        for mode in some_modes
        for case in some_cases
        if mode.serves(case)
    ]
