"""What users pass, judged one argument at a time: each is refused by name, or comes back in the types of the call."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxmp._src.jax_internals import jax_compat
from jaxmp._src.runtime.types import ArrayType, Shape
from jaxmp._src.spec import epilogs, low_precision, process_grid
from jaxmp._src.spec.epilogs import Epilog
from jaxmp._src.spec.matmul_spec import INTEGERS, RESULT_TYPES, MatmulSpec, accumulator
from jaxmp._src.spec.options import Determinism, Implementation
from jaxmp._src.spec.refusal import InvalidType, InvalidValue, NotAvailable
from jaxmp._src.spec.request import Request

IMPLEMENTATIONS = (None, *get_args(Implementation))
DETERMINISM = get_args(Determinism)


def as_array(x: Any) -> Any:
    """The array of what only stands for one, as `jnp` takes it (`__jax_array__`): a parameter of Flax."""
    if x is None or type(x) is jax_compat.ArrayImpl:  # at each eager call
        return x
    array = getattr(x, "__jax_array__", None)
    return x if array is None else array()


def check_array(argument: str, x: Any, ndim: int | None = None, at_least: int | None = None) -> None:
    """Raise TypeError or ValueError unless `x` is an array of a supported type and rank."""
    if not is_array(x):
        is_numpy = isinstance(x, np.ndarray | np.generic)
        what, of_dtype = (" of numbers", f" of dtype {x.dtype}") if is_numpy else ("", "")
        kind = "a jax.Ref" if isinstance(x, jax.Ref) else type(x).__name__
        raise InvalidType(f"{argument} must be an array{what}, got {kind}{of_dtype}{_as_array(argument, x)}")
    if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == np.bool_):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        remedy = "; draw numbers with it, as jax.random.normal does" if is_key else ""
        raise InvalidType(f"{argument} must be an array of numbers, got dtype {x.dtype}{remedy}")
    found = len(x.shape)
    if (ndim is not None and found != ndim) or (at_least is not None and found < at_least):
        wanted = f"at least {at_least}" if ndim is None else f"{ndim}"
        wanted += " dimension" if 1 in (ndim, at_least) else " dimensions"
        raise InvalidValue(
            f"{argument} must have {wanted}, got {found} (shape {tuple(x.shape)}){_as_rank(argument, x, ndim)}"
        )
    check_memory(argument, x)


def _as_rank(argument: str, x: Any, ndim: int | None) -> str:
    """How a user gets `ndim` dimensions, or if None two or more, from another number; as the end of a message."""
    if len(x.shape) == 1:
        return f"; pass {argument}[:, None]" if ndim else f"; pass {argument}[None]"
    return "; jaxmp.einsum and jax.vmap take a batch of matrices" if ndim == 2 and len(x.shape) > 2 else ""


def _as_array(argument: str, x: Any) -> str:
    """How a user gets an array from what is none, as the end of a message; empty where there is no telling."""
    if x is None or isinstance(x, str | bytes | np.ndarray | np.generic):
        return ""
    if hasattr(x, "todense"):
        return f"; a sparse array has to be dense: pass {argument}.todense()"
    if isinstance(x, Mapping):
        return f"; pass one of its arrays, which it has under {', '.join(map(repr, x)) or 'no key'}"
    if isinstance(x, jax.Ref):
        return f"; pass what it holds, {argument}[...]"
    if is_array(getattr(x, "value", None)):
        return f"; pass the array in it, {argument}.value"
    if callable(x):
        return "; pass one of its arrays"
    return "; convert it with jnp.asarray"


def check_memory(argument: str, x: Any) -> None:
    """Raise ValueError for an array in the memory of the host, of which a device's library would get the pointer."""
    if isinstance(x, jax.Array) and jax.typeof(x).memory_space == jax.memory.Space.Host:
        raise InvalidValue(
            f"{argument} lies in host memory, and products are taken in the memory of the devices; move it "
            "there first, with jax.device_put(x, jax.memory.Space.Device)"
        )


def check_whole(argument: str, x: Any) -> None:
    """Raise ValueError for the terms of a sum that the devices of a shard_map hold."""
    if isinstance(x, jax.Array) and (axes := jax_compat.unreduced_axes(x)):
        raise InvalidValue(
            f"{argument} is unreduced, each device holds a term of a sum over {sorted(axes)}; take the sum "
            "first, with jax.lax.psum"
        )


def is_array(x: object) -> bool:
    """Whether JAX takes `x` for an array, or for the description of one: no list, no other library's tensor."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return True
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return False
    try:
        return isinstance(jax.typeof(x), jax.core.ShapedArray)  # a jax.Ref has another type
    except (TypeError, ValueError):
        return False


def check_dtype(argument: str, value: Any) -> np.dtype:
    """The type that a user names, as JAX has it under its current settings of 64-bit types."""
    try:
        return jax_compat.canonical_dtype(value, f"{argument}")
    except TypeError:
        raise InvalidType(f"{argument} must be a dtype, such as jnp.float32, got {value!r}") from None


def check_preferred(value: DTypeLike | None) -> np.dtype | None:
    return None if value is None else check_dtype("preferred_element_type", value)


def check_flag(argument: str, value: Any) -> bool:
    """Require a bool: BLAS's "N" would be truthy."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    what = "a tracer, which is no static value" if isinstance(value, jax.core.Tracer) else repr(value)
    raise InvalidType(f"{argument} must be True or False, got {what}")


def check_flags(request: Request) -> dict[str, Any]:
    """The fields of a spec that are flags or names."""
    check_implementation(request.implementation)
    return {
        "transpose_a": check_flag("transpose_a", request.transpose_a),
        "transpose_b": check_flag("transpose_b", request.transpose_b),
        "conjugate_a": check_conjugate("conjugate_a", request.conjugate_a, request.a),
        "conjugate_b": check_conjugate("conjugate_b", request.conjugate_b, request.b),
        "implementation": request.implementation,
        "determinism": check_determinism(request.determinism),
        "b_leads": request.b_leads,
    }


def resolve_dtypes(
    a: ArrayType, b: ArrayType, preferred: np.dtype | None, *added: ArrayType
) -> tuple[np.dtype, np.dtype]:
    """(type of the operands by JAX's promotion, type of D).

    Without `preferred`, D has the type of the sum with what is `added` to the product, if the product can have it.
    With it a mixed pair, which JAX may not promote, is multiplied in its wide type.
    """
    is_mixed = preferred is not None and low_precision.is_mixed(a.dtype, b.dtype)
    operand = low_precision.operand_type(a.dtype, b.dtype) if is_mixed else np.dtype(jnp.result_type(a, b))
    if operand.name not in RESULT_TYPES:
        raise NotAvailable(
            f"operands of dtype {operand.name} ({{a}} {a.dtype}, {{b}} {b.dtype}) are not supported; supported are "
            f"{', '.join(RESULT_TYPES)}"
        )
    allowed = RESULT_TYPES[operand.name]
    if preferred is None:
        out = np.dtype(jnp.result_type(operand, *added))
        return (operand, out) if out.name in allowed and operand.name not in INTEGERS else (operand, operand)
    if preferred.name not in allowed:
        raise NotAvailable(
            f"preferred_element_type {preferred.name} is not available for {operand.name} operands; "
            f"available: {', '.join(allowed)}"
        )
    return (preferred if operand.name in INTEGERS else operand), preferred


def check_scalar(argument: str, value: Any, out_dtype: np.dtype) -> Any:
    """A Python number, or a JAX scalar in the accumulator's type; neither takes part in promotion."""
    if isinstance(value, np.generic | np.ndarray) and np.ndim(value) == 0:
        value = value.item()
    if isinstance(value, jax.Array) and value.ndim == 0 and value.dtype != np.bool_:
        if jnp.iscomplexobj(value) and not jnp.issubdtype(out_dtype, jnp.complexfloating):
            raise InvalidType(f"{argument} has dtype {value.dtype} but the result has dtype {np.dtype(out_dtype).name}")
        return value.astype(accumulator(out_dtype))
    what = f" of shape {value.shape} and dtype {value.dtype}" if isinstance(value, np.ndarray | jax.Array) else ""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | complex):
        raise InvalidType(
            f"{argument} must be a Python number or a scalar array, got {type(value).__name__}{what}; "
            "multiply by anything else outside of the call"
        )
    if isinstance(value, complex):
        if not jnp.issubdtype(out_dtype, jnp.complexfloating):
            raise InvalidType(f"{argument}={value} is complex but the result has dtype {np.dtype(out_dtype).name}")
        return value
    is_integer = jnp.issubdtype(out_dtype, jnp.integer) or out_dtype == np.bool_
    if is_integer and not float(value).is_integer():
        raise InvalidType(f"{argument}={value} is not an integer but the result has dtype {np.dtype(out_dtype).name}")
    limits = np.iinfo(accumulator(out_dtype)) if is_integer else None
    if limits and not limits.min <= float(value) <= limits.max:
        raise InvalidValue(f"{argument}={value} does not fit {np.dtype(out_dtype).name}, the type of the result")
    try:
        return float(value)
    except OverflowError:
        raise InvalidValue(f"{argument} must fit a float64, got an integer beyond 1.8e308") from None


def check_c(c: Any, beta: Any, out_dtype: np.dtype, out_shape: Shape) -> Any:
    """Validate C against D and return beta."""
    if c is None:
        if beta is not None:
            raise InvalidValue(f"beta={beta!r} was given without c; pass c of shape {tuple(out_shape)} or drop beta")
        return 0.0
    if beta is None:
        raise InvalidValue("c was given without beta; pass beta=1.0 to add c as it is")
    check_array("c", c)
    if tuple(c.shape) != tuple(out_shape):
        raise InvalidValue(f"c must have the result's shape {tuple(out_shape)}, got {tuple(c.shape)}")
    check_widens("c", c, out_dtype)
    return check_scalar("beta", beta, out_dtype)


def check_widens(argument: str, x: Any, out_dtype: np.dtype) -> None:
    """Raise TypeError unless `x` converts to the result's type without loss by JAX's promotion.

    By that an array of NumPy's has the type that JAX gives it, and a weak type gives way.
    """
    if np.dtype(jnp.result_type(x, np.dtype(out_dtype))) != np.dtype(out_dtype):
        raise InvalidType(
            f"{argument} has dtype {x.dtype} but the result has dtype {np.dtype(out_dtype).name}; convert "
            f"{argument} to {np.dtype(out_dtype).name}, or ask for a wider result with preferred_element_type"
        )


def check_epilog(
    request: Request, spec: MatmulSpec, shape: Shape, bias_dtype: np.dtype
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the spec's fields, the operands by name in the types of the call) of an epilog, for d of `shape`.

    The columns of a relu_aux depend on the pattern: see `check_relu_aux`.
    """
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
    given = {key: as_array(x) for key, x in (epilog_inputs or {}).items()}
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
    if np.dtype(out).name in INTEGERS:
        _check_epilog_of_integers(epilog, out)
    _check_summed_operand(spec, epilog, request.a.ndim)
    checks = {"bias": _check_bias, "relu_aux": _check_relu_aux_input, "gelu_aux": _check_gelu_aux_input}
    dtypes = {"bias": bias_dtype}
    inputs = {key: checks[key](given[key], dtypes.get(key, out), tuple(shape)) for key in row.inputs}
    return {"epilog": epilog, "asks_all_reduce": bool(number & Epilog.ALLREDUCE)}, inputs


def _epilog_of(value: Any) -> str:
    """The end of the message on an epilog that is text."""
    if not isinstance(value, str):
        return ""
    names = list(Epilog.__members__)
    return f"; pass jaxmp.Epilog.{value.upper()}" if value.upper() in names else f"; there are {', '.join(names)}"


def _check_epilog_of_integers(epilog: Epilog, out: np.dtype) -> None:
    """Raise NotImplementedError for an epilog without a meaning, or a use, for integers."""
    takes = ("NONE",) if out == np.bool_ else ("NONE", "BIAS", "RELU", "RELU_BIAS")
    if epilog.name not in takes:
        raise NotAvailable(
            f"epilog {epilog.name} is not available for a result of {out.name}; available: {', '.join(takes)}. "
            "Convert an operand, for example with .astype(jnp.float32)"
        )


def _check_summed_operand(spec: MatmulSpec, epilog: Epilog, ndim_a: int) -> None:
    """cuBLASMp sums an operand over k only where k is its slowest stored dimension, column-major."""
    if epilog == Epilog.BGRADB and spec.transpose_b:
        raise NotAvailable(
            "epilog BGRADB needs transpose_b=False, for cuBLASMp sums b only where it is stored (k, n); "
            "store b so, or sum it ahead of the call"
        )
    if epilog == Epilog.BGRADA and not spec.transpose_a:
        raise NotAvailable(
            "epilog BGRADA needs transpose_a=True, for cuBLASMp sums a only where it is stored (k, m); "
            "store a so, or sum it ahead of the call"
        )
    if epilog == Epilog.BGRADA and ndim_a != 2:
        raise InvalidValue(
            f"epilog BGRADA needs a with 2 dimensions, (k, m), got {ndim_a}; use jax.vmap for the others"
        )


def _check_bias(bias: Any, out_dtype: np.dtype, shape: Shape) -> Any:
    argument = "{bias}"
    check_array(argument, bias, ndim=1)
    if bias.shape[0] != shape[-1]:
        raise InvalidValue(
            f"{argument} must have shape ({shape[-1]},), one value per column of the result, got {tuple(bias.shape)}"
        )
    check_widens(argument, bias, out_dtype)
    return bias.astype(out_dtype)


def _check_relu_aux_input(aux: Any, out_dtype: np.dtype, shape: Shape) -> Any:
    if getattr(aux, "dtype", None) != np.uint8:
        raise InvalidType(
            f"relu_aux must be the uint8 array that a RELU_AUX epilog returned, got "
            f"{getattr(aux, 'dtype', type(aux).__name__)}"
        )
    if aux.ndim != len(shape) or tuple(aux.shape[:-1]) != shape[:-1]:
        raise InvalidValue(
            f"relu_aux must have the rows of the result, shape {(*shape[:-1], '...')}, got {tuple(aux.shape)}"
        )
    return aux


def check_relu_aux(operands: dict[str, Any], spec: MatmulSpec, columns: int, per_shard: int) -> None:
    """Raise ValueError where an input mask is not packed as d's columns would be, so many of them in a shard."""
    if "relu_aux" not in operands:
        return
    shards = columns // per_shard if per_shard else 1
    aux, width = operands["relu_aux"], shards * process_grid.relu_aux_bytes(per_shard)
    if aux.shape[-1] != width:
        raise InvalidValue(
            f"relu_aux must have {width} bytes a row, a bit for each of the result's {columns} columns, "
            f"padded to 16 bytes in each of their {shards} shards, got shape {tuple(aux.shape)}"
        )


def _check_gelu_aux_input(aux: Any, out_dtype: np.dtype, shape: Shape) -> Any:
    check_array("gelu_aux", aux)
    if tuple(aux.shape) != shape:
        raise InvalidValue(f"gelu_aux must have the result's shape {shape}, got {tuple(aux.shape)}")
    if np.dtype(aux.dtype) != np.dtype(out_dtype):
        raise InvalidType(f"gelu_aux must have the result's dtype {np.dtype(out_dtype).name}, got {aux.dtype}")
    return aux


def check_all_reduce(spec: MatmulSpec) -> MatmulSpec:
    """The spec less its ALLREDUCE bit; ValueError where the call's pattern is not an all-reduce."""
    group, product = spec.group, spec.contraction
    nranks = group.nranks if product.communicates else group.size(tuple(axis for axis, _ in group.mesh))
    if spec.asks_all_reduce and not product.is_reduced and nranks > 1:
        raise InvalidValue(
            f"epilog ALLREDUCE belongs to the all_reduce pattern, but this call's pattern is "
            f"{group.pattern.value}; shard the contraction and pass an out_sharding without its axis, call "
            "matmul_all_reduce inside shard_map, or drop ALLREDUCE"
        )
    return spec.replace(asks_all_reduce=False)


def check_implementation(implementation: object) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise InvalidValue(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")


def check_determinism(level: Any) -> str:
    if level not in DETERMINISM:
        raise InvalidValue(f"determinism must be one of {DETERMINISM}, got {level!r}")
    return str(level)


def check_gathered_scales(spec: MatmulSpec, why: str) -> None:
    """Raise NotImplementedError where operands are gathered for the bits whose scales would have to follow them."""
    if spec.fixed_reduction_order and {spec.scales.a, spec.scales.b} - {low_precision.NONE, low_precision.SCALAR}:
        raise NotAvailable(
            f"determinism={spec.determinism!r} has scales of whole tensors only {why}; got scaling.a of "
            f'{spec.scales.a} and scaling.b of {spec.scales.b}: take those, or pass determinism="run_to_run"'
        )


def check_conjugate(argument: str, flag: Any, x: ArrayType) -> bool:
    """Whether to conjugate; real operands refuse, so that a wrong flag does not pass unseen."""
    is_conjugated = check_flag(argument, flag)
    if is_conjugated and not jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise InvalidType(f"{argument}=True needs a complex operand, got dtype {x.dtype}")
    return is_conjugated
