"""Which operations of a transformer give other bits on another mesh, and the same model without them.

`jaxmp.audit` runs a function equation by equation on one, two and four devices, each time from equal bits, and names
the equations with different results. In a block of attention and an MLP with sharded tokens and heads, these are
products, and the sums of the loss and of the softmax. So the model is written a second time with what `audit` advises:

    products  jaxmp.linear(..., determinism="topology"), and of heads jaxmp.einsum(..., determinism="batch")
    sums      a product with ones; its gradient is one too
    the loss  on whole logits, which every device has
    on CPUs   without XLA's fusions into YNNPACK's kernels, which it chooses by the shapes of a device

Now no operation differs, and logits and gradients have the same bits on one, two and four devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

TOKENS, WIDTH, HEADS, HIDDEN, VOCABULARY = 32, 72, 4, 160, 40
ROWS, COLUMNS = P("x", None), P(None, "x")
# Weights (in, out) into what the heads or the hidden columns share, and out of it.
WEIGHTS = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
SPECS = {"qkv": COLUMNS, "out": ROWS, "up": COLUMNS, "down": ROWS, "head": P(None, None)}


# The shapes of a device decide whether XLA uses these kernels, which have another exp.
NO_YNNPACK = {"xla_cpu_experimental_ynn_fusion_type": ""}


class Plain:
    """The operations that the model is made of, as JAX has them."""

    @staticmethod
    def linear(x, w, spec):
        return jnp.matmul(x, w, out_sharding=spec)

    @staticmethod
    def total(x):
        return jnp.sum(x, axis=-1, keepdims=True)

    einsum = staticmethod(jnp.einsum)


class Fixed(Plain):
    """The same operations, each summed in one order."""

    @staticmethod
    def linear(x, w, spec):
        return jaxmp.linear(x, w, out_sharding=spec, determinism="topology")

    @staticmethod
    def total(x):
        """In each column, so that its gradient has no sum either."""
        return jaxmp.matmul(x, jnp.ones((x.shape[-1], x.shape[-1]), x.dtype), determinism="topology")

    einsum = staticmethod(functools.partial(jaxmp.einsum, determinism="batch"))


def logits_of(ops, params, x):
    """Logits (tokens, vocabulary) of embedded tokens (tokens, width)."""

    def normalized(x):
        return x * jax.lax.rsqrt(ops.total(x * x) / WIDTH + 1e-6)

    def attention(qkv):
        heads = jnp.reshape(qkv, (TOKENS, HEADS, 3 * WIDTH // HEADS), out_sharding=P(None, "x", None))
        q, k, v = jnp.split(heads, 3, axis=-1)
        scores = ops.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(WIDTH / HEADS))
        scores = jnp.where(np.tri(TOKENS, dtype=bool), scores, -np.inf)
        weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
        mixed = ops.einsum("hqk,khd->qhd", weights / ops.total(weights), v)
        return jnp.reshape(mixed, (TOKENS, WIDTH), out_sharding=COLUMNS)

    qkv = ops.linear(normalized(x), params["qkv"], COLUMNS)
    x = x + ops.linear(attention(qkv), params["out"], ROWS)
    hidden = jax.nn.relu(ops.linear(normalized(x), params["up"], COLUMNS))
    x = x + ops.linear(hidden, params["down"], ROWS)
    return ops.linear(normalized(x), params["head"], ROWS)


def loss_of(ops, params, x, labels):
    logits = logits_of(ops, params, x)
    if ops is Fixed:
        logits = jax.sharding.reshard(logits, P(None, None))
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, axis=-1)), logits


def step(ops, params, x, labels):
    """((loss, logits), gradients)."""
    return jax.value_and_grad(functools.partial(loss_of, ops), has_aux=True)(params, x, labels)


def place(params, x, labels):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    params = {name: jax.device_put(w, NamedSharding(mesh, SPECS[name])) for name, w in params.items()}
    return mesh, (
        params,
        jax.device_put(x, NamedSharding(mesh, ROWS)),
        jax.device_put(labels, NamedSharding(mesh, P())),
    )


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    rng = np.random.default_rng(0)
    shapes = WEIGHTS | {"head": (WIDTH, VOCABULARY)}
    params = {name: (rng.normal(size=s) / np.sqrt(s[0])).astype(np.float32) for name, s in shapes.items()}
    x = rng.normal(size=(TOKENS, WIDTH)).astype(np.float32)
    labels = np.eye(VOCABULARY, dtype=np.float32)[rng.integers(VOCABULARY, size=TOKENS)]

    mesh, placed = place(params, x, labels)
    with jax.set_mesh(mesh):
        print("== plain JAX, forward")
        found = jaxmp.audit(functools.partial(loss_of, Plain), vary="mesh")(*placed)
        assert {"product", "sum"} <= {row.kind for row in found.rows}
        assert "[1]" in {output.name for output in found.outputs}  # the logits
        print("== sums as products with ones, forward and backward")
        audit = functools.partial(jaxmp.audit, vary="mesh", compiler_options=NO_YNNPACK)
        found = audit(functools.partial(step, Fixed))(*placed)
        assert not found.rows
        assert not found.uncompared
        assert not found.outputs  # of the whole program, compiled in one piece for each mesh
    print("the loss, the logits and all gradients have the same bits on 1, 2 and 4 devices")


if __name__ == "__main__":
    main()

# Launch: python examples/11_audit.py
