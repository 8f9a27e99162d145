"""Check placement and rounding of products, and all that the levels of determinism promise, on this machine."""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jaxmp import testing
from jaxmp._src.core.ops.matmul import matmul
from jaxmp._src.core.spec import epilogs
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.core.spec.matmul_spec import accumulator
from jaxmp._src.core.spec.options import CommOptions
from jaxmp._src.tools.cli import output
from jaxmp.testing import Check, Layout

# Roundings of a product, as multiples of u |A| |B|: tests/bounds.py says why.
_ROUNDINGS = 4.0
_TYPES = ("float32", "float64", "bfloat16", "float16", "complex64")
_SUMS = ("drelu_bgrad", "dgelu_bgrad")
# How many devices share a product, unless the command line says it: as many of these as there are.
_DEVICES = (1, 2, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer shapes: a minute or two")
    parser.add_argument("--devices", type=int, help="how many devices share a product (8, or as many as there are)")
    parser.add_argument(
        "--implementation",
        choices=(*testing.IMPLEMENTATIONS, testing.ON_GPUS),
        help="who computes; by default the rule, and on CPUs both for the promises about bits",
    )


def run(options: argparse.Namespace) -> output.Result:
    """Runs the checks. A check that raises has failed, and the next one runs. The status is 1 if one fails. Raises
    CommandError for too few devices, or "cublasmp" without a GPU."""
    output.make_cpu_devices(options.devices or _DEVICES[-1])
    platform = jax.default_backend()
    if options.implementation == testing.ON_GPUS and platform != "gpu":
        raise output.CommandError(f"--implementation cublasmp needs a CUDA device, JAX's backend is {platform}")
    count = options.devices or max(count for count in _DEVICES if count <= jax.device_count())
    output.require_devices(count)
    results = []
    started = time.perf_counter()
    with jax.enable_x64(True):
        for check in output.counted("selftest", list(checks(count, options.implementation, options.quick))):
            error = ""
            try:
                check.run()
            except Exception as raised:  # a check that cannot run is a result as well
                error = f"{type(raised).__name__}: {raised}"
            results.append({"check": check.promise, "of": check.subject, "error": error})
    seconds, failed = time.perf_counter() - started, [result for result in results if result["error"]]
    ran, wrong = (collections.Counter(result["check"] for result in some) for some in (results, failed))
    lines = output.table([("check", "run", "failed"), *((kind, ran[kind], wrong[kind]) for kind in ran)])
    lines += [f"FAILED {result['check']} of {result['of']}: {result['error']}" for result in failed]
    lines += [] if failed else [f"jaxmp works on this machine ({seconds:.0f} s)."]
    value = {"passed": not failed, "seconds": seconds, "checks": results}
    return output.Result("\n".join(lines), value, int(bool(failed)))


def checks(ndevices: int, implementation: str | None, is_quick: bool) -> Iterator[Check]:
    """Yields checks of placement and rounding for every pattern and type; then, on CPUs or if `implementation` is
    "cublasmp", of the promises about bits. None is the rule's choice, and for bits both "host" and "xla". `is_quick`:
    fewer checks of bits. `ndevices`: 1 or an even number."""
    for layout, dtype in itertools.product(testing.layouts(ndevices), _TYPES):
        for name, run in (("placement", check_placement), ("rounding", check_rounding)):
            yield Check(name, f"{layout.name}, {dtype}", functools.partial(run, layout, dtype, implementation))
    if jax.default_backend() == "cpu" or implementation == testing.ON_GPUS:
        yield from testing.checks(is_quick, (implementation,) if implementation else testing.IMPLEMENTATIONS)


def check_placement(
    layout: Layout,
    dtype: str,
    implementation: str | None,
    extents: tuple[int, int, int] = (16, 40, 24),
    *,
    epilog: Epilog = Epilog.NONE,
    comm: CommOptions | None = None,
    has_gradients: bool = False,
) -> int:
    """Checks the results of a product of small integers, which have exact sums: every element must be in its place.
    With an epilog each z is a multiple of 16, where gelu has the values of relu. Each process checks its devices.
    Returns 1, the number of products; raises AssertionError if an element is wrong. `has_gradients`: also checks
    gradients, and ignores `epilog`; without effect for types of one byte."""
    m, k, n = extents
    a, b, ct, bias = (_integers(seed, shape, dtype) for seed, shape in enumerate(((m, k), (k, n), (m, n), (n,))))
    row, mesh, is_narrow = epilogs.RULES[epilog], layout.make_mesh(), a.dtype.itemsize == 1
    a, bias = (a * 16, bias * 16) if epilog else (a, bias)
    flags = {"transpose_a": epilog == Epilog.BGRADA, "transpose_b": is_narrow}
    is_turned = [flag and layout.name != "grid" for flag in flags.values()]
    specs = [P(*spec[::-1]) if t else spec for spec, t in zip((layout.a, layout.b), is_turned, strict=True)]
    call = functools.partial(
        matmul, implementation=implementation, comm=comm, in_shardings=tuple(specs), out_sharding=layout.d, mesh=mesh
    )
    call = functools.partial(call, preferred_element_type=jnp.bfloat16 if is_narrow else dtype, **flags)

    def program(a: jax.Array, b: jax.Array, ct: jax.Array, bias: jax.Array) -> dict[str, jax.Array]:
        if has_gradients and not is_narrow:
            d, pullback = jax.vjp(call, a, b)
            return {"d": d} | dict(zip(("gradient in a", "gradient in b"), pullback(ct), strict=True))
        inputs = {"bias": bias} if row.has_bias else {}
        if row.derivative:
            _, inputs = call(a, b, epilog=Epilog[f"{row.derivative.upper()}_AUX"])
        out = call(a, b, epilog=epilog, epilog_inputs=inputs)
        return {"d": out[0], **out[1]} if isinstance(out, tuple) else {"d": out}

    stored = [x.T if t else x for x, t in zip((a, b), flags.values(), strict=True)]
    shardings = (*specs, layout.d, P(layout.d[1]))
    got = jax.jit(program)(*(place(x, mesh, spec) for x, spec in zip((*stored, ct, bias), shardings, strict=True)))
    a, b, ct, bias = map(_wide, (a, b, ct, bias))
    z = a @ b + (bias if row.has_bias else 0)
    d = np.maximum(z, 0) if row.activation or row.derivative else z
    want = {"d": d, "gelu_aux": z, "bgrada": a.sum(1), "bgradb": b.sum(0)} | dict.fromkeys(_SUMS, d.sum(0))
    want |= {"gradient in a": ct @ b.T, "gradient in b": a.T @ ct}
    for name in got.keys() & want.keys():
        require_equal(got[name], want[name], name)
    return 1


def require_equal(got: jax.Array, want: np.ndarray, name: str) -> None:
    """Raises AssertionError for another shape, or if a device of this process has another value somewhere."""
    if got.shape != want.shape:
        raise AssertionError(f"{name} has the shape {got.shape}, not {want.shape}")
    for shard in got.addressable_shards:  # a BLAS's sum of zeros may be -0, so no bits
        if wrong := np.count_nonzero(_wide(shard.data) != want[shard.index]):
            raise AssertionError(
                f"{wrong} of {want[shard.index].size} elements of {name} are wrong, or in a wrong place"
            )


def place(x: np.ndarray, mesh: jax.sharding.Mesh, spec: P) -> jax.Array:
    """Puts an array that every process has on the devices of a mesh, without communication."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def _integers(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.integers(-1, 2, shape).astype(jnp.dtype(dtype))
    return x + 1j * rng.integers(-1, 2, shape).astype(x.dtype) if np.iscomplexobj(x) else x


def check_rounding(layout: Layout, dtype: str, implementation: str | None) -> int:
    """Checks a product of normal values: each element within |D - D*| <= c (u_sum |A||B| + u |D*|) of D*, computed in
    float64. Returns 1; raises AssertionError if one is farther away."""
    a, b = testing.draw(0, (48, 264), dtype), testing.draw(1, (264, 56), dtype)
    got, want = _wide(product_of(layout, implementation=implementation)(a, b)), _wide(a) @ _wide(b)
    u_sum, u = (float(jnp.finfo(x).eps) / 2 for x in (accumulator(dtype), dtype))
    allowed = _ROUNDINGS * (u_sum * (np.abs(_wide(a)) @ np.abs(_wide(b))) + u * np.abs(want))
    if not np.all(np.abs(got - want) <= allowed):
        worst = np.nanmax(np.abs(got - want) / allowed)
        raise AssertionError(f"an error is {worst:.3g} times as large as the bound of rounding allows")
    return 1


def _wide(x: ArrayLike) -> np.ndarray:
    return np.asarray(x).astype(np.complex128)


def product_of(layout: Layout, *, transpose_b: bool = False, **options: Any) -> Callable[..., jax.Array]:
    """Returns a function of two arrays of NumPy that multiplies them in this layout: a (m, k) and b (k, n), or with
    `transpose_b` b (n, k)."""
    mesh, specs = layout.make_mesh(), (layout.a, P(*layout.b[::-1]) if transpose_b else layout.b)
    options |= {"in_shardings": specs, "out_sharding": layout.d, "mesh": mesh, "transpose_b": transpose_b}
    product = jax.jit(functools.partial(matmul, **options))
    return lambda a, b: product(*(place(x, mesh, spec) for x, spec in zip((a, b), specs, strict=True)))
