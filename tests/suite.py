"""The numerics suite: one product with every option, judged output by output.

A `Trial` is a case (layout, transposition, type, extents; cases.py), a way to call (modes.py), scalars, C, epilog,
implementation, level of determinism, batch, and whether operands are aliased or donated. `compiled` computes every
output and, with them, the gradients of a loss that reads every output; `check_results` compares both with numpy in
float64, element by element, under

    |x - x*| <= c * (u_acc * X + u_out * |x*|),

with X as the same expression on absolute values (bounds.py); all replicas of a shard must be bitwise equal. The oracle
below is written from the definitions, in numpy, and shares no code with the library.

The bound's constant assumes that terms cancel. If k terms add up to a large result, the k partial sums are as large as
the result, and their roundings add up to about sqrt(k) / 3 of one. Of millions of elements, some exceed the bound
because of this; they are judged with this term added. The parts of a complex number that is not finite are not judged.
"""

from __future__ import annotations

import dataclasses
import math
import warnings

import bounds
import cases
import jax
import jax.numpy as jnp
import modes
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmp import Epilog

_ACTIVATED = [f"{kind}{rest}" for kind in ("RELU", "GELU") for rest in ("", "_BIAS", "_AUX", "_AUX_BIAS")]
FORWARD = {Epilog.NONE: None, Epilog.BIAS: None} | {Epilog[name]: name[:4].lower() for name in _ACTIVATED}
BACKWARD = {Epilog[name]: name[1:5].lower() for name in ("DRELU", "DRELU_BGRAD", "DGELU", "DGELU_BGRAD")}
OPERAND_SUMS = (Epilog.BGRADA, Epilog.BGRADB)
EPILOGS = (*FORWARD, *BACKWARD, *OPERAND_SUMS)
BIASED = tuple(epilog for epilog in FORWARD if epilog.name.endswith("BIAS"))
WITH_AUX = {epilog: f"{kind}_aux" for epilog, kind in FORWARD.items() if "_AUX" in epilog.name}
SUMS = {epilog: epilog.name.lower() for epilog in EPILOGS if "BGRAD" in epilog.name}
DETERMINISM = ("run_to_run", "batch", "topology")
_PRODUCT, _PROGRAM = bounds.PRODUCT, bounds.PROGRAM


BATCH = 3
# Batch: the operands that have it, like the weights of the loss; "rows" of a fold into the rows of one call, "columns"
# of b into its columns.
_BATCHED = {
    "": (),
    "rows": ("a", "c", "relu_aux", "gelu_aux"),
    "columns": ("b", "bias"),
    "both": ("a", "b", "c", "bias", "relu_aux", "gelu_aux"),
    "c": ("c",),
    "bias": ("bias",),
    "aux": ("relu_aux", "gelu_aux"),
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One product with every option. `traced` names the scalars that are operands; `donated` is "", "c" (in a forward
    pass only), or "everything"."""

    case: cases.Case
    alpha: float = 1.0
    beta: float | None = None
    implementation: str | None = None
    determinism: str = "run_to_run"
    mode: str = "explicit"
    traced: tuple[str, ...] = ()
    batch: str = ""
    is_aliased: bool = False
    donated: str = ""
    has_remat: bool = False

    @property
    def id(self) -> str:
        parts = [self.case.id, f"alpha{self.alpha:g}", "" if self.beta is None else f"beta{self.beta:g}", *self.traced]
        parts += [self.implementation or "default", self.determinism, self.mode, self.batch and f"batch-{self.batch}"]
        parts += ["aliased" * self.is_aliased, self.donated and f"donated-{self.donated}", "remat" * self.has_remat]
        return "-".join(filter(None, parts))

    @property
    def epilog(self) -> Epilog:
        return self.case.epilog

    @property
    def mask_shards(self) -> int:
        """Returns the number of shards of a packed mask's columns."""
        return 1 if self.mode.startswith(("partitioner", "no-mesh")) else self.case.column_shards

    def has_batch(self, name: str) -> bool:
        return name in _BATCHED[self.batch] or (bool(self.batch) and name.startswith("w_"))

    def is_possible(self) -> bool:
        case = self.case
        return is_possible(case.epilog, case.transposition, case.dtype.startswith("complex"), case.conjugation)

    def refusal(self) -> str:
        """Returns a part of jaxmp's message if it refuses this trial under its level of determinism, otherwise "".
        Follows docs/determinism.md: there is no promise for sums and epilogs that XLA would compute."""
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
            return f"has no epilog {self.epilog.name} where operands are gathered and the rows of the result are"
        return ""


def is_possible(epilog: Epilog, transposition: str, is_complex: bool, conjugation: tuple[bool, bool]) -> bool:
    """True if cuBLASMp defines this: activations are real, and the sums of each operand need one transposition."""
    if is_complex and epilog not in (Epilog.NONE, Epilog.BIAS, *OPERAND_SUMS):
        return False
    is_stored_so = {Epilog.BGRADA: transposition[0] == "T", Epilog.BGRADB: transposition[1] == "N"}
    return is_stored_so.get(epilog, True) and (is_complex or not any(conjugation))


_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def _tanh_and_slope(z):
    return np.tanh(_SCALE * (z + _CUBIC * z**3)), _SCALE * (1 + 3 * _CUBIC * z**2)


def gelu(z):
    return z / 2 * (1 + _tanh_and_slope(z)[0])


# From here gelu' is 0 or 1, and gelu'' 0, to every digit; at an infinity the formulas would give NaN instead.
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
    """Returns stored operands and inputs, and the loss's weights of each differentiable output, as w_<output>."""
    case = trial.case
    m, n, _ = case.extents
    x = dict(zip("ab", case.values(rng), strict=True))
    if trial.beta is not None:
        x["c"] = cases.normal(rng, (m, n), case.dtype)
    for name in trial.traced:
        x[name] = np.asarray(getattr(trial, name), scalar_type(case.dtype))
    if trial.epilog in BIASED:
        x["bias"] = cases.normal(rng, (n,), case.dtype)
    if BACKWARD.get(trial.epilog) == "gelu":
        x["gelu_aux"] = cases.normal(rng, (m, n), case.dtype)
    if BACKWARD.get(trial.epilog) == "relu":
        x["relu_aux"] = pack(rng.random((m, n)) < 0.5, trial.mask_shards, padding=True)  # must not matter
    shapes = {"d": (m, n), "gelu_aux": (m, n), "bgrada": (m,)}
    for name in ["d", WITH_AUX.get(trial.epilog), SUMS.get(trial.epilog)]:
        if name not in (None, "relu_aux"):
            x[f"w_{name}"] = cases.normal(rng, shapes.get(name, (n,)), case.dtype)
    return x


def pack(mask: np.ndarray, shards: int, padding: bool = False) -> np.ndarray:
    """Returns the bits of a mask by column shards, each padded to a multiple of 16 bytes."""

    def packed(part):
        wide = np.pad(part, [(0, 0), (0, -part.shape[1] % 128)], constant_values=padding)
        return np.packbits(wide, axis=-1, bitorder="little")

    return np.concatenate([packed(part) for part in np.split(mask, shards, axis=1)], axis=1)


def unpack(aux: np.ndarray, n: int, shards: int) -> np.ndarray:
    parts = np.split(aux, shards, axis=1)
    return np.concatenate(
        [np.unpackbits(part, axis=1, count=n // shards, bitorder="little") for part in parts], axis=1
    ).astype(bool)


@dataclasses.dataclass
class Expected:
    """A value, the `scale` of its error (the expression on absolute values), and `extra`: an additional allowance. If
    `may_overflow`, an infinity of the value's sign is accepted, too."""

    value: np.ndarray
    scale: np.ndarray
    extra: np.ndarray | float = 0.0
    may_overflow: np.ndarray | bool = False


def expected(trial: Trial, x: dict[str, np.ndarray], absolute=0.0, underflow=0.0):
    """Returns (outputs, gradients) by name in float64. `absolute`: allowed error of z in addition to its roundings;
    `underflow`: allowed error of stored intermediate values."""
    case, u = trial.case, bounds.accumulator_roundoff(trial.case.dtype)
    n, shards = case.extents[1], trial.mask_shards
    wide = {name: cases.wide(v) for name, v in x.items() if name != "relu_aux"}
    a, b = case.op(wide["a"], wide["b"])
    z, size = trial.alpha * (a @ b), abs(trial.alpha) * (np.abs(a) @ np.abs(b))
    for name, factor in (("c", trial.beta), ("bias", 1.0)):
        if name in wide and factor != 0:  # beta = 0 does not read C
            z, size = z + factor * wide[name], size + abs(factor) * np.abs(wide[name])
    size = np.where(np.isfinite(size), size, 0.0)  # infinities and NaN have no error: they are right or wrong
    z_error = _PRODUCT * u * size + absolute

    # d = f(z); f's slope, a factor that bounds it, and the slope's own error, because rounding z may change the slope.
    kind = FORWARD.get(trial.epilog)
    d, slope, slope_error = z, np.ones_like(z), np.zeros(z.shape)
    factor = np.ones(z.shape)
    if kind == "relu":
        d, slope, slope_error = np.maximum(z, 0), (z > 0).astype(float), (np.abs(z) <= z_error).astype(float)
    elif kind == "gelu":
        d, slope = gelu(z), gelu_slope(z)
        kept = bounds.unit_roundoff(case.dtype) * np.abs(z)  # the rounding of the z that the gradient reads
        slope_error = 2 * (z_error + kept)
        slope_error = np.where(np.isfinite(z) & (np.abs(z) - slope_error < _FAR), slope_error, 0.0)
    elif trial.epilog in BACKWARD:
        aux = wide.get("gelu_aux")
        slope = unpack(x["relu_aux"], n, shards).astype(float) if aux is None else gelu_slope(aux)
        # gelu' is a sum of terms that cancel if it is small. A mask selects: masked elements are zero, even a NaN.
        d = np.where(slope != 0, z, 0.0) if aux is None else z * slope
        factor = np.abs(slope) if aux is None else np.full(z.shape, 1.2)
        slope_error = np.zeros(z.shape) if aux is None else 8 * u * (1 + np.minimum(np.abs(aux), _FAR))
    d_scale = 1.2 * size * factor if kind == "gelu" else size * factor
    # gelu is computed in a few steps, and each is rounded; so is z * slope.
    outputs = {"d": Expected(d, 4 * d_scale if kind == "gelu" or "gelu_aux" in x else d_scale)}
    if WITH_AUX.get(trial.epilog) == "gelu_aux":
        outputs["gelu_aux"] = Expected(z, size)
    elif WITH_AUX.get(trial.epilog) == "relu_aux":
        outputs["relu_aux"] = Expected(z, z_error)
    if trial.epilog in SUMS:
        name = SUMS[trial.epilog]
        summed, scale = {"bgrada": (a, np.abs(a)), "bgradb": (b, np.abs(b))}.get(name, (d, outputs["d"].scale))
        axis = 1 if name == "bgrada" else 0
        # The sum is over stored values: each term of D was rounded to its type.
        stored = (bounds.unit_roundoff(case.dtype) * np.abs(summed) + underflow).sum(axis) if summed is d else 0.0
        outputs[name] = Expected(summed.sum(axis), scale.sum(axis), stored)
    return outputs, _gradients(trial, x, wide, (a, b, z), slope, slope_error, size, underflow)


def _gradients(trial: Trial, x, wide, product, slope, slope_error, size, underflow) -> dict[str, Expected]:
    """Returns the gradients of sum(Re(w_o * o)) over the outputs o, in JAX's convention for complex operands."""
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
    for name, factor, absolute in (("alpha", a @ b, np.abs(a) @ np.abs(b)), ("beta", *[wide.get("c")] * 2)):
        if name in trial.traced:
            parts = np.real(gz * factor), gz_size * np.abs(absolute), gz_error * np.abs(absolute)
            gradients[name] = Expected(*(part.sum() for part in parts))
    if "gelu_aux" in x:
        aux = wide["gelu_aux"]
        gradients["gelu_aux"] = Expected(
            ct * z * gelu_curvature(aux),
            8 * ct_size * size * (1 + np.minimum(np.abs(aux), _FAR)),
            may_overflow=size * max(1, 1 / abs(trial.alpha)) > 0.99 * float(jnp.finfo(trial.case.dtype).max),
        )
    return gradients


def _stored(case: cases.Case, which: int, *parts) -> Expected:
    """Converts a gradient of op(x) to a gradient of x; the gradient of a conjugated operand is conjugated."""
    value, *rest = (part.T if case.transposition[which] == "T" else part for part in parts)
    return Expected(np.conj(value) if case.conjugation[which] else value, *rest)


def specs(trial: Trial) -> dict[str, P]:
    case = trial.case
    whole = dict.fromkeys(("c", "gelu_aux", "relu_aux", "w_d", "w_gelu_aux"), case.out)
    whole |= {"relu_aux": P(case.out[0])} if trial.mode == "partitioner" else {}
    sums = dict.fromkeys(f"w_{name}" for name in SUMS.values())
    found = {"a": case.stored[0], "b": case.stored[1], "bias": P(case.out[1]), **whole, **{w: P(None) for w in sums}}
    return {name: P(None, *spec) if trial.has_batch(name) else spec for name, spec in found.items()}


def outputs_of(trial: Trial, x) -> dict:
    """Returns every output of the trial's call on `x`, by name."""
    x = x | {"b": x["a"]} if trial.is_aliased else x
    scalars = {"alpha": trial.alpha, "beta": trial.beta} | {name: x[name] for name in trial.traced}
    options = {"epilog": trial.epilog, "implementation": trial.implementation, **scalars}
    options |= {} if trial.determinism == "run_to_run" else {"determinism": trial.determinism}
    call = modes.BY_ID[trial.mode].product(trial.case, **options)
    d = call(x["a"], x["b"], x.get("c"), **{name: x[name] for name in ("bias", "gelu_aux", "relu_aux") if name in x})
    return {"d": d[0], **d[1]} if isinstance(d, tuple) else {"d": d}


def loss_of(outputs, rest):
    """Returns a loss that reads every output, with a weight for each element."""
    terms = [jnp.sum(jnp.real(rest[f"w_{name}"] * value)) for name, value in outputs.items() if f"w_{name}" in rest]
    return sum(terms[1:], terms[0])


def split(trial: Trial, x: dict) -> tuple[dict, dict]:
    """Returns (operands to differentiate, the rest)."""
    names = ("c",) if trial.donated == "c" else ("a", "b", "c", "bias", "gelu_aux", *trial.traced)
    x = {name: v for name, v in x.items() if name != "b" or not trial.is_aliased}
    return {name: v for name, v in x.items() if name in names}, {name: v for name, v in x.items() if name not in names}


def compiled(trial: Trial):
    """Compiles f(values) -> (outputs, gradients); gradients are {} if c is donated, in a forward pass only."""
    case, mode = trial.case, modes.BY_ID[trial.mode]

    def outputs(operands, rest):
        def one(x):
            return outputs_of(trial, x)

        x = operands | rest
        f = jax.checkpoint(one) if trial.has_remat else one
        return jax.vmap(f, ({name: 0 if trial.has_batch(name) else None for name in x},))(x) if trial.batch else f(x)

    def program(operands, rest):
        if trial.donated == "c":
            return outputs(operands, rest), {}
        gradients = jax.grad(lambda operands: loss_of(outputs(operands, rest), rest))(operands)
        return outputs(operands, rest), gradients

    donated = (0,) if trial.donated else ()
    jitted = jax.jit(program, donate_argnums=donated) if mode.is_jitted else program

    def run(x):
        with jax.enable_x64(case.dtype in cases.NEEDS_X64), mode.scope(case), warnings.catch_warnings():
            # A donated operand may have no use; then the program must work as without donation.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            where = specs(trial)
            return jitted(*split(trial, {name: mode.put(case, v, where.get(name, P())) for name, v in x.items()}))

    return run


def check_results(trial: Trial, x, got, oracle, absolute: float = 0.0, is_exact: bool = False) -> None:
    """Judges every output and gradient by `oracle(trial, example)`; `absolute` is allowed in addition to the bound."""
    outputs, gradients = got
    for name, value in outputs.items():
        check_replicas(f"{trial.id} {name}", value)
    count = BATCH if trial.batch else 1
    parts = [{name: v[i] if trial.has_batch(name) else v for name, v in x.items()} for i in range(count)]
    wanted = [oracle(trial, part) for part in parts]
    if trial.is_aliased:
        for _, want in wanted:
            want["a"] = _summed([want["a"], want.pop("b")])
    cut = mask_shards_of(trial, outputs)
    outputs, gradients = ({name: fetch(value) for name, value in each.items()} for each in (outputs, gradients))
    for i, (want, _) in enumerate(wanted):
        assert set(outputs) == set(want), f"{trial.id}: {sorted(outputs)}"
        for name, value in want.items():
            one = outputs[name][i] if trial.batch else outputs[name]
            if name == "relu_aux":
                judge_mask(trial, one, value, cut)
            else:
                judge(trial, name, one, value, _PRODUCT, absolute, is_exact and name == "d")
    assert trial.donated == "c" or set(gradients) == set(wanted[0][1]), f"{trial.id}: gradients {sorted(gradients)}"
    is_exact = is_exact and trial.case.dtype not in ("bfloat16", "float16")
    for name, value in gradients.items():
        want = (_stacked if trial.has_batch(name) else _summed)([each[name] for _, each in wanted])
        judge(trial, f"d{name}", value, want, _PROGRAM, absolute, is_exact)


def judge(
    trial: Trial, name: str, got, want: Expected, c: float, absolute: float = 0.0, is_exact: bool = False
) -> None:
    """Judges by the bound; adds the term of large sums for elements beyond it. Exact results are compared bitwise."""
    dtype = trial.case.dtype
    # Scalar operands have the accumulator's type, and it is real.
    is_scalar = name in ("dalpha", "dbeta")
    assert got.dtype == (scalar_type(dtype) if is_scalar else jnp.dtype(dtype)), f"{trial.id} {name}: {got.dtype}"
    if is_exact:
        np.testing.assert_array_equal(got, want.value.astype(got.dtype), err_msg=f"{trial.id} {name}")
        return
    # Nothing wider than float64 can judge it, so half of the allowance is for the oracle's own error.
    c = 2 * c if dtype in cases.NEEDS_X64 else c
    u_out = bounds.unit_roundoff(dtype)
    u = u_out if name.startswith("d") and name != "d" else bounds.accumulator_roundoff(dtype)
    allowed = c * (u * want.scale + u_out * np.abs(want.value)) + c * want.extra + absolute
    try:
        bounds.judge_special(f"{trial.id} {name}", got, want.value, allowed, want.may_overflow)
    except AssertionError as error:
        if "out of bounds" not in str(error):
            raise
        roundings = c * bounds.accumulator_roundoff(dtype) * np.sqrt(_terms_of(trial, name)) / 3
        allowed = allowed + roundings * np.abs(want.value)
        bounds.judge_special(f"{trial.id} {name}", got, want.value, allowed, want.may_overflow)


def _terms_of(trial: Trial, name: str) -> int:
    """Returns the number of terms of a sum."""
    m, n, k = trial.case.extents
    rows = m if name not in ("db", "dbias") or trial.has_batch(name[1:]) or not trial.batch else m * BATCH
    terms = {"da": max(m, n) if trial.is_aliased else n, "db": rows, "dbias": rows, "bgrada": k, "bgradb": k}
    return terms.get(name, m * n * BATCH if name in ("dalpha", "dbeta") else m if name in SUMS.values() else k)


def scalar_type(dtype) -> np.dtype:
    return np.dtype("float64" if dtype in cases.NEEDS_X64 else "float32")


def mask_shards_of(trial: Trial, outputs) -> int:
    """Returns the number of column shards of a result's mask; XLA's partitioner chooses its own."""
    if "relu_aux" not in outputs or trial.mode != "partitioner":
        return trial.mask_shards
    mask = outputs["relu_aux"]
    if not mask.size or mask.shape[-1] == -(-trial.case.extents[1] // 128) * 16:
        return 1
    return mask.shape[-1] // min(shard.data.shape[-1] for shard in mask.addressable_shards)


def judge_mask(trial: Trial, got, want: Expected, shards: int) -> None:
    """Judges a mask: a bit may differ only if rounding can change the sign of z; the padding must be zero."""
    bits = unpack(got, trial.case.extents[1], shards)
    wrong = (bits != (want.value > 0)) & (np.abs(want.value) > want.scale)
    assert not wrong.any(), f"{trial.id} relu_aux: {np.count_nonzero(wrong)} bits are wrong"
    np.testing.assert_array_equal(got, pack(bits, shards), err_msg=f"{trial.id} relu_aux: padding")


def _summed(parts: list[Expected]) -> Expected:
    with np.errstate(invalid="ignore"):  # inf - inf
        value, scale, extra = (sum(getattr(part, name) for part in parts) for name in ("value", "scale", "extra"))
    return Expected(value, scale, extra, np.any([np.broadcast_to(p.may_overflow, value.shape) for p in parts], axis=0))


def _stacked(parts: list[Expected]) -> Expected:
    shape = parts[0].value.shape
    fields = ("value", "scale", "extra", "may_overflow")
    return Expected(*(np.stack([np.broadcast_to(getattr(part, name), shape) for part in parts]) for name in fields))


def fetch(x) -> np.ndarray:
    """Fetches `x` to the host; JAX cannot fetch an empty sharded array."""
    return np.asarray(x) if x.size else np.zeros(x.shape, x.dtype)


def check_replicas(name: str, x) -> None:
    """Asserts that each device's shard has the same bits as the whole array."""
    whole = fetch(x)
    for shard in x.addressable_shards if x.size else ():
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(whole[shard.index]).tobytes(), (
            f"{name}: device {shard.device} has other bits than its replicas"
        )
