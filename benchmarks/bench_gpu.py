"""Products on one GPU: jaxmp over cuBLASMp, XLA, and nvmath-python where it installs (`make bench-gpu`).

All contenders take their turns in one run. A large product is timed call by call; a small one as one of many in a
program, since what it costs beside XLA's own is a few microseconds. With --write-docs the tables go into docs/gpu.md.
"""

import argparse
import contextlib
import functools
import importlib
import json
import statistics
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from common import interleaved, machine, table

import jaxmp
from jaxmp import Epilog
from jaxmp._src.runtime import native

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "gpu.md"
BEGIN, END = "<!-- measurements -->", "<!-- end of measurements -->"

# m, k, n; types of the operands and of the result; epilog.
LARGE = [
    ((8192, 8192, 8192), "bfloat16", "bfloat16", Epilog.NONE),
    ((8192, 8192, 8192), "bfloat16", "bfloat16", Epilog.BIAS),
    ((8192, 8192, 8192), "bfloat16", "bfloat16", Epilog.GELU_AUX_BIAS),
    ((4096, 4096, 14336), "bfloat16", "bfloat16", Epilog.BIAS),
    ((4096, 4096, 14336), "bfloat16", "bfloat16", Epilog.GELU_AUX_BIAS),
    ((8192, 8192, 8192), "float8_e4m3fn", "bfloat16", Epilog.NONE),
    ((8192, 8192, 8192), "float32", "float32", Epilog.NONE),
    ((4096, 4096, 4096), "float64", "float64", Epilog.NONE),
]
SMALL = (64, 128, 256, 512)
# Products of one program, so that its launch does not count.
CHAIN = 64
QUICK_LARGE = [((256, 256, 256), dtype, out, epilog) for _, dtype, out, epilog in LARGE]


def operands(shape, dtype, out):
    """a (m, k), b (k, n) or, for float8, (n, k), and a bias."""
    m, k, n = shape
    keys = jax.random.split(jax.random.key(0), 3)
    drawn = "bfloat16" if dtype.startswith("float8") else dtype
    a = jax.random.uniform(keys[0], (m, k), drawn, -1, 1).astype(dtype)
    b = jax.random.uniform(keys[1], (n, k) if dtype.startswith("float8") else (k, n), drawn, -1, 1).astype(dtype)
    return a, b, jax.random.uniform(keys[2], (n,), out, -1, 1)


def ours(out, epilog, a, b, bias):
    is_float8 = a.dtype.itemsize == 1
    inputs = {"bias": bias} if epilog in (Epilog.BIAS, Epilog.GELU_AUX_BIAS) else None
    return jaxmp.matmul(
        a, b, transpose_b=is_float8, preferred_element_type=jnp.dtype(out), epilog=epilog, epilog_inputs=inputs
    )


def theirs(out, epilog, a, b, bias):
    """The same by XLA; with an aux it also returns what the gradient needs."""
    is_float8 = a.dtype.itemsize == 1
    wide = jnp.float32 if epilog != Epilog.NONE else jnp.dtype(out)
    z = jnp.matmul(a, b.T if is_float8 else b, preferred_element_type=wide)
    if epilog == Epilog.NONE:
        return z
    z = z + bias.astype(wide)
    if epilog == Epilog.BIAS:
        return z.astype(out)
    return jax.nn.gelu(z, approximate=True).astype(out), {"gelu_aux": z.astype(out)}


def nvmath_contenders(shape, dtype, out, epilog, a, b, bias):
    """nvmath-python's function and stateful forms on the same memory, or nothing where it does not install."""
    del shape
    if dtype not in ("bfloat16", "float32", "float64") or dtype != out:
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


def check(calls, k, out):
    """A fast wrong product is worth nothing."""
    first = {name: jnp.asarray(jax.tree.leaves(calls[name]())[0], jnp.float32) for name in ("jaxmp", "xla")}
    error = float(jnp.max(jnp.abs(first["jaxmp"] - first["xla"])))
    bound = 8 * float(jnp.finfo(out).eps) * max(k**0.5, 1.0)
    assert error <= bound, f"jaxmp differs by {error} from XLA, more than {bound}"


def measure_large(case, seconds):
    shape, dtype, out, epilog = case
    with jax.enable_x64(dtype == "float64"):
        a, b, bias = operands(shape, dtype, out)
        calls = {
            "jaxmp": functools.partial(jax.jit(functools.partial(ours, out, epilog)), a, b, bias),
            "xla": functools.partial(jax.jit(functools.partial(theirs, out, epilog)), a, b, bias),
        }
        check(calls, shape[1], out)
        others = nvmath_contenders(shape, dtype, out, epilog, a, b, bias)
        torch = others.pop("torch", None)
        times = interleaved(calls | others, seconds, wait=functools.partial(wait_for, torch))
        implementation = _implementation(functools.partial(ours, out, epilog), a, b, bias)
    return {
        "shape": shape,
        "types": [dtype, out],
        "epilog": epilog.name,
        "seconds": times,
        "implementation": implementation,
    }


def _implementation(f, *args):
    with contextlib.redirect_stdout(None):
        return jaxmp.explain(f)(*args).rows[0].implementation


def measure_small(extent, seconds):
    """Seconds of one product in a chain of them, each of which needs the one before."""
    a, b, bias = operands((extent,) * 3, "bfloat16", "bfloat16")
    b = b / jnp.bfloat16(extent**0.5)  # the chain stays finite

    def chain(product):
        def run(a, b):
            return jax.lax.fori_loop(0, CHAIN, lambda _, x: product(x, b, bias), a)

        return jax.jit(run)

    contenders = {
        "jaxmp": chain(functools.partial(ours, "bfloat16", Epilog.NONE)),
        "xla": chain(functools.partial(theirs, "bfloat16", Epilog.NONE)),
    }
    calls = {name: functools.partial(program, a, b) for name, program in contenders.items()}
    others = nvmath_contenders((extent,) * 3, "bfloat16", "bfloat16", Epilog.NONE, a, b, bias)
    torch = others.pop("torch", None)
    times = {name: seconds / CHAIN for name, seconds in interleaved(calls, seconds).items()}
    times |= interleaved(others, seconds, wait=functools.partial(wait_for, torch)) if others else {}
    return {"extent": extent, "seconds": times}


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
                case["epilog"],
                case["implementation"],
                *(f"{rate[name]:.0f}" if name in rate else "-" for name in ("jaxmp", "xla", "nvmath, stateful")),
                f"{rate['jaxmp'] / rate['xla']:.2f}",
                f"{rate['jaxmp'] / ceiling:.2f}" if case["types"] == ["bfloat16", "bfloat16"] else "-",
            ]
        )
    columns = ["m x k x n", "types", "epilog", "by", "jaxmp", "XLA", "nvmath stateful", "/ XLA", "/ ceiling"]
    return table(columns, rows)


def small_table(cases):
    rows = []
    for case in cases:
        t = {name: 1e6 * seconds for name, seconds in case["seconds"].items()}
        rows.append(
            [f"{case['extent']}^3", f"{t['jaxmp']:.1f}", f"{t['xla']:.1f}", f"{t['jaxmp'] - t['xla']:.1f}"]
            + [f"{t[name]:.0f}" if name in t else "-" for name in ("nvmath, stateful", "nvmath, function")]
        )
    return table(["cube, bf16", "jaxmp us", "XLA us", "more us", "nvmath stateful us", "nvmath function us"], rows)


def ceiling_of(cases):
    """The best rate of any contender on a plain bf16 product: what this card does, not what its data sheet says."""
    plain = [case for case in cases if case["types"] == ["bfloat16", "bfloat16"] and case["epilog"] == "NONE"]
    return max(2e-12 * m * k * n / min(case["seconds"].values()) for case in plain for m, k, n in [case["shape"]])


def page(record):
    about = record["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in (about["versions"] | record["libraries"]).items())
    ratios = [case["seconds"]["xla"] / case["seconds"]["jaxmp"] for case in record["large"]]
    return "\n\n".join(
        [
            f"{record['card']}; {about['date']}; {versions}.",
            f"Rates in TFLOP/s, medians of interleaved rounds; against XLA {min(ratios):.2f} to {max(ratios):.2f}, "
            f"median {statistics.median(ratios):.2f}. *Ceiling*: the best plain bf16 product of any contender here, "
            f"{record['ceiling']:.0f} TFLOP/s.",
            large_table(record["large"], record["ceiling"]),
            f"Small products: one of {CHAIN} in a program, each of which needs the one before; nvmath's one call at a "
            "time, as its interface has it.",
            small_table(record["small"]),
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small products, to see that everything works")
    parser.add_argument("--anywhere", action="store_true", help="on whatever device there is, likewise")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "gpu.json", help="write the measurements here")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/gpu.md")
    arguments = parser.parse_args()
    if arguments.write_docs and (arguments.quick or arguments.anywhere):
        parser.error("--write-docs wants a full run on a GPU")
    if not arguments.anywhere:
        if not native.cuda_devices():
            sys.exit("bench_gpu: no CUDA device; --anywhere runs it on what there is")
        if why := native.why_no_cublasmp():
            sys.exit(f"bench_gpu: {why}")
    seconds = 0.05 if arguments.quick else 1.0
    large = [measure_large(case, seconds) for case in (QUICK_LARGE if arguments.quick else LARGE)]
    small = [measure_small(extent, seconds) for extent in SMALL]
    record = {
        "card": card(),
        "machine": machine(),
        "libraries": native.cublasmp_info(),
        "ceiling": ceiling_of(large),
        "large": large,
        "small": small,
    }
    text = page(record)
    print(text)
    arguments.json.parent.mkdir(exist_ok=True)
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.write_docs:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
