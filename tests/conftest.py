"""Settings of every test: eight CPU devices, and JAX configured so that silent conversions are errors."""

import os

DEVICE_COUNT = 8

# XLA reads both when its first backend starts, so they must be set before jax is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICE_COUNT}"
    ).strip()

# Programs started by tests also treat `fuse`'s warnings about its failures as errors.
os.environ.setdefault("PYTHONWARNINGS", "error:jaxmp.fuse fails")

import jax
import numpy as np
import pytest
import selection

OF_BITS = ("test_fixed_shape", "test_held_bits", "test_laws", "test_models", "test_numerics")

# Strict promotion makes an unintended mix of dtypes in our rules an error instead of a wider (and slower, and
# differently rounded) product. jaxmp follows JAX's promotion rules, so tests of promotion use `standard_promotion`.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="run every case, and not only those of the small suite")
    parser.addoption("--share", metavar="I/N", help="of the cases of each test run those whose number is I modulo N")
    parser.addoption(
        "--share-tests", metavar="I/N", default="0/1", help="the same of the tests without cases of a file"
    )


def pytest_collection_modifyitems(config, items):
    """Drops the cases that only the exhaustive suite runs, unless the command line names a case."""
    kept = set(items)
    if not config.getoption("--exhaustive") and not any("[" in arg for arg in config.args):
        kept = selection.small(items)
    if share := config.getoption("--share"):
        shares = (tuple(map(int, part.split("/"))) for part in (share, config.getoption("--share-tests")))
        kept = selection.share([item for item in items if item in kept], *shares)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(autouse=True)
def needs_extension(request):
    """Skips tests of products if the compiled extension is absent, unless XLA multiplies (cases.require)."""
    if request.path.parent.name in ("product", "determinism", "tools", "fuse", "errors"):
        import cases

        params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
        cases.require(params.get("implementation"))


@pytest.fixture(autouse=True)
def quick_compilation(request):
    """Turns off LLVM's optimizations to save time in tests that judge values and not last bits."""
    is_quick = request.path.parent.name in ("product", "errors", "fuse") and request.path.stem not in OF_BITS
    jax.config.update("jax_disable_most_optimizations", is_quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def standard_promotion():
    """Uses JAX's default promotion rules, for tests of mixed operands."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def promotion_of_users(standard_promotion):
    """Also uses JAX's default promotion of ranks, for programs as users write them."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def x64():
    """Turns 64-bit types on for one test; they are off by default, as for users."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rng():
    """Returns a generator that starts in the same state in every test."""
    return np.random.default_rng(20240229)


def require_devices(count):
    """Skips the test if fewer than `count` devices exist. With JAXMP_REQUIRE_DEVICES=n, a test that needs at most n
    devices fails instead, so that a machine that should have them cannot pass by skipping."""
    found = jax.device_count()
    if found >= count:
        return
    message = f"needs {count} devices, found {found} on {jax.default_backend()}"
    if count <= int(os.environ.get("JAXMP_REQUIRE_DEVICES", "0")):
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture
def mesh_of():
    """Returns `mesh_of({"x": 2, "y": 4})`: a mesh over the first devices; skips the test if there are too few. Axis
    types are explicit unless `axis_type` says otherwise."""

    def make(sizes, axis_type=jax.sharding.AxisType.Explicit):
        count = int(np.prod(list(sizes.values()), dtype=int))
        require_devices(count)
        return jax.make_mesh(
            tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes), devices=jax.devices()[:count]
        )

    return make
