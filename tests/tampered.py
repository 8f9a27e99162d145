"""Exported programs whose text has been changed, run one after the other; a process of its own, for it may crash.

Each line of the output names what is about to be tried, so the last one names what ended the process.
"""

from __future__ import annotations

import dataclasses
import re
import sys

import conftest  # noqa: F401 (devices)
import jax
import jax.export
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import BlockCyclic

# Fields of a spec that its description leaves out.
ADDED = (
    "transpose_a",
    "has_c",
    "traced",
    "scales",
    "group",
    "implementation",
    "determinism",
    "distributions",
    "nothing",
)
NUMBERS = (0, -1, 1, 2**31, 2**62, 2**63 - 1)
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("jaxmp_matmul", "jaxmp_partitioned_matmul")]


def mesh_of(shape, names):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def block_cyclic():
    mesh, layout = mesh_of((2, 4), ("x", "y")), BlockCyclic((2, 4), (2, 2), (1, 0))
    x = np.ones((8, 8), np.float32)

    def program(x):
        laid = jaxmp.to_block_cyclic(x, layout, mesh=mesh)
        return jaxmp.from_block_cyclic(jaxmp.matmul(laid, laid, out_sharding=layout))

    return program, (jax.device_put(x, NamedSharding(mesh, P())),)


def gathered():
    mesh = mesh_of((4,), ("x",))
    a, b = np.ones((8, 12), np.float32), np.ones((12, 4), np.float32)
    f = jax.shard_map(
        lambda a, b: jaxmp.all_gather_matmul(a, b, axis_name="x", epilog=jaxmp.Epilog.RELU),
        mesh=mesh,
        in_specs=(P("x", None), P(None, "x")),
        out_specs=P(None, "x"),
        check_vma=False,
    )
    return f, (
        jax.device_put(a, NamedSharding(mesh, P("x", None))),
        jax.device_put(b, NamedSharding(mesh, P(None, "x"))),
    )


def local():
    return lambda a, b: jaxmp.matmul(a, b), (np.ones((4, 6), np.float32), np.ones((6, 5), np.float32))


def partitioned():
    """On automatic axes, where the program describes its product in JSON."""
    mesh = mesh_of((4,), ("x",))
    a, b, bias = np.ones((8, 12), np.float32), np.ones((12, 8), np.float32), np.ones((8,), np.float32)

    def f(a, b, bias):
        options = {"epilog": jaxmp.Epilog.RELU_AUX_BIAS, "epilog_inputs": {"bias": bias}}
        return jaxmp.matmul(a, b, **options, alpha=2.0, precision="highest")[0]

    return f, [jax.device_put(x, NamedSharding(mesh, P("x", *(None,) * (x.ndim - 1)))) for x in (a, b, bias)]


PROGRAMS = {"block-cyclic": block_cyclic, "all-gather": gathered, "local": local, "partitioned": partitioned}
# What may stand in a description, whether it fits or not.
VALUES = ("0", "-1", "1", "3", f"{2**62}", "1.5", "null", "true", "[]", "{}", '"x"', '"cpu"', '["x", 3]')
VALUES += ('[["x", 3]]', '[["x", 4], ["y", 2]]', '{"dtype": "float64"}', '{"dtype": "nothing"}', '{"complex": [1, 2]}')


def attributes_of(text):
    """(name, what stands behind it) for each attribute of the program's call."""
    config = re.search(r"@jaxmp_matmul\(.*?backend_config = \{(.*?)\}, ", text)[1]
    return re.findall(r"(\w+) = (dense<[^>]*> : tensor<\w+>|\"[^\"]*\"|-?\d+ : i64)", config)


def changes_of(name, value):
    """(what it is, the new text) for each change of one attribute."""
    whole = f"{name} = {value}"
    if value.endswith(": i64"):
        yield from ((f"{name}={number}", f"{name} = {number} : i64") for number in NUMBERS)
    if found := re.fullmatch(r"dense<(.*)> : tensor<(\d+)xi64>", value):
        count = int(found[2])
        numbers = re.findall(r"-?\d+", found[1])
        numbers = numbers * count if len(numbers) == 1 else numbers
        for place in range(count):
            for number in NUMBERS:
                changed = [*numbers[:place], str(number), *numbers[place + 1 :]]
                yield f"{name}[{place}]={number}", f"{name} = dense<[{', '.join(changed)}]> : tensor<{count}xi64>"
        yield f"{name} longer", f"{name} = dense<7> : tensor<{count + 1}xi64>"
    yield f"{name} missing", f"no_{whole}"
    yield f"{name} a float", f"{name} = 1.5 : f64"
    yield f"{name} of 32 bits", f"{name} = 1 : i32"


def same_blocks(text):
    """(what it is, the changed text) with one number for the blocks of all matrices, which have to fit each other."""
    layouts = [(name, value) for name, value in attributes_of(text) if name.startswith("layout_") and "[" in value]
    for number in NUMBERS[1:] if layouts else ():
        for rows, cols in ((number, 2), (2, number), (number, number)):
            changed = text
            for name, value in layouts:
                first = re.findall(r"-?\d+", value)[2:4]
                blocks = f"{name} = dense<[{rows}, {cols}, {first[0]}, {first[1]}]> : tensor<4xi64>"
                changed = changed.replace(f"{name} = {value}", blocks)
            yield f"blocks of {rows}x{cols}", changed


def descriptions(text):
    """(what it is, the changed text) with another value for each field of a described product, and for others."""
    described = re.search(r'@jaxmp_partitioned_matmul.*?backend_config = "(.*?)"[,}]', text)[1]
    plain = described.replace("\\22", '"')
    fields = re.findall(r'"(\w+)": (?=("[^"]*"|[-\d.]+|true|false|\[.*?\](?=, "|})|\{.*?\}+))', plain)
    yield "no JSON", text.replace(described, "nothing")
    for value in VALUES:
        changes = [(f"{name}={value}", f'"{name}": {old}', f'"{name}": {value}') for name, old in fields]
        changes += [(f"added {name}={value}", '"spec": {', f'"spec": {{"{name}": {value}, ') for name in ADDED]
        for what, old, new in changes:
            yield what, text.replace(described, plain.replace(old, new).replace('"', "\\22"))


def trials(exported, share, shares):
    """(what it is, the changed program): every `shares`-th change of an attribute, and all of the blocks together."""
    text = exported.mlir_module()
    if "@jaxmp_partitioned_matmul" in text:
        for number, (what, tampered) in enumerate(descriptions(text)):
            if number % shares == share:
                yield what, dataclasses.replace(exported, mlir_module_serialized=tampered.encode())
        return
    for what, tampered in same_blocks(text):
        yield what, dataclasses.replace(exported, mlir_module_serialized=tampered.encode())
    number = share
    for name, value in attributes_of(text):
        for what, changed in changes_of(name, value):
            tampered = text.replace(f"{name} = {value}", changed)
            if tampered == text:
                continue
            number += 1
            if number % shares == 0:
                yield what, dataclasses.replace(exported, mlir_module_serialized=tampered.encode())


def main(program, share, shares):
    function, operands = PROGRAMS[program]()
    exported = jax.export.export(jax.jit(function), disabled_checks=CHECKS)(*operands)
    want = np.asarray(exported.call(*operands))
    counts = {"refused": 0, "ran": 0}
    for what, tampered in trials(exported, int(share), int(shares)):
        print("TRYING", what, flush=True)
        try:
            got = np.asarray(jax.jit(tampered.call)(*operands))
            assert got.shape == want.shape
            counts["ran"] += 1
        except Exception as error:
            if "jaxmp" not in str(error) and "hostmp" not in str(error):
                raise
            counts["refused"] += 1
    np.testing.assert_array_equal(np.asarray(exported.call(*operands)), want)  # nothing is left behind
    print("COUNTS", counts["refused"], counts["ran"])


if __name__ == "__main__":
    main(*sys.argv[1:])
