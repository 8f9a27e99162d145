"""Checks of the epilogs that users ask for: which exist, what they take, and where."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp._src.core.spec import epilogs, low_precision, process_grid
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.matmul_spec import INTEGERS, MatmulSpec
from jaxmp._src.core.spec.refusal import InvalidType, InvalidValue, NotAvailable
from jaxmp._src.core.spec.request import Request
from jaxmp._src.core.validation.operand_checks import check_array, check_widens
from jaxmp._src.platform.runtime.types import Shape


def check_epilog(
    request: Request, spec: MatmulSpec, shape: Shape, bias_dtype: np.dtype
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checks a request's epilog and its inputs for a d of `shape`. Returns ({"epilog", "asks_all_reduce"}, inputs by
    name, the bias in `bias_dtype`). The ALLREDUCE bit becomes the field `asks_all_reduce`.

    Raises ValueError for anything but an epilog, and for missing, unknown or wrongly shaped inputs. Raises TypeError
    for wrong types of inputs, and for an activation with a complex result. Raises NotImplementedError for an epilog
    that the operands' types or flags exclude. `check_relu_aux` checks the columns of a relu_aux, by the pattern."""
    out, epilog, epilog_inputs = spec.out_dtype, request.epilog, request.epilog_inputs
    try:
        if isinstance(epilog, bool):
            raise TypeError
        number = operator.index(epilog)
        epilog = Epilog(number & ~Epilog.ALLREDUCE)
        row = epilogs.RULES[epilog]
    except (TypeError, ValueError):
        raise InvalidValue(f"epilog must be a jaxmp.Epilog, got {epilog!r}{_epilog_of(epilog)}") from None
    if epilog_inputs is not None and not isinstance(epilog_inputs, Mapping):
        raise InvalidType(f"epilog_inputs must be a dict such as {{'bias': bias}}, got {type(epilog_inputs).__name__}")
    given = dict(epilog_inputs or {})
    missing = [key for key in row.inputs if given.get(key) is None]
    unknown = sorted(set(given) - set(row.inputs))
    if missing:
        raise InvalidValue(
            f"epilog {epilog.name} needs epilog_inputs {list(row.inputs)}, missing {missing}; "
            f"pass epilog_inputs={{{missing[0]!r}: ...}}"
        )
    if unknown:
        raise InvalidValue(
            f"epilog {epilog.name} takes epilog_inputs {list(row.inputs)}, got unknown {unknown}; "
            "drop them or choose an epilog that uses them"
        )
    if (row.activation or row.derivative) and jnp.issubdtype(out, jnp.complexfloating):
        raise InvalidType(f"epilog {epilog.name} is defined for real types, the result is {np.dtype(out).name}")
    takes = ("NONE",) if out == np.bool_ else ("NONE", "BIAS", "RELU", "RELU_BIAS")
    if out.name in INTEGERS and epilog.name not in takes:  # the others have no meaning or use for integers
        raise NotAvailable(
            f"epilog {epilog.name} is not available for a result of {out.name}; available: {', '.join(takes)}. "
            "Convert an operand, for example with .astype(jnp.float32)"
        )
    _check_summed_operand(spec, epilog, request.a.ndim)
    dtypes = {"bias": bias_dtype}
    inputs = {key: _checked_input(key, given[key], dtypes.get(key, out), tuple(shape)) for key in row.inputs}
    return {"epilog": epilog, "asks_all_reduce": bool(number & Epilog.ALLREDUCE)}, inputs


def _epilog_of(value: Any) -> str:
    """Returns the end of the message about an epilog that is a string; "" for other values."""
    if not isinstance(value, str):
        return ""
    names = list(Epilog.__members__)
    return f"; pass jaxmp.Epilog.{value.upper()}" if value.upper() in names else f"; there are {', '.join(names)}"


def _check_summed_operand(spec: MatmulSpec, epilog: Epilog, ndim_a: int) -> None:
    """Raises NotImplementedError for BGRADA unless `transpose_a`, and for BGRADB if `transpose_b`, because cuBLASMp
    sums a stored as (k, m) and b stored as (k, n) only. Raises ValueError for BGRADA if a is not 2-D."""
    for summed, which, flag, stored in ((Epilog.BGRADA, "a", True, "(k, m)"), (Epilog.BGRADB, "b", False, "(k, n)")):
        if epilog == summed and getattr(spec, f"transpose_{which}") != flag:
            raise NotAvailable(
                f"epilog {epilog.name} needs transpose_{which}={flag}, because cuBLASMp sums {which} only if it is "
                f"stored {stored}; store {which} that way, or sum it before the call"
            )
    if epilog == Epilog.BGRADA and ndim_a != 2:
        raise InvalidValue(
            f"epilog BGRADA needs a with 2 dimensions, (k, m), got {ndim_a}; use jax.vmap for the others"
        )


def _checked_input(name: str, x: Any, dtype: np.dtype, shape: Shape) -> Any:
    """Returns an input of an epilog; a bias in `dtype`. `shape`: the shape of d.

    Raises ValueError unless a bias has the shape (columns of d,), a gelu_aux the shape of d, and a relu_aux the shape
    (rows of d..., any). Raises TypeError if a gelu_aux is not of `dtype` or a relu_aux not of uint8; for a bias as
    `check_widens` does."""
    if name == "relu_aux":
        if getattr(x, "dtype", None) != np.uint8:
            raise InvalidType(
                f"relu_aux must be the uint8 array that a RELU_AUX epilog returned, got "
                f"{getattr(x, 'dtype', type(x).__name__)}"
            )
        if x.ndim != len(shape) or tuple(x.shape[:-1]) != shape[:-1]:
            raise InvalidValue(
                f"relu_aux must have the rows of the result, shape {(*shape[:-1], '...')}, got {tuple(x.shape)}"
            )
        return x
    if name == "bias":
        check_array("{bias}", x, ndim=1)
        if x.shape[0] != shape[-1]:
            raise InvalidValue(
                f"{{bias}} must have shape ({shape[-1]},), one value per column of the result, got {tuple(x.shape)}"
            )
        check_widens("{bias}", x, dtype)
        return x.astype(dtype)
    check_array("gelu_aux", x)
    if tuple(x.shape) != shape:
        raise InvalidValue(f"gelu_aux must have the result's shape {shape}, got {tuple(x.shape)}")
    if np.dtype(x.dtype) != dtype:
        raise InvalidType(f"gelu_aux must have the result's dtype {dtype.name}, got {x.dtype}")
    return x


def check_relu_aux(operands: dict[str, Any], columns: int, per_shard: int) -> None:
    """Raises ValueError if `operands` has a relu_aux with another number of bytes a row than for `columns` of d,
    `per_shard` of them on each device. In each shard a row's bits are padded to a multiple of 16 bytes."""
    if "relu_aux" not in operands:
        return
    shards = columns // per_shard if per_shard else 1
    aux, width = operands["relu_aux"], shards * process_grid.relu_aux_bytes(per_shard)
    if aux.shape[-1] != width:
        raise InvalidValue(
            f"relu_aux must have {width} bytes a row, a bit for each of the result's {columns} columns, "
            f"padded to 16 bytes in each of their {shards} shards, got shape {tuple(aux.shape)}"
        )


def check_all_reduce(spec: MatmulSpec) -> MatmulSpec:
    """Returns the spec with `asks_all_reduce` off. Raises ValueError if it was on and the pattern does not sum the
    ranks' products on every rank, unless the group (the mesh, if the product does not communicate) has one device."""
    if not spec.asks_all_reduce:
        return spec
    group, product = spec.group, spec.contraction
    nranks = group.nranks if product.communicates else group.size(tuple(axis for axis, _ in group.mesh))
    if not product.is_reduced and nranks > 1:
        raise InvalidValue(
            f"epilog ALLREDUCE belongs to the all_reduce pattern, but this call's pattern is "
            f"{product.pattern.value}; shard the contraction and pass an out_sharding without its axis, call "
            "matmul_all_reduce inside shard_map, or drop ALLREDUCE"
        )
    return spec.replace(asks_all_reduce=False)


def check_gathered_scales(spec: MatmulSpec, why: str) -> None:
    """Raises NotImplementedError if a or b has scales of blocks and `determinism` is not "run_to_run"; says `why`."""
    if spec.fixed_reduction_order and not low_precision.BLOCK.keys().isdisjoint((spec.scales.a, spec.scales.b)):
        raise spec.level.refusal(
            f"takes scales of whole tensors and rows only {why}; got scaling.a of {spec.scales.a}, scaling.b of "
            f"{spec.scales.b}",
            "use those",
        )
