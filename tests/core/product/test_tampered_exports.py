"""An exported program is untrusted input: if the description that XLA's partitioner passes to a product is changed,
running it gives an error or a result and never crashes. (tests/cpp/attribute_fuzz.cc changes the calls' attributes.)"""

import dataclasses
import os
import re
import subprocess
import sys

import jax
import jax.export
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

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


def main():
    """Prints the name of each change before trying it, so that the last line names the one that ended the process."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    operands = [np.ones(shape, np.float32) for shape in ((8, 12), (12, 8), (8,))]
    operands = [jax.device_put(x, NamedSharding(mesh, P("x", *(None,) * (x.ndim - 1)))) for x in operands]
    check = jax.export.DisabledSafetyCheck.custom_call("jaxmp_partitioned_matmul")
    exported = jax.export.export(jax.jit(partitioned), disabled_checks=[check])(*operands)
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


def test_a_changed_program_is_refused_or_runs():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=240)
    last = ended.stdout.strip().splitlines()[-1:]
    assert ended.returncode == 0, f"ended with {ended.returncode} at {last}\n{ended.stderr[-3000:]}"


if __name__ == "__main__":
    main()
