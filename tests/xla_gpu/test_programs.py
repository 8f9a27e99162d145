"""Transforms and levels of determinism of calls on XLA:GPU, on meshes of several devices.

tests/core/product/test_transforms.py has the transforms and their oracle.
"""

import functools

import cases
import fake_gpus
import jax
import jax.numpy as jnp
import modes
import numpy as np
import pytest
import test_transforms
from jax.sharding import PartitionSpec as P
from test_calls import PATTERNS, mesh_over, operands, run_apart

import jaxmp


@pytest.mark.parametrize("transform", test_transforms.TRANSFORMS, ids=lambda transform: transform.__name__)
@pytest.mark.parametrize("name", ["ag", "rs", "ar-data", "local"])
def test_transforms_of_every_pattern(name, transform):
    mode, case = modes.BY_ID["explicit"], test_transforms.sized(cases.BY_NAME[name])
    with mode.scope(case):
        fake_gpus.cublasmp_calls(2)
        got = mode.run(functools.partial(transform, mode.product(case)), test_transforms.placed(mode, case))
    expected = test_transforms.expected(transform, test_transforms.EXTENTS)
    test_transforms.judge_all(f"{name} {transform.__name__}", got, expected)
    assert "Matmul" in fake_gpus.cublasmp_calls(2)


@pytest.mark.parametrize("name", PATTERNS)
def test_each_device_takes_a_branch_by_a_number_of_its_own(name):
    mesh = mesh_over((0, 1, 2, 3))
    with jax.set_mesh(mesh):
        product, given, expected = operands(name, mesh)
        f = jax.jit(lambda p, a, b: jax.lax.cond(p, product, lambda a, b: -product(a, b), a, b))
        np.testing.assert_array_equal(f(True, *given), expected)
        np.testing.assert_array_equal(f(False, *given), -expected)


@pytest.mark.parametrize("version", [(0, 11, 0), jax.__version_info__], ids=["older JAX", "this JAX"])
def test_explain_names_a_collective_in_flight_across_a_call(version, monkeypatch):
    """Before JAX 0.12, XLA counts a call as computation, and starts it while a collective is in flight."""
    monkeypatch.setattr(jax, "__version_info__", version)
    mesh = mesh_over((0, 1, 2, 3))
    specs = ((1024, 512), P("y", None)), ((512, 2048), P(None, "y")), ((2048, 4096), P("y", None))
    types = (cases.typed(mesh, shape, *spec) for shape, spec in specs)

    def both(x, w, z):
        d = jaxmp.matmul(x, w, out_sharding=P(None, "y"), implementation="cublasmp")
        return d, -jax.sharding.reshard(z, P(None, None))

    with jax.set_mesh(mesh):
        explanation = jaxmp.explain(both, compiled=True, quiet=True)(*types)
    (across,) = (row.across for row in explanation.rows if row.kind == "all-gather")
    if version >= (0, 12):
        assert across == ()
        return
    (line,) = across
    assert line.startswith("test_programs.py:")
    assert f"in flight across jaxmp's call of {line}: both wait for other devices" in " ".join(str(explanation).split())


def test_microbatches_are_exact_where_calls_overlap(monkeypatch):
    """Uses checkpoints; the fake library keeps only documented promises and is late at random."""
    monkeypatch.setenv("FAKE_CUBLASMP_SEED", "5")
    mesh, rng = mesh_over((0, 1, 2, 3)), np.random.default_rng(0)
    axis = mesh.axis_names[-1]
    xs, up, down = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((6, 8, 16), (16, 8), (8, 16)))

    @jax.checkpoint
    def layer(weights, x):
        h = jaxmp.matmul(x, weights[0], out_sharding=P(None, axis), implementation="cublasmp")
        return jaxmp.matmul(h, weights[1], out_sharding=P(axis, None), implementation="cublasmp")

    @jax.jit
    def step(weights, xs):
        def add(total, x):
            grads = jax.grad(lambda w: jnp.sum(layer(w, layer(w, x))))(weights)
            return jax.tree.map(jnp.add, total, grads), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), xs)[0]

    with jax.set_mesh(mesh):
        weights = cases.put(up, mesh, P(None, axis)), cases.put(down, mesh, P(axis, None))
        got = step(weights, cases.put(xs, mesh, P(None, axis, None)))
    want = [np.zeros_like(up), np.zeros_like(down)]
    for x in xs:
        y, cotangent = x @ up @ down, np.ones_like(x)
        for given in (y, x):
            want[0] += given.T @ (cotangent @ down.T)
            want[1] += (given @ up).T @ cotangent
            cotangent = cotangent @ down.T @ up.T
    for each, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(each, expected)


def test_levels_of_determinism_are_calls_of_one_rank():
    """Calls have fewer columns, because the fake's threads run one by one: 512 x k x 1024."""
    said = run_apart(
        f"""
        import functools, os
        import jax, numpy as np, jaxmp
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from jaxmp._src.core.lowering import fixed_shape
        fixed_shape.COLUMNS = 1024
        patterns = {{name: (P(*a), P(*b), P(*out)) for name, (a, b, out) in {_PLAIN!r}.items()}}
        mesh = jax.make_mesh((2,), ("y",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
        rng = np.random.default_rng(0)
        a, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((600, 8), (8, 1100)))
        with jax.set_mesh(mesh):
            for level, name in {_LEVELS!r}:
                spec_a, spec_b, out = patterns[name]
                given = (jax.device_put(x, NamedSharding(mesh, s)) for x, s in ((a, spec_a), (b, spec_b)))
                f = jax.jit(functools.partial(jaxmp.matmul, out_sharding=out, determinism=level))
                fake_gpus.cublasmp_calls(1)
                np.testing.assert_array_equal(f(*given), a @ b)
                print(level, name, fake_gpus.cublasmp_calls(1).count("Matmul"), flush=True)
        os._exit(0)
    """,
        JAXMP_TIMEOUT="60",
    )
    # Two calls of 512 rows, or one if the rank has 300; two of 1024 columns, or one if it has 550.
    counts = {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 4, "local": 2}
    expected = [f"{level} {name} {counts[name]}" for level, name in _LEVELS]
    assert said.splitlines()[-len(expected) :] == expected, said


_PLAIN = {
    "all_gather": (("y", None), (None, "y"), (None, "y")),
    "reduce_scatter": ((None, "y"), ("y", None), ("y", None)),
    "all_reduce": ((None, "y"), ("y", None), (None, None)),
    "local": (("y", None), (None, None), ("y", None)),
}
_LEVELS = [*(("batch", name) for name in _PLAIN), ("topology", "reduce_scatter")]


def test_a_call_of_a_level_takes_its_rows_from_where_they_are():
    """It also writes its part of d in place, because both are contiguous: no kernel copies them."""
    said = run_apart(
        """
        import functools, os
        import jax, numpy as np, jaxmp
        from jaxmp._src.core.lowering import fixed_shape
        fixed_shape.COLUMNS = 1024
        rng = np.random.default_rng(0)
        a, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((1536, 16), (16, 1024)))
        f = jax.jit(functools.partial(jaxmp.matmul, determinism="batch"))
        text = f.lower(a, b).compile().as_text()
        np.testing.assert_array_equal(f(a, b), a @ b)
        start = text.index("%dynamic-slice-fusion")
        print(text[start : text.index("}", text.index("ROOT", start) + 200)])
        print("copies", [line for line in text.splitlines() if "kind=kLoop" in line and "slice" in line.split()[0]])
        os._exit(0)
    """,
        JAXMP_TIMEOUT="60",
    )
    assert "f32[3,512,16]" in said.partition("->")[0], said
    assert "dynamic-slice(" in said
    assert "dynamic-update-slice(" in said
    assert "jaxmp_matmul" in said
    assert "copies []" in said, said
