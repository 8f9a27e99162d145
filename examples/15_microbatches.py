"""Accumulate gradients over four microbatches on a 2x2 mesh, and sum them over `data` once instead of four times.

A weight that is tagged `reduced` over `data` is whole on each rank of `data`, and its gradient is `unreduced`: each
rank keeps its term of the sum. A loop adds the terms, and one `reshard` after the loop sums them over the ranks:

    untagged    4 microbatches x all-reduce of every gradient over data
    tagged      all-reduce of every gradient over data, once

The step is the same for `jax.numpy` and for jaxmp. Tags belong to explicit axes. On automatic axes the step runs inside
`jax.sharding.explicit_axes`, or in a `shard_map` that sums after its loop. `assert_no_collectives` tests each step for
sums inside the loop, and all of them compute the same gradients.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import jaxmp

WIDTH, HIDDEN, TOKENS, MICROBATCHES = 64, 256, 32, 4
SPECS = {"up": P(None, "model"), "down": P("model", None)}
ROWS, BATCHES = P("data", None), P(None, "data", None)
BETWEEN_LAYERS = [("all-reduce", "model")]  # the second layer sums over model in each microbatch


def layers(module, w, x, out):
    return module.matmul(jax.nn.relu(module.matmul(x, w["up"])), w["down"], **out)


def loss(module, w, x, out):
    return jnp.square(layers(module, w, x, out) - x).mean() / MICROBATCHES


def accumulated(loss, w, batches, zeros):
    """Returns the gradients of all microbatches together."""

    def microbatch(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(w, x)), None

    return lax.scan(microbatch, zeros, batches)[0]


def untagged(module, w, batches, out):
    return accumulated(functools.partial(loss, module, out=out), w, batches, jax.tree.map(jnp.zeros_like, w))


def tagged(module, w, batches):
    def zeros(x, spec):
        return jnp.zeros(x.shape, x.dtype, out_sharding=spec.update(unreduced={"data"}))

    of_rows = functools.partial(loss, module, out={"out_sharding": ROWS})
    weights = {name: reshard(x, SPECS[name].update(reduced={"data"})) for name, x in w.items()}
    totals = {name: zeros(x, SPECS[name]) for name, x in w.items()}
    terms = accumulated(of_rows, weights, batches, totals)
    return {name: reshard(x, SPECS[name]) for name, x in terms.items()}  # the one sum over data


def tagged_inside(module, w, batches):
    """Makes the automatic axes explicit for the step."""
    return jax.sharding.explicit_axes(functools.partial(tagged, module), in_sharding=(SPECS, BATCHES))(w, batches)


def in_shard_map(w, batches):
    """Adds each rank's own gradients in a shard_map, and sums them after the loop."""

    def loss(w, x):
        hidden = jax.nn.relu(jaxmp.matmul(x, w["up"]))
        y = jaxmp.matmul_all_reduce(hidden, w["down"], "model")
        return jnp.square(y - x).mean() / (MICROBATCHES * lax.axis_size("data"))

    @functools.partial(jax.shard_map, in_specs=(SPECS, BATCHES), out_specs=SPECS)
    def step(w, batches):
        own = jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), w)
        return lax.psum(accumulated(loss, own, batches, jax.tree.map(jnp.zeros_like, own)), "data")

    return step(w, batches)


def bytes_over_data(step, *arguments):
    moved = jaxmp.explain(step, compiled=True, quiet=True)(*arguments).bytes_by(lambda row: row.axes)
    return sum(nbytes for axes, nbytes in moved.items() if "data" in axes)


def steps(axes):
    """Returns the steps on explicit or automatic axes, by name; in each pair the second one sums once."""
    out = {"out_sharding": ROWS} if axes == AxisType.Explicit else {}
    once = tagged if axes == AxisType.Explicit else tagged_inside
    found = {}
    for module in (jnp, jaxmp):
        found[module.__name__] = functools.partial(untagged, module, out=out), functools.partial(once, module)
    if axes == AxisType.Auto:
        found["jaxmp in shard_map"] = found["jaxmp"][0], in_shard_map
    return found


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    values = {name: rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[0]) for name, shape in shapes.items()}
    batches = rng.normal(size=(MICROBATCHES, TOKENS, WIDTH)).astype(np.float32)
    of_one_device = jax.grad(lambda w: sum(loss(jnp, w, x, {}) for x in batches))(values)
    print("over data, in bytes that each device receives:")
    for axes in (AxisType.Explicit, AxisType.Auto):
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axes,) * 2)
        with jax.set_mesh(mesh):
            w = {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in values.items()}
            arguments = w, jax.device_put(batches, NamedSharding(mesh, BATCHES))
            for name, (often, once) in steps(axes).items():
                for step in (often, once):
                    gradients = jax.jit(step)(*arguments)
                    for key, expected in of_one_device.items():
                        np.testing.assert_allclose(gradients[key], expected, rtol=1e-4, atol=1e-6)
                jaxmp.assert_no_collectives(once, inside="loop", allowed=BETWEEN_LAYERS)(*arguments)
                before, after = (bytes_over_data(step, *arguments) for step in (often, once))
                print(f"  {axes.name:9}{name:19}{before:9,} to {after:,}")
                assert before >= MICROBATCHES * after or name.startswith("jaxmp")  # its calls read less than a gradient


if __name__ == "__main__":
    main()

# Launch: python examples/15_microbatches.py
