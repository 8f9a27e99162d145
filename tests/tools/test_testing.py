"""`jaxmp.testing`: the comparison of bits, and the checks of the selftest. Without these tests, a comparison could take
-0 for 0 or a NaN for any NaN, and a checker could leave a promise out."""

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import testing

pytestmark = pytest.mark.usefixtures("x64")
DTYPES = testing.DTYPES
LEVELS = testing.LEVELS

NAN, OTHER_NAN = np.uint32([0x7FC00000, 0x7FC00001]).view(np.float32)
ULP = 2.000000238418579  # the next float32 above 2
WRONG = {
    "value": (np.float32([1, 2, 3]), np.float32([1, ULP, 3]), "x: 1 of 3 elements differ; the first at (1,): 2.0 "
              "(0x40000000) instead of 2.000000238418579 (0x40000001), 1 ulp apart"),
    "sign of zero": (np.float32([0.0]), np.float32([-0.0]),
                     "the first at (0,): 0.0 (0x00000000) instead of -0.0 (0x80000000), 1 ulp apart"),
    "payload": (np.float32([NAN]), np.float32([OTHER_NAN]), "nan (0x7fc00000) instead of nan (0x7fc00001)"),
    "across zero": (np.float32([1e-45]), np.float32([-1e-45]), "3 ulps apart"),
    "worst": (np.float64([1, 1]), np.float64([1 + 2**-52, 2]), "2 of 2 elements differ; the first at (0,): 1.0 "
              "(0x3ff0000000000000) instead of 1.0000000000000002 (0x3ff0000000000001), 1 ulp apart; the farthest "
              "apart at (1,): 1.0 (0x3ff0000000000000) instead of 2.0 (0x4000000000000000), 4503599627370496 ulps "
              "apart"),
    "complex": (np.complex64([1 + 1j]), np.complex64([1 - 1j]),
                "(1+1j) (0x3f800000 0x3f800000) instead of (1-1j) (0x3f800000 0xbf800000)"),
    "bfloat16": (np.ones(1, jnp.bfloat16), np.full(1, 1.0078125, jnp.bfloat16),
                 "1.0 (0x3f80) instead of 1.0078125 (0x3f81), 1 ulp apart"),
    "integers": (np.uint8([3]), np.uint8([5]), "3 (0x03) instead of 5 (0x05), 2 ulps apart"),
    "dtype": (np.float32([1]), np.float64([1]), "x: float32[1] instead of float64[1]"),
    "shape": (np.ones((2, 1)), np.ones(2), "x: float64[2, 1] instead of float64[2]"),
    "scalar": (np.float32(1), np.float32(2), "1 of 1 elements differ; the first at (): 1.0"),
}  # fmt: skip


@pytest.mark.parametrize(("actual", "expected", "message"), WRONG.values(), ids=WRONG.keys())
def test_unequal_bits_are_named(actual, expected, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        testing.assert_bitwise_equal(actual, expected, "x")


@pytest.mark.parametrize("dtype", [*DTYPES, "int32", "bool"])
def test_equal_bits_pass(dtype):
    x = np.asarray([0.0, -0.0, 1.5, 0.0, 0.0, 1.0]).astype(jnp.dtype(dtype))
    x[3:5] = (np.nan, np.inf) if jnp.issubdtype(dtype, jnp.inexact) else 0
    testing.assert_bitwise_equal(x, jnp.asarray(x))
    testing.assert_bitwise_equal(x[:0], x[:0])


@pytest.mark.parametrize("kind", ["rows", "columns", "meshes"])
def test_the_checker_is_not_content_with_zeros(kind, monkeypatch):
    """Zeros have the same bits in any batch and on any mesh."""
    real = testing.matmul_lib.matmul
    monkeypatch.setattr(testing.matmul_lib, "matmul", lambda *args, **options: 0 * real(*args, **options))
    check = {
        "rows": lambda: testing.check_rows("batch", "xla", "float32", (3, 5), (1, 2)),
        "columns": lambda: testing.check_columns("batch", "xla", "float32", (3, 5), (1, 2)),
        "meshes": lambda: testing.check_meshes("topology", "xla", "float32", (2, 2, 2), [1]),
    }[kind]
    with pytest.raises(AssertionError, match="elements are zero, which proves nothing"):
        check()


def test_the_checker_checks_every_promise():
    found = list(testing.checks(is_quick=False))
    assert len(found) > len(list(testing.checks(is_quick=True))) > 40
    subjects = {(check.promise, *check.subject.split()[:2]) for check in found}
    assert subjects == set(itertools.product(LEVELS, testing.IMPLEMENTATIONS, DTYPES))
    on_gpus = list(testing.checks(is_quick=False, implementations=("cublasmp",)))
    assert {check.subject.split()[0] for check in on_gpus} == {"cublasmp"}
    assert {check.subject.split()[1] for check in on_gpus} == set(DTYPES)
    assert all(f" {epilog.name}" in " ".join(check.subject for check in on_gpus) for epilog in testing.EPILOGS)
    names = " ".join(check.subject for check in found)
    assert all(f" {epilog.name}" in names for epilog in testing.EPILOGS + testing.DERIVATIVES)
    assert " k=1 " in names
    assert " k=11008 " in names
