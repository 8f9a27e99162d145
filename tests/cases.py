"""The table of cases that all suites use as parameters. A case is a product on a mesh. `CASES` has one per layout
(pattern, groups, axes); a suite sets the other columns with `Case.replace`: extents, transposition, dtype, epilog, c.
Extents are per shard, so that odd, single and empty extents stay so on every mesh; the global extents follow from the
shardings."""

from __future__ import annotations

import dataclasses
import functools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import require_devices
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp import Epilog
from jaxmp._src.platform.runtime import native


@dataclasses.dataclass(frozen=True)
class Case:
    """One product. `a`, `b` and `out` are the shardings of op(a) (m, k), op(b) (k, n) and d (m, n). A grid shards all
    stored matrices in the same way, so there `a` and `b` are the shardings of the stored operands. `pattern` is the
    name in `explain`; `gathers` names the operand that is gathered before a local product."""

    name: str
    pattern: str
    mesh: tuple[tuple[str, int], ...]
    a: P
    b: P
    out: P
    group: tuple[str, ...] = ()
    computes_transposed: bool = False
    gathers: str = ""
    per_shard: tuple[int, int, int] = (1, 1, 1)
    transposition: str = "NN"
    conjugation: tuple[bool, bool] = (False, False)
    dtype: str = "float32"
    epilog: Epilog = Epilog.NONE
    has_c: bool = False

    @property
    def id(self) -> str:
        parts = [self.name, self.transposition, self.dtype, "x".join(map(str, self.per_shard))]
        parts += [self.epilog.name] * (self.epilog != Epilog.NONE) + ["c"] * self.has_c
        return "-".join(parts)

    def replace(self, **changes) -> Case:
        return dataclasses.replace(self, **changes)

    @property
    def ndevices(self) -> int:
        return math.prod(size for _, size in self.mesh)

    @property
    def nranks(self) -> int:
        sizes = dict(self.mesh)
        return math.prod(sizes[axis] for axis in self.group)

    @property
    def transpose(self) -> dict[str, bool]:
        return {"transpose_a": self.transposition[0] == "T", "transpose_b": self.transposition[1] == "T"}

    @property
    def conjugate(self) -> dict[str, bool]:
        return {"conjugate_a": self.conjugation[0], "conjugate_b": self.conjugation[1]}

    @property
    def stored(self) -> tuple[P, P]:
        """Returns the shardings of a and b as stored."""
        if self.pattern == "grid":
            return self.a, self.b
        specs = (self.a, self.b)
        return tuple(P(*reversed(s)) if t == "T" else s for s, t in zip(specs, self.transposition, strict=True))

    @property
    def extents(self) -> tuple[int, int, int]:
        """Returns the global (m, n, k): extents per shard times the number of shards of each dimension."""
        of_a, of_b = self.transposition
        names = {"a": "mk" if of_a == "N" else "km", "b": "kn" if of_b == "N" else "nk"}
        parts = {"m": 1, "n": 1, "k": 1}
        for letters, spec in ((names["a"], self.stored[0]), (names["b"], self.stored[1]), ("mn", self.out)):
            for letter, entry in zip(letters, spec, strict=True):
                parts[letter] = math.lcm(parts[letter], self._shards(entry))
        m, n, k = (unit * parts[letter] for unit, letter in zip(self.per_shard, "mnk", strict=True))
        return m, n, k

    def _shards(self, entry) -> int:
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        return math.prod(dict(self.mesh)[axis] for axis in axes)

    @property
    def column_shards(self) -> int:
        """Returns the number of column shards of d; a packed relu mask is padded in each shard."""
        return self._shards(self.out[1])

    def spec_of(self, name: str) -> P:
        """Returns the sharding of a bias, an aux or another operand or result, by name."""
        rows, cols = self.out
        if name == ("bgradb" if self.computes_transposed else "bgrada"):
            # Sums of rows of the call's first operand are complete in its group.
            dim = cols if self.computes_transposed else rows
            axes = (dim,) if isinstance(dim, str) else dim or ()
            return P(tuple(axis for axis in axes if axis not in self.group) or None)
        if name == "bgrada":
            return P(rows)
        return P(cols) if name == "bias" or "bgrad" in name else self.out

    def jax_mesh(self, axis_type=AxisType.Explicit):
        """Returns the mesh over the first devices; skips the test if there are too few."""
        require_devices(self.ndevices)
        return _mesh(self.mesh, axis_type)

    def integers(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns stored operands of small non-zero integers: every partial sum is exact in every type's accumulator.
        Without zeros no product is -0, so equal sums have equal bits."""
        return tuple(self._store(small_integers(rng, shape, self.dtype), t) for shape, t in self._op_shapes())

    def values(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns stored operands from the normal distribution, rounded to the case's dtype."""
        return tuple(self._store(normal(rng, shape, self.dtype), t) for shape, t in self._op_shapes())

    def _op_shapes(self):
        m, n, k = self.extents
        return zip(((m, k), (k, n)), self.transposition, strict=True)

    @staticmethod
    def _store(x, transposition: str) -> np.ndarray:
        return np.ascontiguousarray(x.T) if transposition == "T" else x

    def op(self, a, b):
        """Returns (op(a), op(b)) of stored operands, in numpy."""
        pairs = zip((a, b), self.transposition, self.conjugation, strict=True)
        return tuple(np.conj(x.T if t == "T" else x) if conj else (x.T if t == "T" else x) for x, t, conj in pairs)


@functools.cache
def _mesh(sizes, axis_type):
    count = math.prod(size for _, size in sizes)
    shape, names = tuple(size for _, size in sizes), tuple(name for name, _ in sizes)
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names), devices=jax.devices()[:count])


def put(x, mesh, spec):
    """Puts `x` on the devices of `mesh`."""
    return jax.device_put(x, NamedSharding(mesh, spec))


def typed(mesh, shape, *spec, dtype="float32"):
    """Returns the type of an array with this sharding on `mesh`."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def normal(rng: np.random.Generator, shape, dtype) -> np.ndarray:
    x = rng.standard_normal(shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(jnp.dtype(dtype))


def integers(rng: np.random.Generator, *shape) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(np.float32)


def small_integers(rng: np.random.Generator, shape, dtype) -> np.ndarray:
    def draw():
        return rng.integers(1, 4, shape) * rng.choice([-1, 1], shape)

    x = draw() + 1j * draw() if jnp.issubdtype(dtype, jnp.complexfloating) else draw()
    return x.astype(jnp.dtype(dtype))


def assert_alike(want, got, **tolerances) -> None:
    """Asserts that the arrays of two trees have the same types and values; with `tolerances`, as close as these say."""
    check = functools.partial(np.testing.assert_allclose, **tolerances) if tolerances else np.testing.assert_array_equal
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert jax.typeof(w) == jax.typeof(g)
        check(w, g)


def with_gradient(f):
    """Returns a function of `f`'s result and the cotangents of all its arguments, for ones of the result's sharding."""

    def run(*args):
        y, pull = jax.vjp(f, *args)
        return y, pull(y * 0 + 1)

    return run


def wide(x) -> np.ndarray:
    """Returns `x` in float64 or complex128, without loss."""
    return np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64)


_XY = (("x", 2), ("y", 2))
_ROW, _COL, _NONE = P("y", None), P(None, "y"), P(None, None)

CASES = (
    # No communication: every operand is where it is needed.
    Case("local", "local", _XY, P("x", None), P(None, "y"), P("x", "y")),
    Case("local-sliced", "local", _XY, _NONE, _NONE, P("x", "y")),
    Case("local-two-axes", "local", _XY, P(("y", "x"), None), _NONE, P(("y", "x"), None)),
    # Rows of a are gathered; columns of b stay.
    Case("ag", "all_gather", (("y", 4),), _ROW, _COL, _COL, ("y",)),
    Case("ag-one-rank", "all_gather", (("y", 1),), _ROW, _COL, _COL, ("y",)),
    Case("ag-data", "all_gather", _XY, P(("x", "y"), None), _COL, P("x", "y"), ("y",)),
    Case("ag-two-axes", "all_gather", _XY, P(("x", "y"), None), P(None, ("x", "y")), P(None, ("x", "y")), ("x", "y")),
    Case("ag-axes-reversed", "all_gather", _XY, P(("y", "x"), None), P(None, ("y", "x")), P(None, ("y", "x")),
        ("y", "x")),
    Case("ag-transposed", "all_gather", _XY, _ROW, _COL, _ROW, ("y",), computes_transposed=True),
    # The contraction is sharded, and the sum is scattered over the rows.
    Case("rs", "reduce_scatter", (("y", 4),), _COL, _ROW, _ROW, ("y",)),
    Case("rs-data", "reduce_scatter", _XY, P("x", "y"), _ROW, P(("x", "y"), None), ("y",)),
    Case("rs-two-axes", "reduce_scatter", _XY, P(None, ("x", "y")), P(("x", "y"), None), P(("x", "y"), None),
        ("x", "y")),
    Case("rs-transposed", "reduce_scatter", _XY, P("x", "y"), _ROW, P("x", "y"), ("y",), computes_transposed=True),
    # Every device gets the whole sum.
    Case("ar", "all_reduce", (("y", 8),), _COL, _ROW, _NONE, ("y",)),
    Case("ar-data", "all_reduce", _XY, P("x", "y"), _ROW, P("x", None), ("y",)),
    Case("ar-first-axis", "all_reduce", (("x", 2), ("y", 4)), P("y", "x"), P("x", None), P("y", None), ("x",)),
    Case("ar-two-axes", "all_reduce", _XY, P(None, ("y", "x")), P(("y", "x"), None), _NONE, ("y", "x")),
    # All matrices are in blocks.
    Case("grid", "grid", _XY, P("x", "y"), P("x", "y"), P("x", "y"), ("x", "y")),
    Case("grid-transposed", "grid", _XY, P("y", "x"), P("y", "x"), P("y", "x"), ("y", "x")),
    Case("grid-2x4", "grid", (("x", 2), ("y", 4)), P("x", "y"), P("x", "y"), P("x", "y"), ("x", "y")),
    Case("grid-4x2", "grid", (("x", 4), ("y", 2)), P("x", "y"), P("x", "y"), P("x", "y"), ("x", "y")),
    Case("grid-two-axes", "grid", (("x", 2), ("y", 2), ("z", 2)), *[P(("x", "y"), "z")] * 3, group=("x", "y", "z")),
    # No other operand uses the axis: the requested gather, then a local product.
    Case("gather-a", "local", _XY, _ROW, _NONE, _NONE, gathers="a"),
    Case("gather-b", "local", _XY, _NONE, _COL, _NONE, gathers="b"),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}

# The transform matrix's cases: one per pattern, on a 2 x 2 mesh. All have the same extents.
_OF_MATRIX = "local ag-data rs-data ar-data grid ag-transposed rs-transposed gather-a gather-b"
MATRIX = tuple(BY_NAME[name] for name in _OF_MATRIX.split())

TRANSPOSITIONS = ("NN", "NT", "TN", "TT")
DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64", "complex128")
NEEDS_X64 = ("float64", "complex128")
ACCUMULATORS = {name: "float32" if name in ("bfloat16", "float16") else name for name in DTYPES}
EPILOGS = tuple(epilog for epilog in Epilog if epilog != Epilog.ALLREDUCE)
# None is the default: "host" on CPU devices of one process.
IMPLEMENTATIONS = (None, "xla")


def by_id(cases):
    """Returns `parametrize` arguments for cases, with their names as ids."""
    return [pytest.param(case, id=case.name) for case in cases]


def require(implementation) -> None:
    """Skips the test if the compiled extension is absent; fails instead if JAXMP_REQUIRE_DEVICES or CI is set."""
    if implementation == "xla":
        return
    try:
        native.extension()
    except ImportError as error:
        if os.environ.get("JAXMP_REQUIRE_DEVICES", "0") != "0" or os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(f'implementation="host" needs the compiled extension: {error}')
