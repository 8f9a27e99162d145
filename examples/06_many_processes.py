"""Many processes: the training step of two dense layers, with operands sharded over four processes under mpiexec.

`initialize()` reads the ranks from the launcher. The rest of the program is the same as on four devices of one process,
and so are its gradients. If a process dies or runs another program, the others get an error that names it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

ROWS, WIDTH, HIDDEN, STEPS, RATE = 64, 48, 96, 20, 2.0


def loss_of(weights, x, target):
    up, down = weights
    h = jaxmp.linear(x, up, activation="gelu", out_sharding=P(None, "x"))  # gathers x's rows
    y = jaxmp.matmul(h, down, out_sharding=P("x", None))  # scatters the sum over rows
    return jnp.mean((y - target) ** 2)


def one_device_loss(weights, x, target):
    up, down = weights
    return jnp.mean((jax.nn.gelu(x @ up) @ down - target) ** 2)


def train(loss, weights, x, target):
    @jax.jit
    def step(weights, x, target):
        value, gradients = jax.value_and_grad(loss)(weights, x, target)
        return value, jax.tree.map(lambda w, g: w - RATE * g, weights, gradients)

    losses = []
    for _ in range(STEPS):
        value, weights = step(weights, x, target)
        losses.append(float(value))
    return losses


def main():
    jaxmp.distributed.initialize()
    ndevices = jax.device_count()
    rng = np.random.default_rng(0)  # the same in every process
    shapes = ((ROWS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (ROWS, WIDTH))
    x, up, down, target = ((rng.normal(size=s) / np.sqrt(s[0])).astype(np.float32) for s in shapes)
    with jax.default_device(jax.local_devices()[0]):
        wanted = train(one_device_loss, (jnp.asarray(up), jnp.asarray(down)), x, target)

    mesh = jax.make_mesh((ndevices,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows, cols = (NamedSharding(mesh, spec) for spec in (P("x", None), P(None, "x")))
        weights = (jax.device_put(up, cols), jax.device_put(down, rows))
        x, target = jax.device_put(x, rows), jax.device_put(target, rows)
        if jax.process_index() == 0:
            jaxmp.explain(jax.grad(loss_of))(weights, x, target)
        got = train(loss_of, weights, x, target)
    error = np.max(np.abs(np.array(got) / np.array(wanted) - 1))
    print(
        f"process {jax.process_index()} of {jax.process_count()}, {ndevices} devices: "
        f"loss {got[0]:.4f} -> {got[-1]:.4f}, relative difference to one device {error:.1e}",
        flush=True,
    )
    assert error < 1e-4
    assert got[-1] < got[0]


if __name__ == "__main__":
    main()

# Launch: mpiexec -n 4 python examples/06_many_processes.py
