"""Train an MLP on handwritten digits, data- and tensor-parallel on a 2x2 mesh of CPU devices.

Between the blocks activations are sharded over rows, inside them over rows and columns. So every layer is one call:
its product, the communication, the bias and the activation.

    layer 0, 2   x (data+model, :)   @  w (:, model)  ->  (data, model)     gathers rows of x
    layer 1, 3   x (data, model)     @  w (model, :)  ->  (data+model, :)   scatters the sum over rows

The reference is the same training on one device in plain jax.numpy: both loss curves have to agree.
"""

import functools
import itertools
import sys
import time

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

WIDTHS = (64, 256, 128, 256, 10)
ACTIVATIONS = ("gelu", "relu", "gelu", None)
BATCH, EPOCHS, LEARNING_RATE = 128, 25, 2e-3

ROWS = P(("data", "model"), None)
TILES = P("data", "model")
# (weight, bias, result) of layers that gather and of layers that scatter.
LAYOUTS = [(P(None, "model"), P("model"), TILES), (P("model", None), P(None), ROWS)] * 2


def sharded_layer(i, x, w, b):
    return jaxmp.linear(x, w, b, activation=ACTIVATIONS[i], out_sharding=LAYOUTS[i][2])


def one_device_layer(i, x, w, b):
    z = x @ w + b
    return {"gelu": jax.nn.gelu, "relu": jax.nn.relu, None: lambda z: z}[ACTIVATIONS[i]](z)


def loss_of(layer, params, x, labels):
    for i, (w, b) in enumerate(params):
        x = layer(i, x, w, b)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(x) * labels, axis=-1)), x


def initial_params():
    rng = np.random.default_rng(0)
    scaled = [(rng.normal(size=pair) * np.sqrt(2 / pair[0]), np.zeros(pair[1])) for pair in itertools.pairwise(WIDTHS)]
    return [(w.astype(np.float32), b.astype(np.float32)) for w, b in scaled]


def load_data():
    images, digits = load_digits(return_X_y=True)
    labels = np.eye(10, dtype=np.float32)[digits]
    return train_test_split((images / 16).astype(np.float32), labels, test_size=360, random_state=0)


def train(layer, place_params, place_rows, data, name):
    """Return the loss of every step, the plan cache's misses in the first and after it, and the test accuracy."""
    x_train, x_test, y_train, y_test = data
    optimizer = optax.adam(LEARNING_RATE)
    params = place_params(initial_params())
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x, labels):
        objective = functools.partial(loss_of, layer)
        (loss, _), grads = jax.value_and_grad(objective, has_aux=True)(params, x, labels)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    rng, losses, misses = np.random.default_rng(1), [], [jaxmp.plan_cache_info()["misses"]]
    steps = len(x_train) // BATCH
    for _ in tqdm(range(EPOCHS), desc=name, unit="epoch", file=sys.stdout):
        order = rng.permutation(len(x_train))[: steps * BATCH].reshape(steps, BATCH)
        for rows in order:
            params, state, loss = step(params, state, place_rows(x_train[rows]), place_rows(y_train[rows]))
            # Wait for each step: XLA's own CPU collectives can block when many steps are in flight on few cores.
            losses.append(float(loss))
            misses.append(jaxmp.plan_cache_info()["misses"])
    _, logits = jax.jit(functools.partial(loss_of, layer))(params, place_rows(x_test), place_rows(y_test))
    accuracy = np.mean(np.argmax(np.asarray(logits), axis=-1) == np.argmax(y_test, axis=-1))
    return np.array(losses), (misses[1] - misses[0], misses[-1] - misses[1]), accuracy


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    started = time.perf_counter()
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    data = load_data()

    def place_params(params):
        layouts = [(NamedSharding(mesh, w), NamedSharding(mesh, b)) for w, b, _ in LAYOUTS]
        return jax.device_put(params, layouts)

    def place_rows(x):
        return jax.device_put(x, NamedSharding(mesh, ROWS))

    with jax.set_mesh(mesh):
        losses, (first_misses, late_misses), accuracy = train(
            sharded_layer, place_params, place_rows, data, "2x2 mesh "
        )
    print(f"trained in {time.perf_counter() - started:.1f} s; plan cache {jaxmp.plan_cache_info()}")
    expected, _, _ = train(one_device_layer, jax.device_put, jnp.asarray, data, "one device")

    difference = np.max(np.abs(losses - expected))
    print(f"test accuracy {accuracy:.1%}")
    print(f"plan cache misses after the first step: {late_misses}")
    print(f"largest difference of the loss curves: {difference:.1e} (losses {expected[0]:.2f} to {expected[-1]:.1e})")
    assert accuracy > 0.95
    assert first_misses > 0  # the products ran through plans
    assert late_misses == 0
    assert difference < 1e-3


if __name__ == "__main__":
    main()

# Launch: python examples/01_digits_mlp.py
