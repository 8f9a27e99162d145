"""Programs for the host implementation as XLA sees them."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

ROWS, COLUMNS, RESULT = P("y", "x"), P("x", None), P("y", None)


@pytest.fixture(params=["in order", "reversed"])
def mesh(request, mesh_of):
    devices = mesh_of({"y": 2, "x": 2}).devices
    if request.param == "reversed":
        devices = devices[::-1, ::-1]
    return Mesh(devices, ("y", "x"), axis_types=(AxisType.Explicit,) * 2)


def test_a_program_of_one_call_has_nothing_to_compile(mesh, rng):
    """XLA starts LLVM for any operation of its own, which took a third of the compile time of such a program."""
    a, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((8, 6), (6, 4)))
    operands = (jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((a, ROWS), (b, COLUMNS)))

    product = functools.partial(jaxmp.matmul, out_sharding=NamedSharding(mesh, RESULT), implementation="host")
    text = jax.jit(product).lower(*operands).compile().as_text()
    operations = set(re.findall(r"^ *(?:ROOT )?%\S+ = \S+ ([\w-]+)\(", text, re.MULTILINE))
    assert operations == {"parameter", "partition-id", "custom-call"}


def test_long_rows_are_multiplied_by_xla(mesh_of):
    """hostmp counts in 32 bits; this limits the extents that the ranks of a group have together, too."""
    mesh, long = mesh_of({"x": 4}), 2**31

    def layer(x, w, bias):
        return jaxmp.linear(x, w, bias, activation="gelu").sum()

    def explained(fn, *operands, specs=(None, None, None)):
        shardings = [spec if spec is None else NamedSharding(mesh, spec) for spec in specs]
        types = [jax.ShapeDtypeStruct(x, np.float32, sharding=s) for x, s in zip(operands, shardings, strict=False)]
        jax.jit(fn).lower(*types)
        return [(row.implementation, row.why.partition(",")[0]) for row in jaxmp.explain(fn, quiet=True)(*types).rows]

    xla = ("xla", "hostmp counts in 32 bits")
    assert explained(jaxmp.matmul, (2, long - 1), (long - 1, 2)) == [("host", "CPU devices of one process")]
    assert explained(jaxmp.matmul, (2, long), (long, 2)) == [xla]
    assert explained(functools.partial(jaxmp.matmul, transpose_a=True), (long, 2), (long, 2)) == [xla]
    assert explained(jaxmp.matmul, (2, 2), (2, long)) == [xla]
    assert explained(jaxmp.matmul, (2**16, 2**16, 2), (2, 2)) == [xla]
    assert explained(jax.grad(layer, (0, 1, 2)), (long, 2), (2, 2), (2,)) == [xla] * 3
    with jax.set_mesh(mesh):
        reduced = functools.partial(jaxmp.matmul, out_sharding=P("x", None))
        assert explained(reduced, (4, long), (long, 2), specs=(P(None, "x"), P("x", None))) == [xla]
        assert explained(jaxmp.matmul, (long, 2), (2, 2), specs=(P("x", None), P(None, None)))[0][0] == "host"
