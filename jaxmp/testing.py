"""`assert_bitwise_equal`, for tests of programs that rely on bits, and the checks of `jaxmp selftest`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp._src.core.lowering import fixed_shape
from jaxmp._src.core.ops import matmul as matmul_lib
from jaxmp._src.core.spec import epilogs
from jaxmp._src.core.spec.activations import pack_relu_aux
from jaxmp._src.core.spec.epilogs import Epilog
from jaxmp._src.platform.runtime.bitwise import assert_bitwise_equal as assert_bitwise_equal

__all__ = ["assert_bitwise_equal"]

DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64", "complex128")
# Results that sum over the rows, so they depend on the number of rows.
_SUMS_OF_ROWS = ("drelu_bgrad", "dgelu_bgrad")
# "batch" fixes their rows; on a mesh XLA makes their sums for some shardings, which "topology" refuses.
DERIVATIVES = tuple(epilog for epilog, row in epilogs.RULES.items() if row.derivative or row.gradient)
EPILOGS = tuple(epilog for epilog in epilogs.RULES if epilog not in DERIVATIVES)
LEVELS = ("batch", "topology")
IMPLEMENTATIONS = ("host", "xla")
ON_GPUS = "cublasmp"
# Every count up to 70, and the counts around multiples of tiles, vectors and caches.
ROWS = (*range(1, 71), *(edge + i for edge in (80, 96, 112, 128, 160, 192, 256, 320) for i in (-1, 0, 1)))
SOME_ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 96)
# (k, n) from one to a transformer's width.
EXTENTS = ((1, 1), (3, 5), (33, 16), (64, 17), (257, 33), (1024, 3), (4097, 64), (11008, 24))
SOME_EXTENTS = ((1, 3), (33, 17), (1025, 40))


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison of many products: `run` raises if one differs, and returns how many it has compared.

    `promise`: the level of determinism. `subject`: the implementation, type, extents and epilog.
    """

    promise: str
    subject: str
    run: Callable[[], int]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shardings of a (m, k), b (k, n) and d over a mesh."""

    name: str
    mesh: tuple[tuple[str, int], ...]
    a: P
    b: P
    d: P

    def make_mesh(self) -> jax.sharding.Mesh:
        """Returns the mesh over the first devices."""
        names, sizes = zip(*self.mesh, strict=True)
        count = int(np.prod(sizes))
        return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=jax.devices()[:count])


def layouts(ndevices: int) -> Iterator[Layout]:
    """Yields a layout for each communication pattern on meshes of `ndevices` devices, an even number or 1. One device
    has no layouts on 2-D meshes."""
    line = (("x", ndevices),)
    rows, cols = P("x", None), P(None, "x")
    yield Layout("local", line, rows, P(None, None), rows)
    yield Layout("local, columns", line, P(None, None), cols, cols)
    yield Layout("all-gather", line, rows, cols, cols)
    yield Layout("all-gather of columns", line, rows, cols, rows)
    yield Layout("reduce-scatter", line, cols, rows, rows)
    yield Layout("reduce-scatter of columns", line, cols, rows, cols)
    yield Layout("all-reduce", line, cols, rows, P(None, None))
    if ndevices == 1:
        return
    square = (("x", 2), ("y", ndevices // 2))
    tiles = P("x", "y")
    yield Layout("grid", square, tiles, tiles, tiles)
    yield Layout("data x all-gather", square, P(("x", "y"), None), P(None, "y"), tiles)
    yield Layout("data x reduce-scatter", square, tiles, P("y", None), P(("x", "y"), None))
    yield Layout("data x all-reduce", square, tiles, P("y", None), P("x", None))


def draw(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns normally distributed values of `dtype`, the same for the same arguments."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(jnp.dtype(dtype))


def _serves(implementation: str, dtype: str, epilog: Epilog) -> bool:
    """True if `epilog` is tested for `dtype`: any, except activations of complex numbers and their derivatives.

    For cuBLASMp, real types of 16 and 32 bits only, as in `make test-gpu`, and no sums of an operand of float16: the
    library sums them in float16, which jaxmp refuses under a level. Products without epilog are always tested.
    """
    row = epilogs.RULES[epilog]
    if implementation == ON_GPUS:
        sums_operand = row.gradient in ("bgrada", "bgradb")
        return epilog == Epilog.NONE or dtype in ("float32", "bfloat16") or (dtype == "float16" and not sums_operand)
    return not (dtype.startswith("complex") and (row.activation or row.derivative))


def _inputs(epilog: Epilog, bias: Any) -> dict[str, Any]:
    return {"bias": bias} if "bias" in epilogs.RULES[epilog].inputs else {}


def _aux_inputs(epilog: Epilog, z: Any) -> dict[str, Any]:
    """Returns the input of an epilog that is a derivative: z, the activation's argument, or its packed signs. Returns
    nothing for other epilogs and for complex z."""
    aux = {"relu_aux": pack_relu_aux(z > 0), "gelu_aux": z} if not np.iscomplexobj(z) else {}
    return {name: x for name, x in aux.items() if name in epilogs.RULES[epilog].inputs}


def _require_values(x: np.ndarray, where: str) -> None:
    """Raises AssertionError if `x` is all zeros: zeros would be equal for any computation."""
    if x.size and not np.any(x):
        raise AssertionError(f"{where}: all {x.size} elements are zero, which proves nothing")


def check_rows(
    level: str,
    implementation: str,
    dtype: str,
    extents: tuple[int, int],
    counts: Sequence[int],
    *,
    epilog: Epilog = Epilog.NONE,
) -> int:
    """Checks that rows of D and aux have the same bits in a product of these rows alone as among max(counts) rows.

    Compares the first m rows for each m in `counts`, and some random selections of rows. `extents`: (k, n). Omits bias
    gradients that sum over rows. Returns the number of selections. Raises AssertionError for other bits, or if D is all
    zeros.
    """
    k, n = extents
    is_transposed = epilog == Epilog.BGRADA  # it sums an a that is stored (k, m)
    product = functools.partial(
        matmul_lib.matmul, epilog=epilog, determinism=level, implementation=implementation, transpose_a=is_transposed
    )
    largest = max(counts)
    a, b = draw(0, (largest, k), dtype), draw(1, (k, n), dtype)
    c, inputs = draw(2, (largest, n), dtype), _inputs(epilog, draw(3, (n,), dtype))
    with_rows = {"c": c} | jax.tree.map(np.asarray, _aux_inputs(epilog, draw(5, (largest, n), dtype)))
    rng = np.random.default_rng(4)
    places = [np.arange(m) for m in counts] + [rng.permutation(largest)[:m] for m in (*counts[::8], largest)]

    def outputs(a: Any, with_rows: dict[str, Any]) -> dict[str, Any]:
        rest = {name: x for name, x in with_rows.items() if name != "c"}
        out = product(
            a.T if is_transposed else a, b, with_rows["c"], alpha=1.25, beta=-0.75, epilog_inputs=inputs | rest
        )
        return {"d": out[0], **out[1]} if isinstance(out, tuple) else {"d": out}

    program = jax.jit(lambda parts: [outputs(*part) for part in parts])
    parts = [(a[place], {name: x[place] for name, x in with_rows.items()}) for place in places]
    *parts, whole = jax.tree.map(np.asarray, program([*parts, (a, with_rows)]))
    _require_values(whole["d"], f"d of m={largest} k={k} n={n} {epilog.name}")
    for place, part in zip(places, parts, strict=True):
        for name in [name for name in part if name not in _SUMS_OF_ROWS]:
            where = f"{name} of m={len(place)} k={k} n={n} {epilog.name}, compared with the same rows among {largest}"
            assert_bitwise_equal(part[name], whole[name] if name == "bgradb" else whole[name][place], where)
    return len(places)


def check_columns(level: str, implementation: str, dtype: str, extents: tuple[int, int], counts: Sequence[int]) -> int:
    """Does for columns of D and B what `check_rows` does for rows of D and A; `extents`: (k, m)."""
    k, m = extents
    largest = max(counts)
    a, b = draw(0, (m, k), dtype), draw(1, (k, largest), dtype)
    product = functools.partial(matmul_lib.matmul, a, determinism=level, implementation=implementation)
    rng = np.random.default_rng(4)
    places = [np.arange(n) for n in counts] + [rng.permutation(largest)[:n] for n in (*counts[::8], largest)]
    parts = jax.jit(lambda parts: [product(part) for part in parts])([b[:, place] for place in places])
    whole = np.asarray(jax.jit(product)(b))
    _require_values(whole, f"d of m={m} k={k} n={largest}")
    for place, part in zip(places, parts, strict=True):
        where = f"d of m={m} k={k} n={len(place)}, compared with the same columns among {largest}"
        assert_bitwise_equal(part, whole[:, place], where)
    return len(places)


def check_meshes(
    level: str,
    implementation: str,
    dtype: str,
    extents: tuple[int, int, int],
    counts: Sequence[int],
    *,
    epilog: Epilog = Epilog.NONE,
    transpose: str = "NN",
    only: Collection[str] = (),
) -> int:
    """Checks that a product and its gradients on meshes of `counts` devices have the bits of one device.

    `extents` are (m, n, k), `only` names of layouts, all by default. `transpose`: "T" or "N" for a and for b. Compares
    d, gelu_aux and the gradients in a, b, c and bias. Omits "grid" for a complex transposed a, which jaxmp refuses.
    Returns the number of layouts compared. Raises AssertionError for other bits, or if a result is all zeros.
    """
    m, n, k = extents
    is_transposed = [letter == "T" for letter in transpose]
    shapes = (k, m) if is_transposed[0] else (m, k), (n, k) if is_transposed[1] else (k, n), (m, n), (m, n), (n,)
    operands = [draw(i, shape, dtype) for i, shape in enumerate(shapes)]
    product_of = functools.partial(
        matmul_lib.matmul, determinism=level, implementation=implementation, epilog=epilog, alpha=1.25, beta=-0.75
    )
    product_of = functools.partial(product_of, transpose_a=is_transposed[0], transpose_b=is_transposed[1])

    def program(shardings: dict[str, Any], operands: Sequence[jax.Array]) -> dict[str, Any]:
        a, b, c, w, bias = operands

        def product(a: jax.Array, b: jax.Array, c: jax.Array, bias: jax.Array) -> Any:
            out = product_of(a, b, c, epilog_inputs=_inputs(epilog, bias), **shardings)
            return out if isinstance(out, tuple) else (out, {})

        d, pullback, aux = jax.vjp(product, a, b, c, bias, has_aux=True)
        # The packed mask is padded for each shard, so it has another shape on another mesh; d covers its values.
        return {"d": d, "gelu_aux": aux.get("gelu_aux"), "gradients in a, b, c, bias": pullback(w)}

    want = jax.tree.map(np.asarray, jax.jit(functools.partial(program, {}))(operands))
    for x in (want["d"], *want["gradients in a, b, c, bias"][:3]):
        _require_values(x, f"a result of one device, {transpose} m={m} k={k} n={n} {epilog.name}")
    compared = 0
    for layout in itertools.chain(*map(layouts, counts)):
        if only and layout.name not in only:
            continue
        if layout.name == "grid" and is_transposed[0] and dtype.startswith("complex"):
            continue  # refused by name
        mesh = layout.make_mesh()
        stored = [
            P(*spec[::-1]) if t and layout.name != "grid" else spec
            for spec, t in zip((layout.a, layout.b), is_transposed, strict=True)
        ]
        specs = (*stored, layout.d, layout.d, P(layout.d[1]))
        placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(operands, specs, strict=True)]
        shardings = {"in_shardings": tuple(stored), "out_sharding": layout.d, "mesh": mesh}
        got = jax.jit(functools.partial(program, shardings))(placed)
        for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True):
            name = jax.tree_util.keystr(path, simple=True, separator=" ")
            where = f"{layout.name} on {dict(layout.mesh)}, {transpose} m={m} k={k} n={n} {epilog.name}"
            assert_bitwise_equal(x, y, f"{name} of {where}")
        compared += 1
    return compared


def checks(is_quick: bool, implementations: tuple[str, ...] = IMPLEMENTATIONS) -> Iterator[Check]:
    """Yields checks, not run yet, of all that "batch" and "topology" promise, with each type and each of
    `implementations`. The checks of "topology" use meshes of 1, 2, 4 and 8 devices, as far as there are so many.
    `is_quick`: fewer shapes and epilogs, and the largest mesh only."""
    devices = [count for count in (1, 2, 4, 8) if count <= jax.device_count()]
    devices = devices[-1:] if is_quick else devices
    for dtype, implementation in itertools.product(DTYPES, implementations):
        yield from _checks_of_batch(implementation, dtype, is_quick)
        yield from _checks_of_topology(implementation, dtype, is_quick, devices)


def _checks_of_batch(implementation: str, dtype: str, is_quick: bool) -> Iterator[Check]:
    """Yields the checks of rows, without and with each epilog that `_serves`, and of columns without an epilog.
    `is_quick`: fewer rows and extents, and every fourth epilog."""
    step, head = 4 if is_quick else 1, f"{implementation} {dtype}"
    serves = functools.partial(_serves, implementation, dtype)
    rows = _place_counts(implementation, SOME_ROWS if is_quick else ROWS, fixed_shape.ROWS)
    cols = _place_counts(implementation, SOME_ROWS, fixed_shape.COLUMNS)
    plain = [(k, n, Epilog.NONE) for k, n in (SOME_EXTENTS if is_quick else EXTENTS)]
    with_epilog = [(65, 33, epilog) for epilog in EPILOGS if serves(epilog)]
    derived = [(65, 33, epilog) for epilog in DERIVATIVES if serves(epilog)]
    for k, n, epilog in plain + with_epilog[::step] + derived[::step]:
        run = functools.partial(check_rows, "batch", implementation, dtype, (k, n), rows, epilog=epilog)
        yield Check("batch", f"{head} k={k} n={n} {epilog.name}", run)
    for k in (65,) if is_quick else (1, 65, 1025):
        run = functools.partial(check_columns, "batch", implementation, dtype, (k, 33), cols)
        yield Check("batch", f"{head} k={k} columns", run)


def _place_counts(implementation: str, counts: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Returns counts of rows or columns; for cuBLASMp also the counts around multiples of its tile `size`."""
    edges = tuple(size * tile + i for tile in (1, 2) for i in (-1, 0, 1))
    return (*counts, *edges) if implementation == ON_GPUS else counts


def _checks_of_topology(implementation: str, dtype: str, is_quick: bool, devices: list[int]) -> Iterator[Check]:
    """Yields the checks without an epilog on meshes of all counts `devices`, and of the epilogs that `_serves`, without
    derivatives, on the last count. `is_quick`: one product without an epilog, and every sixth epilog."""
    head = f"{implementation} {dtype}"
    check = functools.partial(check_meshes, "topology", implementation, dtype)
    # For cuBLASMp several tiles, so that ranks of a mesh place their rows and columns differently in the tiles.
    m, n = (3 * fixed_shape.ROWS, 2 * fixed_shape.COLUMNS + 128) if implementation == ON_GPUS else (24, 40)
    for k, transpose in ((40, "TN"),) if is_quick else ((8, "NN"), (40, "TN"), (1000, "NT"), (4104, "TT")):
        run = functools.partial(check, (m, n, k), devices, transpose=transpose)
        yield Check("topology", f"{head} k={k} {transpose} NONE", run)
    for epilog in [epilog for epilog in EPILOGS if _serves(implementation, dtype, epilog)][1 :: 6 if is_quick else 1]:
        run = functools.partial(check, (m, n, 40), devices[-1:], epilog=epilog)
        yield Check("topology", f"{head} k=40 {epilog.name}", run)
