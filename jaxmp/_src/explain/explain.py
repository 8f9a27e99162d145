"""`explain`: what each matmul of a program will do, read off its jaxpr."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxmp._src.explain import cost
from jaxmp._src.lowering import backend, ffi_call, process_barrier
from jaxmp._src.lowering.legalize import Form
from jaxmp._src.lowering.resolve import resolve, resolve_chosen
from jaxmp._src.primitive import batched_matmul, bias_grad
from jaxmp._src.primitive.primitives import (
    activated_matmul_p,
    auto_batched_matmul_epilog_p,
    auto_batched_matmul_p,
    auto_matmul_epilog_p,
    auto_matmul_p,
    matmul_epilog_p,
    matmul_p,
)
from jaxmp._src.runtime import jax_compat, native
from jaxmp._src.runtime.types import ArrayType
from jaxmp._src.sharding import layouts, partitioner, patterns
from jaxmp._src.spec import epilogs, low_precision, precisions
from jaxmp._src.spec.matmul_spec import (
    MatmulSpec,
    Pattern,
    accumulator,
    extents,
    operations,
)
from jaxmp._src.validation.comm_options import comm_options_text


@dataclasses.dataclass(frozen=True)
class Row:
    """One call, or one collective that jaxmp added, as every rank runs it.

    Attributes:
      operation: "matmul", "matmul+epilog", or "all_gather", "all_to_all", "all_reduce" for what runs beside the calls.
      count: how often the program runs it (the trip counts of enclosing scans, multiplied); of a batch that both
        operands have, also its extent, whether it is one product or one call per index.
      global_shapes, local_shapes: of a, b and d, as stored: of one group's product, and per device.
      dtypes: "a x b -> d", the scale modes of a and b where they have scales, and gelu_aux's type where it is not d's.
      accumulator: the type in which products are summed.
      determinism: the level asked for: "run_to_run", "batch" or "topology".
      pattern: how the ranks of a group share the product; groups: their number, size and axes.
      epilog: name of the epilog.
      implementation, why: which implementation serves it and the rule that chose it.
      algorithm: the library's algorithm and BLAS, where a plan can be made here.
      flops: floating-point operations of all groups together (2 m n k; a complex product counts 4 real ones).
      bytes_moved: bytes that one rank reads from its peers.
      workspace: bytes per rank; 0 for cuBLASMp, which is asked when the call first runs.
      compute: cuBLAS's compute type.
      comm, layout: the call's communication options and block-cyclic layouts, empty where it has none.
    """

    operation: str
    count: int
    pattern: str
    groups: str
    global_shapes: tuple[tuple[int, ...], ...]
    local_shapes: tuple[tuple[int, ...], ...]
    dtypes: str
    accumulator: str
    determinism: str
    epilog: str
    implementation: str
    why: str
    algorithm: str
    flops: int
    bytes_moved: int
    workspace: int
    compute: str = ""
    comm: str = ""
    layout: str = ""


# The primitive of `jax.lax.with_sharding_constraint`.
_CONSTRAINT = "sharding_constraint"
# What runs beside the calls, by primitive, and why.
_COMMUNICATES = {
    "all_gather": "the product contracts over gathered rows; cuBLASMp cannot fuse that gather",
    "reshard": "brings an operand, its gradient or a result to the sharding that the call, or its caller, wants",
    _CONSTRAINT: "brings an operand or a result to the sharding that the call, or its caller, wants",
    "pmax": "takes the largest absolute value of every rank (result_amax, gelu_aux_amax); cuBLASMp leaves each its own",
    "psum": "sums the cotangents of an operand that is the same on several ranks",
    "all_to_all": "brings all of k to each rank",
    "reduce_scatter": "sums the cotangents of an operand that was gathered ahead of its call",
    "psum_invariant": "sums the cotangents of an operand that is the same on several ranks",
    "all_gather_invariant": "the shardings ask for it; with the other operand whole, the ranks compute the same",
}
# And where the scope says it better.
_SCOPES = {
    bias_grad.SCOPE: "completes a bias gradient over axes that share its rows outside of the call",
    "jaxmp_all_gather": "gathers an operand ahead of the call, which no pattern does with these shardings",
    "jaxmp_gather_rows": _COMMUNICATES["all_gather"],
    "jaxmp_shared_operand": "one operand of two products: gathered once, its cotangents summed once",
    "jaxmp_whole_operands": "lets the call apply its own epilog to gathered or scattered columns, for the bits",
    "jaxmp_global_order": "puts rows that the ranks hold interleaved in the order of the global array, for the bits",
}
# The pattern of a call under auto axes, until the partitioner has been asked.
_UNSETTLED = "?"
_UNSETTLED_BATCH = "? of a batch"
_COLUMNS = (
    "operation",
    "pattern",
    "groups",
    "global",
    "per device",
    "dtypes",
    "acc",
    "determinism",
    "epilog",
    "by",
    "Gflop",
    "MB moved",
    "work",
)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The rows of a program in the order in which it runs them; `str` gives the table.

    `logged` is what cuBLASMp said of the calls that ran since the last explanation, where JAXMP_LOG has "cublasmp":
    which algorithm it used, overlapped or not.
    """

    rows: tuple[Row, ...]
    logged: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.rows:
            return "no jaxmp call in this program"
        cells = [_COLUMNS, *map(_cells, self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        reasons = dict.fromkeys(f"{row.implementation}: {row.why}; {row.algorithm}{_remarks(row)}" for row in self.rows)
        said = [f"cuBLASMp logged: {line}" for line in self.logged]
        return "\n".join([*lines, "", *reasons, *said])


def _remarks(row: Row) -> str:
    """What a call has beyond most: a compute type other than the full one, communication options, a layout."""
    compute = "" if row.compute in ("", "32F", "64F") else row.compute
    named = (("compute type", compute), ("communication", row.comm), ("block-cyclic", row.layout))
    return "".join(f"; {name} {value}" for name, value in named if value)


def explain(fn: Callable[..., Any]) -> Callable[..., Explanation]:
    """Print one row per jaxmp call of `fn`, forward or (given a gradient function) backward, and return them.

    `explain(fn)(*args, **kwargs)` traces `fn` for its arrays (or `jax.ShapeDtypeStruct`s), with its other arguments as
    they are, and runs nothing.
    Calls whose pattern XLA's partitioner decides (auto axes, no shardings given) are found by compiling `fn`.

    Returns:
      A function of the same arguments that prints the table and returns an `Explanation`, whose `.rows` programs
      can read.

    >>> import jax, jaxmp
    >>> x = jax.ShapeDtypeStruct((8, 16), "float32")
    >>> w = jax.ShapeDtypeStruct((16, 4), "float32")
    >>> rows = jaxmp.explain(jaxmp.matmul)(x, w).rows  # doctest: +ELLIPSIS
    operation  pattern ...
    >>> rows[0].pattern, rows[0].accumulator, rows[0].flops
    ('local', 'float32', 1024)
    """

    if not callable(fn):
        raise TypeError(
            f"explain: takes a function, got {type(fn).__name__}; write explain(fn)(*args) for the calls of fn(*args)"
        )

    @functools.wraps(fn)
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        # A function of its own, so that neither tracing nor the partitioner answers from a cache.
        arrays, fn_of_arrays = _split_arrays(fn, args, kwargs)
        jitted = jax.jit(fn_of_arrays)
        jaxpr = jax_compat.without_dead_code(jax.make_jaxpr(jitted)(arrays).jaxpr)
        rows = list(_walk(jaxpr, 1, ()))
        if any(row.pattern in (_UNSETTLED, _UNSETTLED_BATCH) for row in rows):
            settled, partitions_batches = _settled_by_partitioner(jitted, arrays)
            # On one device there is nothing to settle.
            rows = [row for row in rows if row.pattern != _UNSETTLED or not settled] + settled
            rows = [_on_one_device(row, partitions_batches) for row in rows]
        explanation = Explanation(tuple(rows), tuple(native.cublasmp_log()))
        print(explanation)
        return explanation

    return explained


def _split_arrays(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], Callable[..., Any]]:
    """The arrays among the arguments, and `fn` as a function of them alone."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]

    def fn_of_arrays(arrays: Sequence[Any]) -> Any:
        given = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
        args, kwargs = jax.tree.unflatten(tree, given.values())
        return fn(*args, **kwargs)

    return [leaves[i] for i in places], fn_of_arrays


def _settled_by_partitioner(jitted: Any, arrays: Sequence[Any]) -> tuple[list[Row], bool]:
    """(the calls that XLA's partitioner has settled, whether there were batches for it to partition)."""
    rows: list[Row] = []
    batches = []
    why = "chosen by XLA's partitioner (auto axes, no in_shardings)"

    def on_call(spec: MatmulSpec, avals: Sequence[ArrayType] | None) -> None:
        if avals is None:
            batches.append(spec)
        else:
            rows.append(_matmul_row(spec, avals[0], avals[1], 1, why))

    with partitioner.observe(on_call):
        jitted.lower(arrays).compile()
    return rows, bool(batches)


def _on_one_device(row: Row, partitions_batches: bool) -> Row:
    """A row that the partitioner had nothing to say of: a product on one device, or a batch that XLA partitions."""
    if row.pattern == _UNSETTLED_BATCH and partitions_batches:
        why = "a batch, which XLA partitions (auto axes, no in_shardings); the shapes per device are its own"
        row = dataclasses.replace(row, implementation="xla", why=why, algorithm="lax.dot_general", workspace=0)
    return dataclasses.replace(row, pattern="local") if row.pattern in (_UNSETTLED, _UNSETTLED_BATCH) else row


def _walk(jaxpr: jax_compat.Jaxpr, count: int, scopes: tuple[str, ...]) -> Iterator[Row]:
    """Rows of `jaxpr` and all it contains."""
    by_result: dict[Any, Any] = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name == _CONSTRAINT}
    for eqn in jaxpr.eqns:
        avals: list[Any] = [v.aval for v in eqn.invars]
        names = (*scopes, str(eqn.source_info.name_stack), str(eqn.params.get("name", "")))
        if eqn.primitive in (matmul_p, matmul_epilog_p, auto_matmul_p, auto_matmul_epilog_p):
            row = _matmul_row(eqn.params["spec"], avals[0], avals[1], count)
            is_auto = eqn.primitive in (auto_matmul_p, auto_matmul_epilog_p)
            yield dataclasses.replace(row, pattern=_UNSETTLED) if is_auto else row
        elif eqn.primitive in batched_matmul.ONE:
            a, b = map(jax_compat.without_front, avals[:2])
            row = _matmul_row(eqn.params["spec"], a, b, count * avals[0].shape[0], is_batched=True)
            is_auto = eqn.primitive in (auto_batched_matmul_p, auto_batched_matmul_epilog_p)
            yield dataclasses.replace(row, pattern=_UNSETTLED_BATCH) if is_auto else row
        elif eqn.primitive is activated_matmul_p:
            yield _matmul_row(eqn.params["spec"], avals[0], avals[-1], count)
        elif eqn.primitive.name in _COMMUNICATES and any("jaxmp" in name for name in names):
            collective = _communication_row(eqn, count, names, by_result.get(eqn.invars[0]))
            yield from () if collective is None else (collective,)
        else:
            inner = count * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else count
            for sub in jax_compat.subjaxprs(eqn.params):
                yield from _walk(sub, inner, names)


def _matmul_row(
    spec: MatmulSpec, a: ArrayType, b: ArrayType, count: int, why: str | None = None, is_batched: bool = False
) -> Row:
    platform, operands = jax_compat.default_platform(), (a.dtype, b.dtype)
    nprocesses = process_barrier.group_processes(spec, jax_compat.ambient_mesh())
    if is_batched:
        work = operations(spec, a.shape, b.shape)
        call = resolve_chosen(spec, a, b, backend.choose_for_batch(spec, platform, nprocesses, operands, work)[0])
    else:
        call = resolve(spec, a, b, platform, nprocesses)
    algorithm, workspace = cost.plan_facts(call)
    reasons = [call.why]
    if spec.traced:
        reasons.append(f"{' and '.join(spec.traced)} traced, so scaling, c and epilog follow the call")
    reasons += [] if why is None else [why]
    found, group = extents(spec, a.shape, b.shape), spec.group
    m, n, k = found.m, found.n, found.k
    out = np.dtype(spec.out_dtype)
    is_complex = np.issubdtype(out, np.complexfloating)
    is_host = call.implementation == "host"
    compute = ffi_call.compute_of(spec, a.dtype) if is_host else precisions.find(spec.precision, a.dtype)
    # Gathered, an all-reduced product is computed by every rank.
    is_repeated = call.form == Form.GATHERED and group.pattern == Pattern.ALL_REDUCE
    copies = group.ngroups * (group.nranks if is_repeated else 1)
    return Row(
        operation="matmul" if spec.epilog == epilogs.Epilog.NONE and not spec.has_c else "matmul+epilog",
        count=count,
        pattern=group.pattern.value,
        groups=f"{group.ngroups} x {group.nranks} {group.axes}" if group.nranks > 1 else "1 rank",
        global_shapes=((k, m) if spec.transpose_a else (m, k), (n, k) if spec.transpose_b else (k, n), (m, n)),
        local_shapes=(tuple(a.shape), tuple(b.shape), found.d),
        dtypes=f"{a.dtype.name} x {b.dtype.name} -> {out.name}{_scales(spec)}",
        accumulator=compute.accumulator or accumulator(a.dtype).name,
        determinism=spec.determinism,
        epilog=spec.epilog.name,
        implementation=call.implementation,
        why="; ".join(reasons),
        algorithm=algorithm,
        flops=2 * m * n * k * (4 if is_complex else 1) * copies,
        bytes_moved=cost.bytes_moved(spec, a, b, call.implementation),
        workspace=workspace,
        compute=compute.name,
        comm=comm_options_text(spec),
        layout=" @ ".join(map(str, spec.distributions[:2])) + f" -> {spec.distributions[2]}"
        if spec.distributions
        else "",
    )


def _scales(spec: MatmulSpec) -> str:
    scales = (
        "" if {spec.scales.a, spec.scales.b} == {low_precision.NONE} else f", scales {spec.scales.a} x {spec.scales.b}"
    )
    return scales if spec.aux_dtype in (None, spec.out_dtype) else f"{scales}, gelu_aux {np.dtype(spec.aux_dtype).name}"


def _communication_row(eqn: Any, count: int, scopes: tuple[str, ...], constraint: Any = None) -> Row | None:
    """A collective beside the calls, or None where a reshard only takes a part of what each rank has.

    On automatic axes a reshard is a constraint that follows another one, `constraint`.
    """
    x, name = eqn.invars[0].aval, eqn.primitive.name
    local, result = (_local_shape(v.aval) for v in (eqn.invars[0], eqn.outvars[0]))
    axes = eqn.params.get("axis_name") or eqn.params.get("axes") or ()
    operation, algorithm = "all_gather", f"lax.{name}"
    if name in ("reshard", _CONSTRAINT):
        algorithm = "jax.sharding.reshard"
        if name == "reshard":
            have, want = x.sharding, eqn.outvars[0].aval.sharding
        elif constraint is None:
            return None
        else:
            have, want = constraint.params["sharding"], eqn.params["sharding"]
        before, after = (patterns.as_dims("explain", "x", sharding.spec, x.ndim) for sharding in (have, want))
        local = tuple(want.shard_shape(x.shape))
        moved = round(layouts.received(x.shape, before, after, want.mesh.shape))
        axes = tuple(axis for pair in zip(before, after, strict=True) for axis in sorted({*pair[0]} ^ {*pair[1]}))
        axes = tuple(dict.fromkeys(axes))
        operation = "all_to_all" if sorted(sum(before, ())) == sorted(sum(after, ())) else operation
    elif name.startswith("psum") or name == "pmax":
        operation, moved = "all_reduce", math.prod(local)
    elif name == "all_to_all":
        p = math.prod(x.sharding.mesh.shape[axis] for axis in axes)
        operation, moved = name, math.prod(local) * (p - 1) // p
    elif name == "reduce_scatter":
        operation, moved = name, math.prod(local) - math.prod(result)
    else:
        moved = math.prod(result) - math.prod(local)
    if moved <= 0:
        return None
    scoped = [why for scope, why in _SCOPES.items() if scope in "/".join(scopes)]
    return Row(
        operation=operation,
        count=count,
        pattern="-",
        groups=str(axes),
        global_shapes=(tuple(eqn.outvars[0].aval.shape),),
        local_shapes=(local,),
        dtypes=x.dtype.name,
        accumulator=x.dtype.name if operation in ("all_reduce", "reduce_scatter") else "",
        determinism="",
        epilog="",
        implementation="xla",
        why=_COMMUNICATES[name] if name == "reduce_scatter" or not scoped else scoped[0],
        algorithm=algorithm,
        flops=0,
        bytes_moved=moved * x.dtype.itemsize,
        workspace=0,
    )


def _local_shape(aval: jax.core.ShapedArray) -> tuple[int, ...]:
    """Shape per device; inside shard_map that is the type's own."""
    mesh = aval.sharding.mesh
    is_local = mesh.empty or mesh.manual_axes
    return tuple(aval.shape if is_local else aval.sharding.shard_shape(aval.shape))


def _cells(row: Row) -> tuple[str, ...]:
    times = f" x{row.count}" if row.count > 1 else ""
    return (
        row.operation + times,
        row.pattern,
        row.groups,
        _shapes(row.global_shapes),
        _shapes(row.local_shapes),
        row.dtypes,
        row.accumulator,
        row.determinism,
        row.epilog,
        row.implementation,
        f"{row.flops / 1e9:.3g}",
        f"{row.bytes_moved / 1e6:.3g}",
        f"{row.workspace}",
    )


def _shapes(shapes: tuple[tuple[Any, ...], ...]) -> str:
    texts = ["x".join(map(str, shape)) for shape in shapes]
    return f"{texts[0]} @ {texts[1]} -> {texts[2]}" if len(texts) == 3 else " ".join(texts)
