"""Time to trace and to compile one training step of a 24-layer MLP, tensor-parallel over four devices."""

import functools
import statistics

import jax
import jax.numpy as jnp
from common import compile_seconds, main
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jaxmp

LAYERS, ROWS, WIDTH = 24, 128, 256
# Weight, bias and result of a layer that gathers rows and of one that scatters them.
LAYOUTS = [(P(None, "x"), P("x"), P(None, "x")), (P("x", None), P(None), P("x", None))]


def jaxmp_layer(x, w, b, out):
    return jaxmp.linear(x, w, b, activation="gelu", out_sharding=out)


def jnp_layer(x, w, b, out):
    return jax.nn.gelu(jnp.matmul(x, w, out_sharding=out) + b)


def loss(layer, params, x):
    for i, (w, b) in enumerate(params):
        x = layer(x, w, b, LAYOUTS[i % 2][2])
    return jnp.mean(x**2)


def step(layer, params, x):
    grads = jax.grad(functools.partial(loss, layer))(params, x)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)


def once(layer, arguments):
    return compile_seconds(functools.partial(step, layer), arguments)[0]


def measure(quick):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    layers = 6 if quick else LAYERS

    def shape(dims, spec):
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, spec))

    layouts = [LAYOUTS[i % 2] for i in range(layers)]
    params = [(shape((WIDTH, WIDTH), w), shape((WIDTH,), b)) for w, b, _ in layouts]
    arguments = params, shape((ROWS, WIDTH), P("x", None))
    contenders = {"jaxmp": jaxmp_layer, "jnp": jnp_layer}
    samples = {name: [] for name in contenders}
    with jax.set_mesh(mesh):
        for layer in contenders.values():  # the first use also loads and registers
            once(layer, arguments)
        for _ in tqdm(range(2 if quick else 7), "compile", disable=None):
            for name, layer in contenders.items():
                samples[name].append(once(layer, arguments))
    rows = []
    for name, each in samples.items():
        tracing, compiling = (statistics.median(part) for part in zip(*each, strict=True))
        rows.append({"contender": name, "trace and lower": tracing, "compile": compiling, "sum": tracing + compiling})
    ratio = {column: rows[0][column] / rows[1][column] for column in list(rows[0])[1:]}
    return {"compile": {"means": [ratio], "rows": rows}}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    main(measure)
