"""The numerics suite: one product with everything that may be asked of it, judged output by output.

A `Trial` is a case (layout, transposition, type, extents; cases.py) and the scalars, C, epilog and implementation.
`run` computes every output and, with them, the gradients of a loss that reads every output; `check` compares both with
numpy in float64, element by element, under

    |x - x*| <= c * (u_acc * X + u_out * |x*|),

X being the same expression on absolute values (bounds.py), and demands that all replicas of a shard agree to the bit.
The oracle below is written from the definitions, in numpy, and shares no code with the library.
"""

from __future__ import annotations

import dataclasses
import math
import re

import bounds
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Epilog

FORWARD = {
    Epilog.NONE: None,
    Epilog.BIAS: None,
    Epilog.RELU: "relu",
    Epilog.RELU_BIAS: "relu",
    Epilog.RELU_AUX: "relu",
    Epilog.RELU_AUX_BIAS: "relu",
    Epilog.GELU: "gelu",
    Epilog.GELU_BIAS: "gelu",
    Epilog.GELU_AUX: "gelu",
    Epilog.GELU_AUX_BIAS: "gelu",
}
BACKWARD = {
    Epilog.DRELU: "relu",
    Epilog.DRELU_BGRAD: "relu",
    Epilog.DGELU: "gelu",
    Epilog.DGELU_BGRAD: "gelu",
}
OPERAND_SUMS = (Epilog.BGRADA, Epilog.BGRADB)
EPILOGS = (*FORWARD, *BACKWARD, *OPERAND_SUMS)
BIASED = (Epilog.BIAS, Epilog.RELU_BIAS, Epilog.RELU_AUX_BIAS, Epilog.GELU_BIAS, Epilog.GELU_AUX_BIAS)
WITH_AUX = {
    Epilog.RELU_AUX: "relu_aux",
    Epilog.RELU_AUX_BIAS: "relu_aux",
    Epilog.GELU_AUX: "gelu_aux",
    Epilog.GELU_AUX_BIAS: "gelu_aux",
}
SUMS = {
    Epilog.DRELU_BGRAD: "drelu_bgrad",
    Epilog.DGELU_BGRAD: "dgelu_bgrad",
    Epilog.BGRADA: "bgrada",
    Epilog.BGRADB: "bgradb",
}
DETERMINISM = ("run_to_run", "batch", "topology")
_PRODUCT, _PROGRAM = bounds.PRODUCT, bounds.PROGRAM


@dataclasses.dataclass(frozen=True)
class Trial:
    """One product with everything that may be asked of it."""

    case: cases.Case
    alpha: float = 1.0
    beta: float | None = None
    implementation: str | None = None
    determinism: str = "run_to_run"

    @property
    def id(self) -> str:
        parts = [self.case.id, f"alpha{self.alpha:g}"]
        if self.beta is not None:
            parts.append(f"beta{self.beta:g}")
        return "-".join([*parts, self.implementation or "default", self.determinism])

    @property
    def epilog(self) -> Epilog:
        return self.case.epilog

    def is_possible(self) -> bool:
        """Whether cuBLASMp defines this: activations are real, and the sums of operands want one transposition each."""
        is_complex = self.case.dtype.startswith("complex")
        if is_complex and self.epilog not in (Epilog.NONE, Epilog.BIAS, *OPERAND_SUMS):
            return False
        if any(self.case.conjugation) and not is_complex:
            return False
        if self.epilog == Epilog.BGRADA and self.case.transposition[0] == "N":
            return False
        return not (self.epilog == Epilog.BGRADB and self.case.transposition[1] == "T")

    def refusal(self) -> str:
        """Part of the message with which jaxmp refuses this under its level of determinism, or nothing.

        Written from docs/determinism.md: what XLA would sum or apply an epilog to, nobody promises.
        """
        case, level = self.case, f'determinism="{self.determinism}"'
        if self.determinism == "run_to_run":
            return ""
        has_sums = self.epilog in SUMS
        if has_sums and case.computes_transposed:
            return f"has no epilog {self.epilog.name} where columns of the result are gathered or scattered"
        rows = case.out[0] or ()
        beside = set((rows,) if isinstance(rows, str) else rows) - set(case.group)
        if self.determinism == "topology" and self.epilog in BACKWARD and has_sums and beside:
            return f"{level} has no epilog {self.epilog.name} on rows that are sharded over"
        is_turned_grid = case.pattern == "grid" and case.transposition[0] == "T"
        if self.determinism == "topology" and is_turned_grid and case.dtype.startswith("complex"):
            return f"{level} has no gradient of a complex a that is stored transposed on a 2-D grid"
        lies_over_rows = case.pattern in ("reduce_scatter", "grid") and case.nranks > 1
        if has_sums and self.epilog in BACKWARD and self.implementation == "xla" and lies_over_rows:
            return f"has no epilog {self.epilog.name} where operands are gathered and the rows of the result lie over"
        return ""


# The definitions, in float64 --------------------------------------------------------------------------------------

_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def _tanh_and_slope(z):
    return np.tanh(_SCALE * (z + _CUBIC * z**3)), _SCALE * (1 + 3 * _CUBIC * z**2)


def gelu(z):
    return z / 2 * (1 + _tanh_and_slope(z)[0])


# Where gelu' is 0 or 1, and gelu'' 0, to every digit; at an infinity the formulas would be NaN instead of the limit.
_FAR = 32


def gelu_slope(z):
    z = np.clip(z, -_FAR, _FAR)
    t, du = _tanh_and_slope(z)
    return (1 + t) / 2 + z / 2 * (1 - t**2) * du


def gelu_curvature(z):
    z = np.clip(z, -_FAR, _FAR)
    t, du = _tanh_and_slope(z)
    s = 1 - t**2
    return s * du + z / 2 * (s * _SCALE * 6 * _CUBIC * z - 2 * t * s * du**2)


def draw(trial: Trial, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Operands and inputs as stored, and the weight of each differentiable output in the loss, as w_<output>."""
    case = trial.case
    m, n, _ = case.extents
    x = dict(zip("ab", case.values(rng), strict=True))
    if trial.beta is not None:
        x["c"] = cases.normal(rng, (m, n), case.dtype)
    if trial.epilog in BIASED:
        x["bias"] = cases.normal(rng, (n,), case.dtype)
    if BACKWARD.get(trial.epilog) == "gelu":
        x["gelu_aux"] = cases.normal(rng, (m, n), case.dtype)
    if BACKWARD.get(trial.epilog) == "relu":
        x["relu_aux"] = pack(rng.random((m, n)) < 0.5, column_shards(case))
    shapes = {"d": (m, n), "gelu_aux": (m, n), "bgrada": (m,)}
    for name in ["d", WITH_AUX.get(trial.epilog), SUMS.get(trial.epilog)]:
        if name not in (None, "relu_aux"):
            x[f"w_{name}"] = cases.normal(rng, shapes.get(name, (n,)), case.dtype)
    return x


def column_shards(case: cases.Case) -> int:
    entry = case.out[1]
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return math.prod(dict(case.mesh)[axis] for axis in axes)


def pack(mask: np.ndarray, shards: int) -> np.ndarray:
    """The bits of a mask, column shard by column shard, each padded to a multiple of 16 bytes."""

    def packed(part):
        bits = np.packbits(part, axis=-1, bitorder="little")
        return np.pad(bits, [(0, 0), (0, -bits.shape[1] % 16)])

    return np.concatenate([packed(part) for part in np.split(mask, shards, axis=1)], axis=1)


def unpack(aux: np.ndarray, n: int, shards: int) -> np.ndarray:
    parts = np.split(aux, shards, axis=1)
    return np.concatenate(
        [np.unpackbits(part, axis=1, count=n // shards, bitorder="little") for part in parts], axis=1
    ).astype(bool)


@dataclasses.dataclass
class Expected:
    """A value, what its error is measured in (`scale`, on absolute values), and `extra`: allowed on top.

    Where `may_overflow`, an infinity of the value's sign will do as well.
    """

    value: np.ndarray
    scale: np.ndarray
    extra: np.ndarray | float = 0.0
    may_overflow: np.ndarray | bool = False


def expected(trial: Trial, x: dict[str, np.ndarray], absolute=0.0, underflow=0.0):
    """(outputs, gradients) by name in float64. z may be wrong by `absolute` beside its roundings, and what is stored in
    between by `underflow`."""
    case, u = trial.case, bounds.accumulator_roundoff(trial.case.dtype)
    n, shards = case.extents[1], column_shards(case)
    wide = {name: cases.wide(v) for name, v in x.items() if name != "relu_aux"}
    a, b = case.op(wide["a"], wide["b"])
    z, size = trial.alpha * (a @ b), abs(trial.alpha) * (np.abs(a) @ np.abs(b))
    for name, factor in (("c", trial.beta), ("bias", 1.0)):
        if name in wide and factor != 0:  # beta = 0 does not read C
            z, size = z + factor * wide[name], size + abs(factor) * np.abs(wide[name])
    size = np.where(np.isfinite(size), size, 0.0)  # what is infinite or no number has no error: it is or is not
    z_error = _PRODUCT * u * size + absolute

    # d = f(z), with f's slope, a bound of it and, for what the rounding of z may turn over, the slope's own error.
    kind = FORWARD.get(trial.epilog)
    d, slope, slope_error = z, np.ones_like(z), np.zeros(z.shape)
    factor = np.ones(z.shape)
    if kind == "relu":
        d, slope, slope_error = np.maximum(z, 0), (z > 0).astype(float), (np.abs(z) <= z_error).astype(float)
    elif kind == "gelu":
        d, slope = gelu(z), gelu_slope(z)
        slope_error = 2 * (z_error + kept_error(trial, z))
        slope_error = np.where(np.isfinite(z) & (np.abs(z) - slope_error < _FAR), slope_error, 0.0)
    elif trial.epilog in BACKWARD:
        aux = wide.get("gelu_aux")
        slope = unpack(x["relu_aux"], n, shards).astype(float) if aux is None else gelu_slope(aux)
        # gelu' is a sum of terms that cancel where it is small.
        # A mask selects: what it leaves out is zero, whatever it was.
        d = np.where(slope != 0, z, 0.0) if aux is None else z * slope
        factor = np.abs(slope) if aux is None else np.full(z.shape, 1.2)
        slope_error = np.zeros(z.shape) if aux is None else 8 * u * (1 + np.minimum(np.abs(aux), _FAR))
    elif z.size and np.iscomplexobj(z):
        slope_error = np.zeros(z.shape)
    d_scale = 1.2 * size * factor if kind == "gelu" else size * factor
    # gelu is computed in a few steps, each with a rounding of its own; so is z * slope.
    outputs = {"d": Expected(d, 4 * d_scale if kind == "gelu" or "gelu_aux" in x else d_scale)}
    if WITH_AUX.get(trial.epilog) == "gelu_aux":
        outputs["gelu_aux"] = Expected(z, size)
    elif WITH_AUX.get(trial.epilog) == "relu_aux":
        outputs["relu_aux"] = Expected(z, z_error)
    if trial.epilog in SUMS:
        name = SUMS[trial.epilog]
        summed, scale = {"bgrada": (a, np.abs(a)), "bgradb": (b, np.abs(b))}.get(name, (d, outputs["d"].scale))
        axis = 1 if name == "bgrada" else 0
        # The sum of what is stored: each term of D was rounded to its type.
        stored = (bounds.unit_roundoff(case.dtype) * np.abs(summed) + underflow).sum(axis) if summed is d else 0.0
        outputs[name] = Expected(summed.sum(axis), scale.sum(axis), stored)
    return outputs, _gradients(trial, x, wide, (a, b, z), slope, slope_error, size, underflow)


def kept_error(trial: Trial, z) -> np.ndarray:
    """The gradient of gelu reads z as it was kept: rounded to the type of D."""
    return bounds.unit_roundoff(trial.case.dtype) * np.abs(z)


def _gradients(trial: Trial, x, wide, product, slope, slope_error, size, underflow) -> dict[str, Expected]:
    """Of sum(Re(w_o * o)) over the outputs o; JAX's convention for complex operands."""
    (a, b, z), name = product, SUMS.get(trial.epilog)
    m, n, _ = trial.case.extents
    ct = wide["w_d"] + (np.broadcast_to(wide[f"w_{name}"], (m, n)) if name and name[-5:] == "bgrad" else 0)
    ct_size = np.abs(ct)
    gz = ct * slope + wide.get("w_gelu_aux", 0) * (trial.epilog in FORWARD)
    gz_size = ct_size * (np.abs(slope) + slope_error) + np.abs(wide.get("w_gelu_aux", 0)) * (trial.epilog in FORWARD)
    gz_error = ct_size * slope_error + underflow
    da, da_size = trial.alpha * (gz @ b.T), abs(trial.alpha) * (gz_size @ np.abs(b).T)
    db, db_size = trial.alpha * (a.T @ gz), abs(trial.alpha) * (np.abs(a).T @ gz_size)
    da_extra = abs(trial.alpha) * (gz_error @ np.abs(b).T)
    db_extra = abs(trial.alpha) * (np.abs(a).T @ gz_error)
    if name == "bgrada":
        da, da_size = da + wide["w_bgrada"][:, None], da_size + np.abs(wide["w_bgrada"])[:, None]
    if name == "bgradb":
        db, db_size = db + wide["w_bgradb"][None, :], db_size + np.abs(wide["w_bgradb"])[None, :]
    gradients = {"a": _stored(trial.case, 0, da, da_size, da_extra), "b": _stored(trial.case, 1, db, db_size, db_extra)}
    if "c" in x:
        beta = trial.beta
        parts = (beta * gz, abs(beta) * gz_size, abs(beta) * gz_error) if beta else (np.zeros(z.shape),) * 3
        gradients["c"] = Expected(*parts)
    if "bias" in x:
        gradients["bias"] = Expected(gz.sum(0), gz_size.sum(0), gz_error.sum(0))
    if "gelu_aux" in x:
        aux = wide["gelu_aux"]
        gradients["gelu_aux"] = Expected(
            ct * z * gelu_curvature(aux),
            8 * ct_size * size * (1 + np.minimum(np.abs(aux), _FAR)),
            may_overflow=size * max(1, 1 / abs(trial.alpha)) > 0.99 * float(jnp.finfo(trial.case.dtype).max),
        )
    return gradients


def _stored(case: cases.Case, which: int, *parts) -> Expected:
    """The gradient of op(x) as that of x; the gradient of a conjugated operand is conjugated."""
    value, *rest = (part.T if case.transposition[which] == "T" else part for part in parts)
    return Expected(np.conj(value) if case.conjugation[which] else value, *rest)


# The library ------------------------------------------------------------------------------------------------------


def specs(trial: Trial) -> dict[str, P]:
    case = trial.case
    whole = dict.fromkeys(("c", "gelu_aux", "relu_aux", "w_d", "w_gelu_aux"), case.out)
    sums = dict.fromkeys(f"w_{name}" for name in SUMS.values())
    return {"a": case.stored[0], "b": case.stored[1], "bias": P(case.out[1]), **whole, **{w: P(None) for w in sums}}


def outputs_of(trial: Trial, x) -> dict:
    """Every output of the trial's call on `x`, by name."""
    case, level = trial.case, trial.determinism
    inputs = {name: x[name] for name in ("bias", "gelu_aux", "relu_aux") if name in x}
    d = jaxmp.matmul(
        x["a"],
        x["b"],
        x.get("c"),
        alpha=trial.alpha,
        beta=trial.beta,
        epilog=trial.epilog,
        epilog_inputs=inputs or None,
        implementation=trial.implementation,
        out_sharding=case.out,
        **case.transpose,
        **case.conjugate,
        **({} if level == "run_to_run" else {"determinism": level}),
    )
    return {"d": d[0], **d[1]} if isinstance(d, tuple) else {"d": d}


def loss_of(outputs, rest):
    """A loss that reads every output, each with a weight for every element."""
    terms = [jnp.sum(jnp.real(rest[f"w_{name}"] * value)) for name, value in outputs.items() if f"w_{name}" in rest]
    return sum(terms[1:], terms[0])


def split(x: dict) -> tuple[dict, dict]:
    """(what is differentiated, the rest)."""
    operands = {name: v for name, v in x.items() if name in ("a", "b", "c", "bias", "gelu_aux")}
    return operands, {name: v for name, v in x.items() if name not in operands}


def run(trial: Trial, x: dict[str, np.ndarray]):
    """(outputs, gradients) as jaxmp computes them, jitted, on the case's mesh."""
    case = trial.case

    def program(operands, rest):
        gradients = jax.grad(lambda operands: loss_of(outputs_of(trial, operands | rest), rest))(operands)
        return outputs_of(trial, operands | rest), gradients

    with jax.enable_x64(case.dtype in cases.NEEDS_X64), jax.set_mesh(case.jax_mesh()):
        placed = {name: cases.put(v, case.jax_mesh(), specs(trial)[name]) for name, v in x.items()}
        return cases.quick_jit(program)(*split(placed))


def check(trial: Trial, rng: np.random.Generator) -> None:
    """Run the trial and judge each of its outputs and gradients on every device, or the refusal where it is refused."""
    cases.require(trial.implementation)
    x = draw(trial, rng)
    if trial.refusal():
        with pytest.raises(NotImplementedError, match=re.escape(trial.refusal())):
            run(trial, x)
        return
    (outputs, gradients), (want_outputs, want_gradients) = run(trial, x), expected(trial, x)
    for name, value in outputs.items():
        check_replicas(f"{trial.id} {name}", value)
    check_outputs(trial, outputs, want_outputs)
    check_gradients(trial, gradients, want_gradients)


def check_outputs(trial: Trial, got, want: dict[str, Expected], absolute: float = 0.0) -> None:
    """Judge outputs; `absolute` is allowed beside what rounding allows."""
    assert set(got) == set(want), f"{trial.id}: {sorted(got)}"
    for name, value in want.items():
        if name == "relu_aux":
            judge_mask(trial, got[name], value)
        else:
            judge(trial, name, got[name], value, _PRODUCT, absolute)


def check_gradients(trial: Trial, got, want: dict[str, Expected], absolute: float = 0.0) -> None:
    assert set(got) == set(want), f"{trial.id}: gradients {sorted(got)}"
    for name, value in want.items():
        judge(trial, f"d{name}", got[name], value, _PROGRAM, absolute)


def judge(trial: Trial, name: str, got, want: Expected, c: float, absolute: float = 0.0) -> None:
    dtype = trial.case.dtype
    assert got.dtype == jnp.dtype(dtype), f"{trial.id} {name}: {got.dtype}"
    # Against float64 nothing wider can judge: half of what is allowed is the oracle's own.
    c = 2 * c if dtype in cases.NEEDS_X64 else c
    u_out = bounds.unit_roundoff(dtype)
    is_gradient = name.startswith("d") and name != "d"
    u = u_out if is_gradient else bounds.accumulator_roundoff(dtype)
    allowed = c * (u * want.scale + u_out * np.abs(want.value)) + c * want.extra + absolute
    bounds.judge_special(f"{trial.id} {name}", got, want.value, allowed, want.may_overflow)


def judge_mask(trial: Trial, got, want: Expected) -> None:
    """A bit may differ only where the sign of z is within its rounding; the padding is zero."""
    n, shards = trial.case.extents[1], column_shards(trial.case)
    got = np.asarray(got)
    bits = unpack(got, n, shards)
    wrong = (bits != (want.value > 0)) & (np.abs(want.value) > want.scale)
    assert not wrong.any(), f"{trial.id} relu_aux: {np.count_nonzero(wrong)} bits are wrong"
    np.testing.assert_array_equal(got, pack(bits, shards), err_msg=f"{trial.id} relu_aux: padding")


def fetch(x) -> np.ndarray:
    """`x` on the host; JAX cannot fetch an empty array whose shards are."""
    return np.asarray(x) if x.size else np.zeros(x.shape, x.dtype)


def check_replicas(name: str, x) -> None:
    """Each device has what the array as a whole says that it has."""
    whole = fetch(x)
    for shard in x.addressable_shards if x.size else ():
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(whole[shard.index]).tobytes(), (
            f"{name}: device {shard.device} has other bits than its replicas"
        )
