"""The place of a client's training: no mesh, an automatic or explicit mesh, or data-parallel `shard_map`."""

import contextlib
import dataclasses

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

DEVICES = 4
PLACES = ("none", "automatic", "explicit", "shard_map")
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Run:
    """A client's run at a place, fused or plain."""

    place: str
    is_fused: bool

    def fuse(self, fn):
        """Returns `fn`, or `fn` fused; without a mesh at a level, because otherwise nothing becomes a call."""
        level = "batch" if self.place == "none" else "run_to_run"
        return jaxmp.fuse(fn, determinism=level) if self.is_fused else fn

    @property
    def mesh(self):
        """Rows of batches are over `data`; on automatic axes, features of weights are over `model`."""
        sizes = (2, 2) if self.place == "automatic" else (DEVICES, 1)
        kind = AxisType.Explicit if self.place == "explicit" else AxisType.Auto
        return jax.make_mesh(sizes, ("data", "model"), axis_types=(kind, kind), devices=jax.devices()[:DEVICES])

    def scope(self):
        return jax.set_mesh(self.mesh) if self.place in PLACES[1:] else contextlib.nullcontext()

    def put(self, x, spec):
        return x if self.place == "none" else jax.device_put(x, NamedSharding(self.mesh, spec))

    def params(self, tree):
        """Puts a model's arrays on the mesh: tensor-parallel on automatic axes, otherwise whole on each device."""

        def place(x):
            if not isinstance(x, jax.Array | np.ndarray):
                return x
            is_split = self.place == "automatic" and x.ndim == 2 and x.shape[1] % 2 == 0
            return self.put(x, P(None, "model") if is_split else P())

        return jax.tree.map(place, tree)

    def batch(self, *arrays):
        """Returns arrays with their rows over `data`."""
        return tuple(self.put(x, P("data")) for x in arrays)

    def step(self, loss, optimizer):
        """Returns a training step in plain JAX: (parameters, state, *batch) to (parameters, state, loss)."""

        def step(params, state, *batch):
            mean = (lambda x: jax.lax.pmean(x, "data")) if self.place == "shard_map" else (lambda x: x)
            value, gradients = jax.value_and_grad(lambda params: mean(loss(params, *batch)))(params)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        if self.place != "shard_map":
            return step

        def mapped(params, state, *batch):
            specs = (P(), P(), *[P("data")] * len(batch))
            return jax.shard_map(step, mesh=self.mesh, in_specs=specs, out_specs=(P(), P(), P()))(params, state, *batch)

        return mapped

    def train(self, loss, params, batch, optimizer=None):
        """Yields each step of a training in plain JAX: its loss and the parameters."""
        optimizer = optimizer or optax.sgd(0.1, momentum=0.9)  # adam amplifies rounding errors if a gradient is 0
        params, batch = self.params(params), self.batch(*batch)
        state = jax.jit(optimizer.init)(params)
        state = jax.tree.map(lambda x: self.put(x, P()) if x.ndim == 0 else x, state)
        step = jax.jit(self.fuse(self.step(loss, optimizer)))
        while True:
            params, state, value = step(params, state, *batch)
            yield value, params


def randoms(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tokens(*shape, vocabulary=32, seed=0):
    return np.random.default_rng(seed).integers(vocabulary, size=shape, dtype=np.int32)
