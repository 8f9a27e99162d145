"""Programs that one process compiles and exports, and another process runs.

python restart.py write FOLDER
python restart.py read FOLDER   prints JSON: for each program, the compilation cache's events, and if results are right
python restart.py tamper        runs an exported program whose description of a product is changed in many ways
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import sys

import conftest  # noqa: F401 (devices)
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

EVENTS = {"/jax/compilation_cache/cache_hits": "hit", "/jax/compilation_cache/cache_misses": "miss"}
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("jaxmp_matmul", "jaxmp_partitioned_matmul")]
SPECS = P("x", None), P(None, None)


def loss(a, b):
    """Computes a loss with an epilog, exact in small integers, and its mask."""
    z, rest = jaxmp.matmul(a, b, epilog=jaxmp.Epilog.RELU_AUX_BIAS, epilog_inputs={"bias": jnp.arange(-4.0, 4.0)})
    return (z * z).sum(), rest["relu_aux"]


def gradient(a, b):
    return jax.grad(loss, (0, 1), has_aux=True)(a, b)


def with_in_shardings(a, b):
    return jaxmp.matmul(a, b, in_shardings=SPECS, out_sharding=P(None, "x"), mesh=mesh_of(AxisType.Auto, 4))


def in_shard_map(a, b):
    mesh = mesh_of(AxisType.Auto, 4)
    specs = {"mesh": mesh, "in_specs": SPECS, "out_specs": P(None, None)}
    return jax.shard_map(lambda a, b: jaxmp.all_gather_matmul(a, b, "x"), check_vma=False, **specs)(a, b)


def mesh_of(axis_type, count, is_reversed=False):
    devices = jax.devices()[:: -1 if is_reversed else 1][:count]
    return jax.make_mesh((count,), ("x",), axis_types=(axis_type,), devices=devices)


# Name: the program, the type of its mesh's axis, and the number of devices.
PROGRAMS = {
    "no mesh": (gradient, None, 1),
    "auto": (gradient, AxisType.Auto, 4),
    "auto, one device": (gradient, AxisType.Auto, 1),
    "explicit": (gradient, AxisType.Explicit, 4),
    "in_shardings": (with_in_shardings, AxisType.Auto, 4),
    "shard_map": (in_shard_map, AxisType.Auto, 4),
}
# Programs that are also exported for any number of rows.
SYMBOLIC = tuple(name for name in PROGRAMS if name != "shard_map")


def operands():
    rng = np.random.default_rng(0)
    return [rng.integers(-3, 4, shape).astype(np.float32) for shape in ((8, 16), (16, 8))]


def placed(axis_type, count, is_reversed=False):
    if axis_type is None:
        return operands()
    mesh = mesh_of(axis_type, count, is_reversed)
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands(), SPECS, strict=True)]


def expected(program):
    a, b = operands()
    if program is not gradient:
        return [a @ b]
    z = a @ b + np.arange(-4, 4)
    t = 2 * np.maximum(z, 0)
    return [t @ b.T, a.T @ t]


def write(folder):
    for name, (program, axis_type, count) in PROGRAMS.items():
        args = placed(axis_type, count)
        jax.block_until_ready(jax.jit(program)(*args))
        shapes = {name: args}
        if name in SYMBOLIC:
            (rows,) = jax.export.symbolic_shape("4 * m")
            a = jax.ShapeDtypeStruct((rows, 16), np.float32, sharding=getattr(args[0], "sharding", None))
            shapes[f"{name}, any rows"] = [a, args[1]]
        for name, args in shapes.items():
            exported = jax.export.export(jax.jit(program), disabled_checks=CHECKS)(*args)
            (folder / f"{name}.export").write_bytes(exported.serialize())


def read(folder):
    found, events = {}, []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(EVENTS.get(event)))
    jaxmp.register()
    for name, (program, axis_type, count) in PROGRAMS.items():
        args = placed(axis_type, count)
        events.clear()
        got = {"cache": jax.jit(program)(*args)}
        found[name] = {"cache": [event for event in events if event]}
        for path in (folder / f"{name}.export", folder / f"{name}, any rows.export"):
            with contextlib.suppress(FileNotFoundError):
                exported = jax.export.deserialize(bytearray(path.read_bytes()))
                got[path.stem] = jax.jit(exported.call)(*placed(axis_type, count, is_reversed=True))
        for which, results in got.items():
            arrays = zip(jax.tree.leaves(results), expected(program), strict=False)
            found[name][f"{which} is right"] = all(np.array_equal(x, want) for x, want in arrays)
    print(json.dumps(found))


SHARES = 12  # every twelfth change is tried
# Fields of a spec that this description leaves out.
ADDED = ("transpose_a", "has_c", "traced", "scales", "group", "implementation", "determinism", "distributions", "other")
# Values to insert into a description, fitting or not.
VALUES = ("0", "-1", "1", "3", f"{2**62}", "1.5", "null", "true", "[]", "{}", '"x"', '"cpu"', '["x", 3]')
VALUES += ('[["x", 3]]', '[["x", 4], ["y", 2]]', '{"dtype": "float64"}', '{"dtype": "nothing"}', '{"complex": [1, 2]}')


def partitioned(a, b, bias):
    options = {"epilog": jaxmp.Epilog.RELU_AUX_BIAS, "epilog_inputs": {"bias": bias}}
    return jaxmp.matmul(a, b, **options, alpha=2.0, precision="highest")[0]


def descriptions(text):
    """Yields (name of the change, changed text): another value for each field of a product, and added fields."""
    described = re.search(r'@jaxmp_partitioned_matmul.*?backend_config = "(.*?)"[,}]', text)[1]
    plain = described.replace("\\22", '"')
    fields = re.findall(r'"(\w+)": (?=("[^"]*"|[-\d.]+|true|false|\[.*?\](?=, "|})|\{.*?\}+))', plain)
    yield "no JSON", text.replace(described, "nothing")
    for value in VALUES:
        changes = [(f"{name}={value}", f'"{name}": {old}', f'"{name}": {value}') for name, old in fields]
        changes += [(f"added {name}={value}", '"spec": {', f'"spec": {{"{name}": {value}, ') for name in ADDED]
        for what, old, new in changes:
            yield what, text.replace(described, plain.replace(old, new).replace('"', "\\22"))


def tamper():
    """Prints the name of each change before trying it, so that the last line names the one that ended the process."""
    shapes = (8, 12), (12, 8), (8,)
    sharding = NamedSharding(mesh_of(AxisType.Auto, 4), P("x"))
    operands = [jax.device_put(np.ones(shape, np.float32), sharding) for shape in shapes]
    exported = jax.export.export(jax.jit(partitioned), disabled_checks=CHECKS)(*operands)
    want = np.asarray(exported.call(*operands))
    refused = 0
    for what, text in list(descriptions(exported.mlir_module()))[::SHARES]:
        print("TRYING", what, flush=True)
        tampered = dataclasses.replace(exported, mlir_module_serialized=text.encode())
        try:
            assert np.asarray(jax.jit(tampered.call)(*operands)).shape == want.shape
        except Exception as error:
            if "jaxmp" not in str(error) and "hostmp" not in str(error):
                raise
            refused += 1
    np.testing.assert_array_equal(np.asarray(exported.call(*operands)), want)  # no state is left
    assert refused >= 10


if __name__ == "__main__":
    if sys.argv[1] == "tamper":
        sys.exit(tamper())
    folder = pathlib.Path(sys.argv[2])
    jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    {"write": write, "read": read}[sys.argv[1]](folder)
