"""Products on one GPU: jaxmp over cuBLASMp, XLA, and nvmath-python where it installs (`make bench-gpu`).

All contenders take their turns in one run, at one precision: XLA multiplies float32 in TF32 unless it is told
otherwise, and jaxmp does not. A large product is one of several calls in flight; a small one is one of many in a
program, because its own cost over XLA's is a few microseconds. Each case is in the file of --json before the next one
begins, and --resume skips cases that are in the file. With --write-docs the tables go into
docs/gpu.md.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from common import interleaved, machine, table

import jaxmp
from jaxmp import Epilog
from jaxmp._src.platform.runtime import native

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "gpu.md"
BEGIN, END = "<!-- measurements -->", "<!-- end of measurements -->"

TF32 = jax.lax.DotAlgorithmPreset.TF32_TF32_F32


@dataclasses.dataclass(frozen=True)
class Large:
    """A product: m, k, n; types of the operands and of the result; epilog; at what precision, by everyone."""

    shape: tuple[int, int, int]
    dtype: str
    out: str
    epilog: Epilog = Epilog.NONE
    precision: Any = None

    @property
    def name(self) -> str:
        precision = getattr(self.precision, "name", self.precision) or "default"
        return f"{'x'.join(map(str, self.shape))} {self.dtype}->{self.out} {self.epilog.name} {precision}"


CUBE, LAYER = (8192,) * 3, (4096, 4096, 14336)
LARGE = [
    Large(CUBE, "bfloat16", "bfloat16"),
    Large(CUBE, "bfloat16", "bfloat16", Epilog.BIAS),
    Large(CUBE, "bfloat16", "bfloat16", Epilog.GELU_AUX_BIAS),
    Large(LAYER, "bfloat16", "bfloat16", Epilog.BIAS),
    Large(LAYER, "bfloat16", "bfloat16", Epilog.GELU_AUX_BIAS),
    Large(CUBE, "float8_e4m3fn", "bfloat16"),
    Large(CUBE, "float32", "float32", precision="highest"),
    Large(CUBE, "float32", "float32", precision=TF32),
    Large((4096,) * 3, "float64", "float64"),
]
SMALL = (64, 128, 256, 512)
# Earlier calls in flight: only the last is waited for, so that the host's time for a call does not count.
IN_FLIGHT = 8
# Products in one program, for the same reason.
CHAIN = 64
LEVELS = ("run_to_run", "batch", "topology")
# A batch of few rows and one of many, times a layer.
LEVEL_SHAPES = ((64, 4096, 14336), (4096, 4096, 14336))


def operands(shape, dtype, out):
    """a (m, k), b (k, n) or, for float8, (n, k), and a bias."""
    m, k, n = shape
    keys = jax.random.split(jax.random.key(0), 3)
    drawn = "bfloat16" if dtype.startswith("float8") else dtype
    a = jax.random.uniform(keys[0], (m, k), drawn, -1, 1).astype(dtype)
    b = jax.random.uniform(keys[1], (n, k) if dtype.startswith("float8") else (k, n), drawn, -1, 1).astype(dtype)
    return a, b, jax.random.uniform(keys[2], (n,), out, -1, 1)


def ours(case, a, b, bias):
    inputs = {"bias": bias} if case.epilog in (Epilog.BIAS, Epilog.GELU_AUX_BIAS) else None
    return jaxmp.matmul(
        a,
        b,
        transpose_b=a.dtype.itemsize == 1,
        preferred_element_type=jnp.dtype(case.out),
        precision=case.precision,
        epilog=case.epilog,
        epilog_inputs=inputs,
    )


def theirs(case, a, b, bias):
    """The same by XLA; with an aux it also returns what the gradient needs."""
    is_float8 = a.dtype.itemsize == 1
    wide = jnp.float32 if case.epilog != Epilog.NONE else jnp.dtype(case.out)
    z = jnp.matmul(a, b.T if is_float8 else b, preferred_element_type=wide, precision=case.precision)
    if case.epilog == Epilog.NONE:
        return z
    z = z + bias.astype(wide)
    if case.epilog == Epilog.BIAS:
        return z.astype(case.out)
    return jax.nn.gelu(z, approximate=True).astype(case.out), {"gelu_aux": z.astype(case.out)}


def nvmath_contenders(case, a, b, bias):
    """nvmath-python's function and stateful forms on the same memory, or nothing where it does not install."""
    epilog = case.epilog
    if case.dtype not in ("bfloat16", "float32", "float64") or case.dtype != case.out or case.precision == TF32:
        return {}
    try:
        advanced = importlib.import_module("nvmath.linalg.advanced")
        torch = importlib.import_module("torch")
    except ImportError:
        return {}
    left, right, shift = (torch.from_dlpack(x) for x in (a, b, bias))
    # nvmath's matrices are column-major where they have a bias: D^T = B^T A^T.
    names = {Epilog.NONE: None, Epilog.BIAS: "BIAS", Epilog.GELU_AUX_BIAS: "GELU_AUX_BIAS"}
    kind = None if names[epilog] is None else getattr(advanced.MatmulEpilog, names[epilog])
    options = {} if kind is None else {"epilog": kind, "epilog_inputs": {"bias": shift}}
    stateful = advanced.Matmul(right.T, left.T)
    stateful.plan(**options)
    return {
        "nvmath, function": lambda: advanced.matmul(right.T, left.T, **options),
        "nvmath, stateful": stateful.execute,
        "torch": torch,
    }


def wait_for(torch, result):
    if torch is not None:
        torch.cuda.synchronize()
    jax.block_until_ready([x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)])


def check(calls, case):
    """A fast wrong product is worth nothing. Numbers are of the size of sqrt(k): both round operands or the result, and
    sums of k terms."""
    first = {name: jnp.asarray(jax.tree.leaves(calls[name]())[0], jnp.float32) for name in ("jaxmp", "xla")}
    error = float(jnp.max(jnp.abs(first["jaxmp"] - first["xla"])))
    eps = max(float(jnp.finfo(case.out).eps), 2.0**-10 if case.precision == TF32 else 0.0)
    of_sums = float(jnp.finfo(jnp.promote_types(case.out, jnp.float32)).eps)
    bound = 8 * (eps * case.shape[1] ** 0.5 + of_sums * case.shape[1])
    assert error <= bound, f"jaxmp differs by {error} from XLA, more than {bound}"
    return error / bound


def measure_large(case, seconds):
    with jax.enable_x64(case.dtype == "float64"):
        a, b, bias = operands(case.shape, case.dtype, case.out)
        calls = {
            "jaxmp": functools.partial(jax.jit(functools.partial(ours, case)), a, b, bias),
            "xla": functools.partial(jax.jit(functools.partial(theirs, case)), a, b, bias),
        }
        error = check(calls, case)
        others = nvmath_contenders(case, a, b, bias)
        torch = others.pop("torch", None)
        several = {name: functools.partial(_several, call) for name, call in (calls | others).items()}
        times = interleaved(several, seconds, wait=functools.partial(wait_for, torch))
        times = {name: value / IN_FLIGHT for name, value in times.items()}
        implementation = _implementation(functools.partial(ours, case), a, b, bias)
    return {
        "shape": case.shape,
        "types": [case.dtype, case.out],
        "epilog": case.epilog.name,
        "precision": getattr(case.precision, "name", case.precision) or "default",
        "seconds": times,
        "implementation": implementation,
        "error_of_bound": error,
    }


def _several(call):
    for _ in range(IN_FLIGHT):
        result = call()
    return result


def _implementation(f, *args):
    with contextlib.redirect_stdout(None):
        return jaxmp.explain(f)(*args).rows[0].implementation


def measure_small(extent, seconds):
    """Returns seconds of one product in a chain of dependent products, and the host's seconds for one call."""
    case = Large((extent,) * 3, "bfloat16", "bfloat16")
    a, b, bias = operands(case.shape, case.dtype, case.out)
    b = b / jnp.bfloat16(extent**0.5)  # the chain stays finite

    def chain(product):
        def run(a, b):
            return jax.lax.fori_loop(0, CHAIN, lambda _, x: product(case, x, b, bias), a)

        return jax.jit(run)

    calls = {name: functools.partial(chain(f), a, b) for name, f in (("jaxmp", ours), ("xla", theirs))}
    others = nvmath_contenders(case, a, b, bias)
    torch = others.pop("torch", None)
    times = {name: seconds / CHAIN for name, seconds in interleaved(calls, seconds).items()}
    times |= interleaved(others, seconds, wait=functools.partial(wait_for, torch)) if others else {}
    single = {name: jax.jit(functools.partial(f, case)) for name, f in (("jaxmp", ours), ("xla", theirs))}
    return {"extent": extent, "seconds": times, "host": {name: host_time(f, a, b, bias) for name, f in single.items()}}


def host_time(f, *args, calls=200):
    """Seconds that the host spends on one call, which returns before the device has done it."""
    jax.block_until_ready(f(*args))
    samples = []
    for _ in range(5):
        started = time.perf_counter()
        last = [f(*args) for _ in range(calls)]
        samples.append((time.perf_counter() - started) / calls)
        jax.block_until_ready(last)
    return statistics.median(samples)


def measure_levels(shape, seconds):
    """Seconds of one product at each level of determinism."""
    a, b, _ = operands(shape, "bfloat16", "bfloat16")
    products = {level: jax.jit(functools.partial(jaxmp.matmul, determinism=level)) for level in LEVELS}
    times = interleaved({level: functools.partial(f, a, b) for level, f in products.items()}, seconds)
    return {"shape": shape, "seconds": times}


def card():
    """Name, driver and power limit, as the driver's own tool says."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return jax.devices()[0].device_kind


def large_table(cases, ceiling):
    rows = []
    for case in cases:
        m, k, n = case["shape"]
        rate = {name: 2e-12 * m * k * n / seconds for name, seconds in case["seconds"].items()}
        rows.append(
            [
                "x".join(map(str, case["shape"])),
                " -> ".join(dict.fromkeys(case["types"])),
                case["precision"],
                case["epilog"],
                case["implementation"],
                *(f"{rate[name]:.0f}" if name in rate else "-" for name in ("jaxmp", "xla", "nvmath, stateful")),
                f"{rate['jaxmp'] / rate['xla']:.2f}",
                f"{rate['jaxmp'] / ceiling:.2f}" if case["types"] == ["bfloat16", "bfloat16"] else "-",
            ]
        )
    columns = [
        "m x k x n",
        "types",
        "precision",
        "epilog",
        "by",
        "jaxmp",
        "XLA",
        "nvmath stateful",
        "/ XLA",
        "/ ceiling",
    ]
    return table(columns, rows)


def small_table(cases):
    rows = []
    for case in cases:
        t = {name: 1e6 * seconds for name, seconds in case["seconds"].items()}
        rows.append(
            [f"{case['extent']}^3", f"{t['jaxmp']:.1f}", f"{t['xla']:.1f}", f"{t['jaxmp'] - t['xla']:.1f}"]
            + [f"{1e6 * case['host'][name]:.1f}" for name in ("jaxmp", "xla")]
            + [f"{t[name]:.0f}" if name in t else "-" for name in ("nvmath, stateful", "nvmath, function")]
        )
    columns = ["cube, bf16", "jaxmp us", "XLA us", "more us", "jaxmp host us", "XLA host us"]
    return table([*columns, "nvmath stateful us", "nvmath function us"], rows)


def level_table(cases):
    rows = [
        ["x".join(map(str, case["shape"])), *(f"{1e6 * case['seconds'][level]:.0f}" for level in LEVELS)]
        for case in cases
    ]
    return table(["m x k x n, bf16", *(f"{level} us" for level in LEVELS)], rows)


def ceiling_of(cases):
    """The best rate of any contender on a plain bf16 product: what this card does, not what its data sheet says."""
    plain = [case for case in cases if case["types"] == ["bfloat16", "bfloat16"] and case["epilog"] == "NONE"]
    return max(2e-12 * m * k * n / min(case["seconds"].values()) for case in plain for m, k, n in [case["shape"]])


def page(record):
    about = record["machine"]
    libraries = {name: value for name, value in record["libraries"].items() if name.endswith("_version")}
    versions = ", ".join(f"{name} {value}" for name, value in (about["versions"] | libraries).items())
    ratios = [case["seconds"]["xla"] / case["seconds"]["jaxmp"] for case in record["large"]]
    return "\n\n".join(
        [
            f"{record['card']}; {about['date']}; {versions}.",
            f"Rates in TFLOP/s, of one of {IN_FLIGHT} calls in flight, medians of interleaved rounds; "
            f"against XLA {min(ratios):.2f} to {max(ratios):.2f}, "
            f"median {statistics.median(ratios):.2f}. *Ceiling*: the best plain bf16 product of any contender here, "
            f"{record['ceiling']:.0f} TFLOP/s.",
            large_table(record["large"], record["ceiling"]),
            f"Small products: one of {CHAIN} in a program, each of which needs the one before; nvmath's one call at a "
            "time, as its interface has it.",
            small_table(record["small"]),
            "Levels of determinism:",
            level_table(record["levels"]),
        ]
    )


class Results:
    """The measurements so far, in their file after each of them."""

    def __init__(self, file, is_resumed):
        self.file = file
        self.cases = json.loads(file.read_text())["cases"] if is_resumed and file.is_file() else {}

    def measure(self, kind, name, measure, *args):
        key = f"{kind} {name}"
        if key not in self.cases:
            self.cases[key] = measure(*args)
            self.write({"cases": self.cases})
            print(key, json.dumps(self.cases[key]["seconds"]), flush=True)
        return self.cases[key]

    def write(self, record):
        new = self.file.with_suffix(".new")  # whole, or the one before
        new.write_text(json.dumps(record, indent=1) + "\n")
        new.replace(self.file)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small products, to see that everything works")
    parser.add_argument("--anywhere", action="store_true", help="on any device, for the same purpose")
    parser.add_argument("--json", type=Path, default=HERE / "gpu.json", help="write the measurements here")
    parser.add_argument("--resume", action="store_true", help="keep the cases that are in that file")
    parser.add_argument("--skip", default=(), nargs="*", help="leave out large cases with one of these in their names")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/gpu.md")
    arguments = parser.parse_args()
    if arguments.write_docs and (arguments.quick or arguments.anywhere):
        parser.error("--write-docs wants a full run on a GPU")
    if not arguments.anywhere:
        if not native.cuda_devices():
            sys.exit("bench_gpu: no CUDA device; --anywhere runs it on what there is")
        if why := native.why_no_cublasmp():
            sys.exit(f"bench_gpu: {why}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    results = Results(arguments.json, arguments.resume)
    record = measure_all(results, arguments.quick, arguments.skip)
    text = page(record)
    print(text)
    results.write(record | {"cases": results.cases})
    if arguments.write_docs:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def measure_all(results, is_quick, skipped=()):
    seconds = 0.01 if is_quick else 1.0
    large = [dataclasses.replace(case, shape=(32,) * 3) for case in LARGE] if is_quick else LARGE
    large = [case for case in large if not any(text in case.name for text in skipped)]
    small, levels = ((16,), ()) if is_quick else (SMALL, LEVEL_SHAPES)
    found = {
        "large": [results.measure("large", case.name, measure_large, case, seconds) for case in large],
        "small": [results.measure("small", extent, measure_small, extent, seconds) for extent in small],
        "levels": [results.measure("levels", shape, measure_levels, shape, seconds) for shape in levels],
    }
    about = {"card": card(), "machine": machine(), "libraries": native.cublasmp_info()}
    return about | {"ceiling": ceiling_of(found["large"])} | found


if __name__ == "__main__":
    main()
