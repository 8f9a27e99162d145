"""Train an MLP in fp8 with delayed scaling, data- and tensor-parallel on a 2x2 mesh of CPU devices.

    h = relu(x @ w1.T + b1)      x (data, :)     w1 (model, :)    h (data, model)     e4m3, made in fp8 by the call
    y = h @ w2.T                 h (data, model) w2 (:, model)    y (data, :)         summed over model

Forward operands are e4m3, gradients e5m2. A scale follows from the largest values of the last steps, because this
step's largest value is known only after the product. The calls with an fp8 result return it (`result_amax`), over all
devices. fp8 products contract along rows only, so the backward pass transposes its operands.

The reference is the same training in bfloat16: both must reach the same loss and accuracy.
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
from jaxmp import Epilog, Scaling, quantize

INPUTS, HIDDEN, CLASSES = 64, 256, 16  # ten digits, padded to a multiple of 16 for fp8
BATCH, EPOCHS, LEARNING_RATE, HISTORY = 128, 12, 2e-3, 8
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2

ROWS, TILES = P("data", None), P("data", "model")
LAYOUTS = {"w1": P("model", None), "b1": P("model"), "w2": P(None, "model")}
# The scaled tensors and their fp8 types. The last two are gradients: of y, and of h.
TYPES = {"x": E4M3, "w1": E4M3, "w2": E4M3, "h": E4M3, "dy": E5M2, "dh": E5M2}

product = functools.partial(jaxmp.matmul, transpose_b=True)


def relu_layer(x, w, b, out_sharding, **options):
    inputs = {"epilog": Epilog.RELU_BIAS, "epilog_inputs": {"bias": b}}
    return product(x, w, out_sharding=out_sharding, **inputs, **options)


def mlp_bf16(params, x):
    x, w1, w2, b1 = (v.astype(jnp.bfloat16) for v in (x, params["w1"], params["w2"], params["b1"]))
    h = relu_layer(x, w1, b1, TILES)
    return product(h, w2, out_sharding=ROWS, preferred_element_type=jnp.float32)


@jax.custom_vjp
def mlp_fp8(params, x, scales, probe):
    """(y, the largest absolute values of this step's forward tensors).

    `probe` does not affect the result: its cotangent returns the largest values of the gradients.
    """
    return forward(params, x, scales, probe)[0]


def forward(params, x, scales, probe):
    del probe
    q = {name: quantize.encode(v / scales[name]) for name, v in (("x", x), ("w1", params["w1"]), ("w2", params["w2"]))}
    q["h"], more = relu_layer(
        q["x"],
        q["w1"],
        params["b1"].astype(jnp.float16),
        TILES,
        scaling=Scaling(a=scales["x"], b=scales["w1"], d=1 / scales["h"], result_amax=True),
        preferred_element_type=E4M3,
    )
    both = Scaling(a=scales["h"], b=scales["w2"])
    y = product(q["h"], q["w2"], scaling=both, out_sharding=ROWS, preferred_element_type=jnp.float32)
    seen = {name: quantize.amax(v) for name, v in (("x", x), ("w1", params["w1"]), ("w2", params["w2"]))}
    return (y, seen | {"h": more["result_amax"]}), (q, scales)


def backward(kept, cotangents):
    (q, scales), (dy, _) = kept, cotangents
    dy8 = quantize.encode(dy / scales["dy"], E5M2)
    dh8, more = product(
        dy8,
        q["w2"].T,
        scaling=Scaling(a=scales["dy"], b=scales["w2"], d=1 / scales["dh"], result_amax=True),
        out_sharding=TILES,
        preferred_element_type=E5M2,
    )
    dz8 = jnp.where(q["h"].astype(jnp.float32) > 0, dh8, jnp.zeros_like(dh8))
    weights = functools.partial(product, preferred_element_type=jnp.float32)
    gradients = {
        "w1": weights(dz8.T, q["x"].T, scaling=Scaling(a=scales["dh"], b=scales["x"]), out_sharding=LAYOUTS["w1"]),
        "b1": jnp.sum(dz8.astype(jnp.float32), axis=0) * scales["dh"],
        "w2": weights(dy8.T, q["h"].T, scaling=Scaling(a=scales["dy"], b=scales["h"]), out_sharding=LAYOUTS["w2"]),
    }
    no_scales = jax.tree.map(jnp.zeros_like, scales)
    return (
        gradients,
        jnp.zeros_like(q["x"], jnp.float32),
        no_scales,
        {"dy": quantize.amax(dy), "dh": more["result_amax"]},
    )


mlp_fp8.defvjp(forward, backward)


def cross_entropy(y, labels):
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(y[:, :10]) * labels, axis=-1))


def loss_bf16(params, x, labels, history):
    return jax.value_and_grad(lambda p: cross_entropy(mlp_bf16(p, x), labels))(params), history


def loss_fp8(params, x, labels, history):
    """((loss, gradients), history with this step's largest values)."""
    scales = {name: quantize.delayed_scale(history[name], dtype) for name, dtype in TYPES.items()}

    def objective(params, probe):
        y, seen = mlp_fp8(params, x, scales, probe)
        return cross_entropy(y, labels), seen

    probe = {name: jnp.zeros(()) for name in ("dy", "dh")}
    (loss, seen), (gradients, more) = jax.value_and_grad(objective, (0, 1), has_aux=True)(params, probe)
    return (loss, gradients), {name: quantize.update_history(history[name], v) for name, v in (seen | more).items()}


def train(loss_and_gradients, data, mesh, name):
    """(loss of every step, test accuracy, scales of some steps)."""
    x_train, x_test, y_train, y_test = data
    rng = np.random.default_rng(0)
    params = {
        "w1": rng.normal(size=(HIDDEN, INPUTS)) * np.sqrt(2 / INPUTS),
        "b1": np.zeros(HIDDEN),
        "w2": rng.normal(size=(CLASSES, HIDDEN)) * np.sqrt(1 / HIDDEN),
    }
    layouts = {key: NamedSharding(mesh, spec) for key, spec in LAYOUTS.items()}
    params = {key: jax.device_put(v.astype(np.float32), layouts[key]) for key, v in params.items()}
    optimizer = optax.adam(LEARNING_RATE)
    state, history = optimizer.init(params), {key: jnp.zeros(HISTORY) for key in TYPES}
    place = functools.partial(jax.device_put, device=NamedSharding(mesh, ROWS))

    @jax.jit
    def step(params, state, history, x, labels):
        (loss, gradients), history = loss_and_gradients(params, x, labels, history)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, history, loss

    losses, scales = [], {}
    steps = len(x_train) // BATCH
    for _ in tqdm(range(EPOCHS), desc=name, unit="epoch", file=sys.stdout):
        for rows in rng.permutation(len(x_train))[: steps * BATCH].reshape(steps, BATCH):
            params, state, history, loss = step(params, state, history, place(x_train[rows]), place(y_train[rows]))
            losses.append(float(loss))
            if len(losses) in (1, 10, steps * EPOCHS):
                scales[len(losses)] = {k: float(quantize.delayed_scale(history[k], t)) for k, t in TYPES.items()}
    y = mlp_bf16(params, place(x_test))
    accuracy = np.mean(np.argmax(np.asarray(y)[:, :10], axis=-1) == np.argmax(y_test, axis=-1))
    return np.array(losses), accuracy, scales


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    images, digits = load_digits(return_X_y=True)
    labels = np.eye(10, dtype=np.float32)[digits]
    data = train_test_split((images / 16).astype(np.float32), labels, test_size=360, random_state=0)
    with jax.set_mesh(mesh):
        losses, accuracy, scales = train(loss_fp8, data, mesh, "fp8 ")
        expected, expected_accuracy, _ = train(loss_bf16, data, mesh, "bf16")

    print(
        "scales after step "
        + "; ".join(f"{n}: " + ", ".join(f"{k} {v:.1e}" for k, v in s.items()) for n, s in scales.items())
    )
    print(
        f"loss  fp8 {losses[0]:.3f} to {losses[-20:].mean():.3f}, bf16 {expected[0]:.3f} to {expected[-20:].mean():.3f}"
    )
    print(f"test accuracy  fp8 {accuracy:.1%}, bf16 {expected_accuracy:.1%}")
    # The first losses differ by fp8's rounding (2^-4 per element); the results are equally good.
    assert abs(losses[0] - expected[0]) < 0.05
    assert losses[-20:].mean() < 1.2 * expected[-20:].mean() + 0.02
    assert accuracy > 0.93
    assert accuracy > expected_accuracy - 0.02


if __name__ == "__main__":
    main()

# Launch: python examples/05_fp8_linear.py
