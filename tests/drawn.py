"""Random products: what is drawn of a number, how it is run, and what it is compared with.

`draw(number)` makes a program of that number alone: layout, transposition, type, extents (primes, ones and zeros among
them), scalars, C, epilog, implementation, level of determinism, a batch, aliased or donated operands. It is compiled
once and runs on several sets of values: from the normal distribution, with zeros of both signs, with NaN, with
infinities, with subnormals, and so large that sums overflow. Each output and gradient is compared with the oracle of
suite.py, element by element: a NaN has to be a NaN, an infinity that infinity, and everything else within the bound.
XLA:CPU flushes subnormals to zero, so there the smallest normal number is allowed beside the bound, and nothing more.
float16's are normal numbers of its accumulator: a result among them is rounded to a multiple of the smallest.

The bound's constant is for terms that cancel. Where k terms add up to a large result, their k partial sums are as large
as it, and their roundings add up to some sqrt(k) / 3 of one. Among millions of elements there are some beyond the bound
for this; they are judged with that term beside it, and counted.

Of a complex number that is not finite it is not judged which of its parts is what.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import warnings

import bounds
import cases
import jax
import jax.numpy as jnp
import numpy as np
import suite
from jax.sharding import PartitionSpec as P
from suite import Expected, Trial

from jaxmp import Epilog

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 61, 127)
KINDS = ("normal", "zeros", "nan", "infinite", "subnormal", "overflowing", "normal again", "normal once more")
BATCH = 3
_SUMS_OF_D = (Epilog.DRELU_BGRAD, Epilog.DGELU_BGRAD)
# By batch: the operands and weights that have it. "rows" is a batch of a, whose rows the call folds together.
_UNBATCHED = {"": None, "rows": ("b", "bias"), "both": ()}


@dataclasses.dataclass(frozen=True)
class Product:
    """A trial, and how it is called. `donated`: "" for nothing, "c" (of a forward pass alone), or "everything"."""

    number: int
    trial: Trial
    batch: str = ""
    is_aliased: bool = False
    donated: str = ""

    @property
    def id(self) -> str:
        more = [f"batch-{self.batch}"] * bool(self.batch) + ["aliased"] * self.is_aliased
        return "-".join([str(self.number), self.trial.id, *more, *[f"donated-{self.donated}"] * bool(self.donated)])

    def has_batch(self, name: str) -> bool:
        unbatched = _UNBATCHED[self.batch]
        return unbatched is not None and name not in unbatched


def draw(number: int) -> Product:
    """The product of this number."""
    rng = np.random.default_rng([number, 0])

    def one_of(choices):
        return choices[rng.integers(len(choices))]

    while True:
        dtype, epilog = one_of(cases.DTYPES), one_of(suite.EPILOGS)
        is_complex = dtype.startswith("complex")
        beta = one_of((None, None, 1.0, -0.75, 2.0, 0.0))
        case = one_of(cases.CASES).replace(
            transposition=one_of(cases.TRANSPOSITIONS),
            conjugation=(bool(rng.integers(2)), bool(rng.integers(2))) if is_complex else (False, False),
            dtype=dtype,
            epilog=epilog,
            has_c=beta is not None,
        )
        is_aliased = bool(rng.random() < 0.15) and case.stored[0] == case.stored[1]
        case = case.replace(per_shard=_extents(rng, case, is_aliased))
        trial = Trial(
            case,
            alpha=one_of((1.0, 0.5, -1.25)),
            beta=beta,
            implementation=one_of(cases.IMPLEMENTATIONS),
            determinism=one_of(("run_to_run", *suite.DETERMINISM)),  # half of them of the default
        )
        batch = one_of(("", "", "", "rows", "both"))
        donated = one_of(("", "", "c" if beta is not None else "", "everything"))
        if trial.is_possible():
            return Product(number, trial, "" if is_aliased else batch, is_aliased, donated)


def _extents(rng, case, is_aliased: bool) -> tuple[int, int, int]:
    """Extents per shard; of aliased operands such that both have one shape."""

    def extent():
        kind = rng.random()
        if kind < 0.06:
            return 0
        if kind < 0.5:
            return int(rng.choice(PRIMES))
        return int(rng.integers(1, 10)) if kind < 0.9 else int(rng.choice((16, 31, 64, 65, 130)))

    m, n, k = extent(), extent(), extent()
    if not is_aliased:
        return m, n, k
    parts = case.replace(per_shard=(1, 1, 1)).extents
    whole = m * math.lcm(*parts)
    same = tuple(whole // part for part in parts)
    # a a^T and a^T a take any k, a a a square a.
    return (same[0], same[1], k) if case.transposition in ("NT", "TN") else same


# Values -----------------------------------------------------------------------------------------------------------


def kinds_of(product: Product) -> tuple[str, ...]:
    """The kinds of values with which the product runs, in order; "normal" in place of those that do not fit it."""
    trial = product.trial
    left_out = set()
    if product.is_aliased:
        left_out.add("subnormal")  # their products with each other say nothing
    if trial.case.dtype not in ("float32", "bfloat16", "float16") or trial.epilog in _SUMS_OF_D:
        left_out.add("overflowing")  # float64 overflows in the oracle too; signs mix
    if suite.FORWARD.get(trial.epilog) == "gelu" and trial.alpha < 0:
        left_out.add("overflowing")  # gelu(-inf) is jax.nn.gelu's NaN
    return tuple("normal" if kind in left_out else kind for kind in KINDS)


def values(product: Product, kind: str, rng) -> dict[str, np.ndarray]:
    """Operands as stored and weights of the loss, with a batch in front of those that have one."""
    examples = [_example(product, kind, rng) for _ in range(BATCH if product.batch else 1)]
    return {
        name: np.stack([x[name] for x in examples]) if product.has_batch(name) else v for name, v in examples[0].items()
    }


def _example(product: Product, kind: str, rng) -> dict[str, np.ndarray]:
    x = suite.draw(product.trial, rng)
    dtype, inputs = product.trial.case.dtype, [x[name] for name in ("a", "b", "c", "bias", "gelu_aux") if name in x]
    if kind == "zeros":
        for v in inputs:
            v[rng.random(v.shape) < 0.5] *= np.zeros((), dtype)  # which keeps the sign
    elif kind in ("nan", "infinite"):
        for v in inputs:
            if v.size and rng.random() < 0.5:
                places = rng.integers(v.size, size=rng.integers(1, 4))
                special = np.nan if kind == "nan" else rng.choice((-np.inf, np.inf), places.shape)
                v.ravel()[places] = np.broadcast_to(special, places.shape).astype(dtype)
    elif kind == "subnormal":
        _make_subnormal(product.trial, x, rng)
    elif kind == "overflowing":
        _make_overflowing(product.trial, x, rng)
    return x | {"b": x["a"]} if product.is_aliased else x


def _make_subnormal(trial: Trial, x: dict[str, np.ndarray], rng) -> None:
    """Rows of op(a) of subnormal numbers, they and what they meet so small that no sum of them is normal.

    So whatever is flushed, no result is further off than the smallest normal number.
    """
    case, tiny = trial.case, float(jnp.finfo(trial.case.dtype).tiny)
    (m, n, k), dtype = case.extents, jnp.dtype(trial.case.dtype)
    summed = max(m, 1) if trial.epilog in _SUMS_OF_D else 1

    def scale(v, factor):
        v[...] = (v.astype(np.complex128 if v.dtype.kind == "c" else np.float64) * factor).astype(dtype)

    a = x["a"].T if case.transposition[0] == "T" else x["a"]
    rows = rng.random(m) < 0.7
    a[rows] = (tiny / (summed * max(k, 1)) * rng.random((np.count_nonzero(rows), k))).astype(dtype)
    scale(x["b"], 1 / (8 * max(k, 1)))
    for name in x:
        if name.startswith("w_"):
            scale(x[name], 1 / (64 * max(m, n, 1)))
    if rng.random() < 0.5:
        for name in ("c", "bias"):
            if name in x:
                scale(x[name], tiny / (16 * summed))


def _make_overflowing(trial: Trial, x: dict[str, np.ndarray], rng) -> None:
    """Positive a and b of few bits, so that no order of the sum matters: some rows overflow and others do not.

    All rows within a factor of four: of few large terms among many the bound would be too small for its roundings.
    """
    case, dtype = trial.case, jnp.dtype(trial.case.dtype)
    largest, of_b = (16, 5) if dtype == jnp.float16 else (128, 61)
    of_a = largest - of_b - int(np.log2(4 * max(case.extents[2], 1)))  # k products of 4 on average
    a = x["a"].T if case.transposition[0] == "T" else x["a"]
    a[...] = (rng.integers(1, 4, a.shape) * 2.0 ** (of_a + rng.integers(-1, 2, (a.shape[0], 1)))).astype(dtype)
    x["b"][...] = (rng.integers(1, 4, x["b"].shape) * 2.0**of_b).astype(dtype)


# The library ------------------------------------------------------------------------------------------------------


def compile_product(product: Product, x: dict[str, np.ndarray]):
    """f(values) -> (outputs, gradients), compiled once; without gradients where the program has a forward pass only."""
    trial, mesh = product.trial, product.trial.case.jax_mesh()
    specs = {name: P(None, *spec) if product.has_batch(name) else spec for name, spec in suite.specs(trial).items()}

    def outputs_of(operands, rest):
        def one(x):
            return suite.outputs_of(trial, x | ({"b": x["a"]} if product.is_aliased else {}))

        x = operands | rest
        if not product.batch:
            return one(x)
        return jax.vmap(one, ({name: 0 if product.has_batch(name) else None for name in x},))(x)

    def program(operands, rest):
        if product.donated == "c":
            return outputs_of(operands, rest), {}
        gradients = jax.grad(lambda operands: suite.loss_of(outputs_of(operands, rest), rest))(operands)
        return outputs_of(operands, rest), gradients

    def split(x):
        operands, rest = suite.split({name: v for name, v in x.items() if name != "b" or not product.is_aliased})
        if product.donated == "c":  # alone in the argument that is donated
            return {"c": operands["c"]}, {name: v for name, v in (operands | rest).items() if name != "c"}
        return operands, rest

    def is_64_bit():
        return jax.enable_x64(trial.case.dtype in cases.NEEDS_X64)

    jitted = cases.quick_jit(program, donate_argnums=(0,) if product.donated else ())

    def run(x):
        with is_64_bit(), jax.set_mesh(mesh), warnings.catch_warnings():
            # An operand is donated though it may have no use: then the program must go on as if it had not been.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            return jitted(*split({name: cases.put(v, mesh, specs[name]) for name, v in x.items()}))

    return run


# The judge --------------------------------------------------------------------------------------------------------


def check(product: Product, kind: str, x: dict[str, np.ndarray], got) -> int:
    """Judge every output and gradient, on every device; how many of them took the term of large sums."""
    trial, (outputs, gradients) = product.trial, got
    absolute = allowed_beside(trial, kind)
    for name, value in outputs.items():
        suite.check_replicas(f"{product.id} {name}", value)
    outputs = {name: suite.fetch(value) for name, value in outputs.items()}
    wanted = [expected(product, kind, _part(product, x, i), absolute) for i in range(BATCH if product.batch else 1)]
    count = 0
    for i, (want, _) in enumerate(wanted):
        one = {name: value[i] if product.batch else value for name, value in outputs.items()}
        count += _judged(product, suite.check_outputs, one, want, absolute)
    joined = {name: _stacked if product.has_batch(name) else _summed for name in gradients}
    want = {name: join([gradients[name] for _, gradients in wanted]) for name, join in joined.items()}
    gradients = {name: suite.fetch(value) for name, value in gradients.items()}
    return count + _judged(product, suite.check_gradients, gradients, want, absolute)


def _judged(product: Product, judge, got, want: dict[str, Expected], absolute: float) -> int:
    """Judge by the bound, and what is beyond it with the term of large sums: whether that was so."""
    try:
        judge(product.trial, got, want, absolute)
    except AssertionError as error:
        if "out of bounds" not in str(error):
            raise
        judge(product.trial, got, {name: _of_large_sums(product, name, x) for name, x in want.items()}, absolute)
        return 1
    return 0


def _of_large_sums(product: Product, name: str, want: Expected) -> Expected:
    m, n, k = product.trial.case.extents
    m = m if name not in ("b", "bias") or product.has_batch(name) or not product.batch else m * BATCH
    terms = {"a": max(m, n) if product.is_aliased else n, "b": m, "bias": m, "bgrada": k, "bgradb": k}
    count = terms.get(name, m if name in suite.SUMS.values() else k)
    roundings = bounds.accumulator_roundoff(product.trial.case.dtype) * np.sqrt(count) / 3
    return dataclasses.replace(want, extra=want.extra + roundings * np.abs(want.value))


def allowed_beside(trial: Trial, kind: str) -> float:
    """What a flushed subnormal changes, or one that is rounded."""
    if trial.case.dtype == "float16":
        return float(jnp.finfo(trial.case.dtype).smallest_subnormal)
    return float(jnp.finfo(trial.case.dtype).tiny) if kind == "subnormal" else 0.0


def expected(product: Product, kind: str, x, absolute: float):
    with np.errstate(all="ignore"):
        underflow = absolute if product.trial.case.dtype == "float16" else 0.0
        outputs, gradients = suite.expected(product.trial, x, absolute, underflow)
    if product.is_aliased:
        gradients["a"] = _summed([gradients["a"], gradients.pop("b")])
    if kind == "overflowing":
        outputs, gradients = (
            {name: v if name == "relu_aux" else _overflowed(product.trial, v) for name, v in each.items()}
            for each in (outputs, gradients)
        )
    return outputs, gradients


def _overflowed(trial: Trial, want: Expected) -> Expected:
    """With the infinities of the type; within a hundredth of its largest number both are right."""
    most = float(jnp.finfo(trial.case.dtype).max)
    value = np.where(np.abs(want.value) > 1.01 * most, np.copysign(np.inf, want.value), want.value)
    return dataclasses.replace(
        want, value=value, may_overflow=want.may_overflow | (want.scale * max(1, 1 / abs(trial.alpha)) > 0.99 * most)
    )


def _part(product: Product, x, i: int):
    return {name: v[i] if product.has_batch(name) else v for name, v in x.items()}


def _summed(parts: list[Expected]) -> Expected:
    with np.errstate(invalid="ignore"):  # inf - inf
        value, scale, extra = (sum(getattr(part, name) for part in parts) for name in ("value", "scale", "extra"))
    return Expected(value, scale, extra, np.any([np.broadcast_to(p.may_overflow, value.shape) for p in parts], axis=0))


def _stacked(parts: list[Expected]) -> Expected:
    shape = parts[0].value.shape
    fields = ("value", "scale", "extra", "may_overflow")
    return Expected(*(np.stack([np.broadcast_to(getattr(part, name), shape) for part in parts]) for name in fields))


# Many -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Tally:
    """What has been drawn, and what was wrong."""

    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failures: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))


def check_number(number: int, count: int, tally: Tally) -> None:
    """Draw the product of a number and judge it on `count` sets of values, at most len(KINDS)."""
    product = draw(number)
    trial = product.trial
    cases.require(trial.implementation)
    rng = np.random.default_rng([number, 1])
    run = None
    for kind in kinds_of(product)[:count]:
        x = values(product, kind, rng)
        run = run or compile_product(product, x)
        try:
            got = run(x)
        except NotImplementedError as error:
            if not is_refusal(product, str(error)):
                raise
            tally.counts["programs refused"] += 1
            return
        # Under vmap the sums of an epilog are operations of their own, which are refused elsewhere; of nothing there
        # are none; and some refusals are of gradients.
        may_pass = product.batch or 0 in trial.case.extents or product.donated == "c"
        assert may_pass or not trial.refusal(), f"{product.id}: is not refused"
        tally.counts["beyond the bound but for the roundings of large sums"] += check(product, kind, x, got)
        _count(product, kind.split()[0], got, tally)


def is_refusal(product: Product, message: str) -> bool:
    """Whether the message is one that docs/determinism.md has for this product."""
    trial = product.trial
    has_sums = trial.determinism == "topology" and trial.epilog in suite.SUMS
    if has_sums and product.batch and f"has no epilog {trial.epilog.name} under vmap" in message:
        return True
    # A sum over nothing has its epilog beside a call, on each device's rows.
    if has_sums and not trial.case.extents[2] and f"has no epilog {trial.epilog.name} on rows that are" in message:
        return True
    return bool(trial.refusal()) and trial.refusal() in message


def _count(product: Product, kind: str, got, tally: Tally) -> None:
    trial = product.trial
    tally.counts["products"] += 1
    for what, is_so in {
        f"of {kind} values": True,
        "with gradients": bool(got[1]),
        "with a batch": product.batch,
        "with aliased operands": product.is_aliased,
        "with donated operands": product.donated,
        "empty": 0 in trial.case.extents,
        "with a prime extent per shard": set(trial.case.per_shard) & set(PRIMES),
        f"of {trial.case.dtype}": True,
        f"of pattern {trial.case.pattern}": True,
        f'of level "{trial.determinism}"': True,
        f"by {trial.implementation or 'the default'}": True,
    }.items():
        tally.counts[what] += bool(is_so)
