"""Train a gated MLP on handwritten digits, data- and tensor-parallel on a 2x2 mesh of CPU devices.

    h = silu(x @ w_gate + b_gate) * (x @ w_up + b_up)        y = h @ w_down + b_down

The columns of w_gate and w_up, and with them the rows of w_down, are sharded over the axis `model`; rows of x over
`data`. `jaxmp.gated_mlp` multiplies one x by both weights, sums y over `model` inside of its last call, and in the
gradient sums the cotangents of x over `model` once. `jaxmp.explain` prints every call and collective.

The reference is the same training on one device in plain jax.numpy: both loss curves have to agree.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jaxmp

PIXELS, WIDTH, HIDDEN, DIGITS = 64, 64, 192, 10
BATCH, EPOCHS, LEARNING_RATE = 128, 12, 2e-3

ROWS = P("data", None)
# The first layer is whole on every device; w_gate, w_up, w_down, b_gate, b_up, b_down; the last layer is whole again.
GATED = (P(None, "model"), P(None, "model"), P("model", None), P("model"), P("model"), P(None))


def sharded_block(x, *weights):
    return jaxmp.gated_mlp(x, *weights, activation="silu", out_sharding=ROWS)


def one_device_block(x, w_gate, w_up, w_down, b_gate, b_up, b_down):
    return (jax.nn.silu(x @ w_gate + b_gate) * (x @ w_up + b_up)) @ w_down + b_down


def loss_of(block, params, x, labels):
    first, gated, last = params
    x = x @ first
    logits = (x + block(x, *gated)) @ last
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, axis=-1)), logits


def initial_params():
    rng = np.random.default_rng(0)

    def weight(rows, columns):
        return (rng.normal(size=(rows, columns)) / np.sqrt(rows)).astype(np.float32)

    gated = [weight(WIDTH, HIDDEN), weight(WIDTH, HIDDEN), weight(HIDDEN, WIDTH)]
    biases = [np.zeros(size, np.float32) for size in (HIDDEN, HIDDEN, WIDTH)]
    return weight(PIXELS, WIDTH), (*gated, *biases), weight(WIDTH, DIGITS)


def load_data():
    images, digits = load_digits(return_X_y=True)
    labels = np.eye(DIGITS, dtype=np.float32)[digits]
    return train_test_split((images / 16).astype(np.float32), labels, test_size=360, random_state=0)


def train(block, place_params, place_rows, data, name):
    """Return the loss of every step and the test accuracy."""
    x_train, x_test, y_train, y_test = data
    optimizer = optax.adam(LEARNING_RATE)
    params = place_params(initial_params())
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x, labels):
        objective = functools.partial(loss_of, block)
        (loss, _), grads = jax.value_and_grad(objective, has_aux=True)(params, x, labels)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    rng, losses = np.random.default_rng(1), []
    steps = len(x_train) // BATCH
    for _ in tqdm(range(EPOCHS), desc=name, unit="epoch", file=sys.stdout):
        for rows in rng.permutation(len(x_train))[: steps * BATCH].reshape(steps, BATCH):
            params, state, loss = step(params, state, place_rows(x_train[rows]), place_rows(y_train[rows]))
            # Wait for each step: XLA's own CPU collectives can block when many steps are in flight on few cores.
            losses.append(float(loss))
    _, logits = jax.jit(functools.partial(loss_of, block))(params, place_rows(x_test), place_rows(y_test))
    accuracy = np.mean(np.argmax(np.asarray(logits), axis=-1) == np.argmax(y_test, axis=-1))
    return np.array(losses), accuracy


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    data = load_data()
    place_rows = functools.partial(jax.device_put, device=NamedSharding(mesh, ROWS))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (P(), GATED, P()))
    place_params = functools.partial(jax.device_put, device=shardings)

    with jax.set_mesh(mesh):
        losses, accuracy = train(sharded_block, place_params, place_rows, data, "2x2 mesh  ")
        x = place_rows(np.ones((BATCH, WIDTH), np.float32))
        gradient = jax.grad(lambda x, *weights: sharded_block(x, *weights).sum(), range(7))
        explanation = jaxmp.explain(gradient)(x, *place_params(initial_params())[1])
    expected, _ = train(one_device_block, jax.device_put, jnp.asarray, data, "one device")

    difference = np.max(np.abs(losses - expected))
    beside = [row.operation for row in explanation.rows if not row.operation.startswith("matmul")]
    print(f"test accuracy {accuracy:.1%}")
    print(f"other collectives of a gradient: {', '.join(beside)}")
    print(f"largest difference of the loss curves: {difference:.1e} (losses {expected[0]:.2f} to {expected[-1]:.1e})")
    assert accuracy > 0.95
    assert beside == ["all_reduce"]  # the cotangents of x
    assert difference < 1e-3


if __name__ == "__main__":
    main()

# Launch: python examples/10_gated_mlp.py
