"""Lets XLA's partitioner ask Python about a custom call. Uses private parts of JAX like `jax_compat`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import custom_partitioning_sharding_rule as _sharding_rule
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _mlir
from jax.interpreters import mlir
from jaxlib import xla_client as _xla_client

from jaxmp._src.platform.jax_internals.jax_compat import Jaxpr, off_explicit_mesh, under_known_flags
from jaxmp._src.platform.jax_internals.jax_lowering import LoweringContext, in_body


@dataclasses.dataclass(frozen=True)
class Global:
    """An operand or result of a call that XLA's partitioner asks about: global shape, dtype, and proposed sharding."""

    shape: tuple[int, ...]
    dtype: np.dtype
    hlo_sharding: Any

    @property
    def tiles(self) -> np.ndarray | None:
        """The devices that hold each tile, by position in the program: one dimension per dimension of the array, and a
        last dimension of copies. None if the array is replicated or on one device, and with manual subgroups."""
        sharding = self.hlo_sharding
        are_copies = {*sharding.subgroup_types()} <= {_xla_client.OpSharding.Type.REPLICATED}
        if not are_copies or not sharding.is_tiled() or sharding.is_maximal():
            return None
        cuts = sharding.tile_assignment_dimensions()[: len(self.shape)]
        return np.array(sharding.tile_assignment_devices()).reshape(*cuts, -1)


@dataclasses.dataclass(frozen=True)
class OnShards:
    """The replacement of a call by XLA's partitioner: `body` of one device's shards.

    `operands`, `results`: shardings on one mesh. `platform`, `x64`: the settings with which the program was lowered.
    `name`: the name of the program made of the body. `is_in_body`: the call is in a loop or branch.
    """

    body: Callable[..., Sequence[Any]]
    operands: Sequence[jax.sharding.NamedSharding]
    results: Sequence[jax.sharding.NamedSharding]
    platform: str
    x64: bool
    name: str
    is_in_body: bool


# The prefix of the names of programs that `register_partitioner` makes of one device's part of a call. The names end
# with the call's number in its program.
PARTITIONED = "jaxmp_partitioned_"


def partitioned_call(
    ctx: LoweringContext, operands: Sequence[Any], *, target: str, text: str, sharding_rule: str, contracted: str
) -> Sequence[Any]:
    """Emits a custom call that XLA's partitioner replaces as registered by `register_partitioner`, and returns its
    results. `text`: what the partitioner tells `partition` of the call. Shardings propagate by `sharding_rule`, as for
    `custom_partitioning`; last along the index `contracted`, as along the contraction of JAX's product."""
    types = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out]
    call = _mlir.custom_call(target, result_types=types, operands=operands, backend_config=text)
    sums = (contracted,) if contracted in sharding_rule else ()
    rule = _sharding_rule.str_to_sdy_sharding_rule(sharding_rule, reduction_factors=sums)
    call.attributes["sdy.sharding_rule"] = _sharding_rule.sdy_sharding_rule_to_mlir(
        rule, [x.type for x in operands], types
    )
    return cast(Sequence[Any], call.results)


def register_partitioner(target: str, partition: Callable[[str, Sequence[Global], Sequence[Global]], OnShards]) -> None:
    """Makes XLA's partitioner ask `partition(text, operands, results)` about every custom call of `target` in any
    program of this process. GSPMD, which does not read sharding rules, propagates no shardings to the results. The
    partitioner may ask on any thread, and about programs that this process has not traced. If `partition` raises, the
    compilation fails."""

    def ask(arg_shapes: Any, arg_shardings: Any, result_shape: Any, result_sharding: Any, text: bytes) -> Any:
        is_tuple = result_shape.is_tuple()
        shapes = result_shape.tuple_shapes() if is_tuple else [result_shape]
        shardings = result_sharding.tuple_elements() if is_tuple else [result_sharding]
        args, results = list(map(_global, arg_shapes, arg_shardings)), list(map(_global, shapes, shardings))
        call = partition(text.decode(), args, results)
        in_shardings = [_hlo_sharding(x, sharding) for x, sharding in zip(args, call.operands, strict=True)]
        out_shardings = [_hlo_sharding(x, sharding) for x, sharding in zip(results, call.results, strict=True)]
        module = _lowered_on_shards(call, _shards(args, in_shardings), _shards(results, out_shardings))
        tupled = _xla_client.HloSharding.tuple_sharding
        return module, in_shardings, tupled(result_shape, out_shardings) if is_tuple else out_shardings[0]

    def propagate(sharding: Any, *_: Any) -> Any:
        return sharding

    def infer(arg_shapes: Any, arg_shardings: Any, result_shape: Any, text: bytes) -> Any:
        whole = _xla_client.HloSharding.replicate()
        if not result_shape.is_tuple():
            return whole
        return _xla_client.HloSharding.tuple_sharding(result_shape, [whole] * len(result_shape.tuple_shapes()))

    register = functools.partial(
        _xla_client.register_custom_call_partitioner,
        target,
        propagate,
        ask,
        infer,
        can_side_effecting_have_replicated_sharding=True,
    )
    register()
    _xla_bridge.register_plugin_callbacks(register)  # a plugin, for example CUDA's, has its own table


def _global(shape: Any, hlo_sharding: Any) -> Global:
    return Global(tuple(shape.dimensions()), shape.numpy_dtype(), hlo_sharding)


def _hlo_sharding(x: Global, sharding: jax.sharding.NamedSharding) -> Any:
    return sharding._to_xla_hlo_sharding(len(x.shape))


def _shards(arrays: Sequence[Global], hlo_shardings: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of one device's shards of arrays."""
    shapes = (_xla_client.Shape.array_shape(x.dtype, x.shape) for x in arrays)
    tiles = (sharding.tile(shape).dimensions() for shape, sharding in zip(shapes, hlo_shardings, strict=True))
    return [jax.ShapeDtypeStruct(tuple(tile), x.dtype) for tile, x in zip(tiles, arrays, strict=True)]


def in_text(kind: str, shape: tuple[int, ...], sharding: str) -> Global:
    """Builds a `Global` from what an XLA program writes: `kind` "f32", the global shape, `sharding` "{replicated}"."""
    dtype = _xla_client.Shape.array_shape(_xla_client.PrimitiveType[kind.upper()], ()).numpy_dtype()
    found = _xla_client.HloSharding.from_string(sharding)
    return Global(shape, dtype, found.v3_to_v2_sharding() if hasattr(found, "v3_to_v2_sharding") else found)


def part_of(call: OnShards, operands: Sequence[Global]) -> Jaxpr:
    """Returns the jaxpr that one device computes instead of a call."""
    in_shardings = [_hlo_sharding(x, sharding) for x, sharding in zip(operands, call.operands, strict=True)]
    with _inside(call):
        part: Jaxpr = jax.make_jaxpr(call.body)(*_shards(operands, in_shardings)).jaxpr
        return part


@contextlib.contextmanager
def _inside(call: OnShards) -> Iterator[None]:
    """A context for tracing and lowering the body of a call."""
    # With custom_jvp3 the trace has primitives that JAX replaces in a later step, which this lowering does not have.
    custom_jvp3 = getattr(_config, "custom_jvp3", contextlib.nullcontext)(False)
    axes = _core.extend_axis_env_nd(call.operands[0].mesh.shape.items())
    with off_explicit_mesh(), jax.enable_x64(call.x64), axes, in_body(call.is_in_body), custom_jvp3:
        yield


@under_known_flags
def _lowered_on_shards(
    call: OnShards, shards: Sequence[jax.ShapeDtypeStruct], results: Sequence[jax.ShapeDtypeStruct]
) -> bytes:
    """Returns one device's part as the bytecode of a module. Raises ValueError unless its results have the types of
    `results`, because XLA relies on them."""
    mesh: Any = call.operands[0].mesh
    with _inside(call):
        jaxpr = jax.make_jaxpr(call.body)(*shards)
        made, wanted = ([(x.shape, x.dtype.name) for x in types] for types in (jaxpr.out_avals, results))
        if made != wanted:
            raise ValueError(f"jaxmp: the part of one device has results {made} where XLA's partitioner needs {wanted}")
        module = _mlir.build_mlir_module_helper(
            jaxpr,
            name=call.name,
            platforms=[call.platform],
            backend=None,
            axis_context=mlir.SPMDAxisContext(mesh, frozenset(mesh.axis_names)),
        )
    return mlir.module_to_bytecode(module)
