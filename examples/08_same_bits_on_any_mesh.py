"""The same training, bit for bit, on one, two, four and eight devices.

The rounding of a sum over devices depends on their number. So loss curves drift apart, and runs on machines of
different sizes cannot be compared. With determinism="topology" a product and its gradients have the bits of one device
on any mesh. The operations between the products of this model do not depend on the mesh either: relu only selects, the
loss is computed from whole logits on every device, and the learning rate is a power of two.

At the end it prints which kernels ran: every call is a named range in JAX's profiles.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

# XLA adds the devices' partial sums. jaxmp's own kernels may keep bits without the level, but do not promise it.
OPTIONS = {"XLA": {"implementation": "xla"}, "topology": {"determinism": "topology"}}
ROWS, FEATURES, HIDDEN, CLASSES, STEPS, RATE = 2048, 640, 96, 10, 25, 2.0
# Weights of a layer that gathers rows, of one that scatters them, and of a local one.
WEIGHTS = (P(None, "x"), P("x", None), P(None, None))


def logits_of(params, x, name):
    up, down, out = params
    linear = functools.partial(jaxmp.linear, **OPTIONS[name])
    x = linear(x, up, activation="relu", out_sharding=P(None, "x"))
    x = linear(x, down, activation="relu", out_sharding=P("x", None))
    return linear(x, out, out_sharding=P("x", None))


def loss_of(params, x, labels, name):
    logits = jax.sharding.reshard(logits_of(params, x, name), P(None, None))
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, axis=-1))


@functools.partial(jax.jit, static_argnames="name")
def step(params, x, labels, name):
    loss, grads = jax.value_and_grad(loss_of)(params, x, labels, name)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


def make_mesh(ndevices):
    return jax.make_mesh((ndevices,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:ndevices])


def place(mesh, params, x, labels):
    params = [jax.device_put(w, NamedSharding(mesh, spec)) for w, spec in zip(params, WEIGHTS, strict=True)]
    return (
        params,
        jax.device_put(x, NamedSharding(mesh, P("x", None))),
        jax.device_put(labels, NamedSharding(mesh, P())),
    )


def train(ndevices, name, params, x, labels):
    """The loss of every step, and the weights at the end."""
    mesh = make_mesh(ndevices)
    with jax.set_mesh(mesh):
        params, x, labels = place(mesh, params, x, labels)
        losses = []
        for _ in range(STEPS):
            params, loss = step(params, x, labels, name)
            losses.append(np.asarray(loss))  # waits: XLA's own collectives can block with many steps in flight
    return np.stack(losses), [np.asarray(w) for w in params]


def print_kernels(ndevices, name, *arrays):
    mesh = make_mesh(ndevices)
    with jax.set_mesh(mesh):
        placed = place(mesh, *arrays)
        profile = jaxmp.profile(functools.partial(step, name=name), quiet=True)(*placed)
    print(f'One step with "{name}" on {ndevices} devices:')
    print(profile)
    assert len(profile.calls) > len(WEIGHTS)


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    rng = np.random.default_rng(0)
    widths = (FEATURES, HIDDEN, FEATURES, CLASSES)
    params = [(rng.normal(size=(k, n)) / np.sqrt(k)).astype(np.float32) for k, n in itertools.pairwise(widths)]
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    labels = np.eye(CLASSES, dtype=np.float32)[np.argmax(x @ rng.normal(size=(FEATURES, CLASSES)), axis=-1)]

    for name in OPTIONS:
        are_same = []
        losses, weights = train(1, name, params, x, labels)
        print(f'"{name}": loss {losses[0]:.4f} to {losses[-1]:.4f} on 1 device')
        for ndevices in (2, 4, 8):
            other, other_weights = train(ndevices, name, params, x, labels)
            same = sum(a.tobytes() == b.tobytes() for a, b in zip(losses, other, strict=True))
            is_same = all(a.tobytes() == b.tobytes() for a, b in zip(weights, other_weights, strict=True))
            weights_too = "and so do the weights" if is_same else "but the weights do not"
            print(f"  {ndevices} devices: {same:2} of {STEPS} losses keep their bits, {weights_too}")
            are_same.append(same == STEPS and is_same)
        # With XLA some mesh must change bits, or this test would prove nothing.
        assert all(are_same) == (name == "topology")
    assert losses[-1] < losses[0] / 2
    print_kernels(4, "topology", params, x, labels)


if __name__ == "__main__":
    main()

# Launch: python examples/08_same_bits_on_any_mesh.py
