"""Collectives of XLA's inside and after loops and branches with calls. Run by `ranks.py order`. One device comes late
to each call of a body, so that the others' calls would be pending. XLA starts a collective after a loop or branch once
all calls in it have returned: a pending call lets both collectives meet on the other ranks. Results after the body are
results of the program too, so that no memory of the body's makes them wait."""

import itertools
import time

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp

SIZE, BEHIND, LATE = 128, 20, 0.05


def main(initialize, process):
    initialize()
    ran = 0
    shape = jax.process_count(), jax.local_device_count()
    mesh = jax.make_mesh(shape, ("data", "x"), axis_types=(AxisType.Auto,) * 2)
    for axis, body in itertools.product(mesh.axis_names, (loop, branch)):
        if mesh.shape[axis] > 1:
            ours, plain = program(mesh, axis, body, jaxmp.all_gather_matmul), program(mesh, axis, body, gathered)
            rng = np.random.default_rng(ran)
            h, y = (rng.integers(-2, 3, (SIZE, SIZE)).astype(np.float32) for _ in range(2))
            w = rng.integers(-1, 2, (SIZE, SIZE)).astype(np.float32)
            for _ in range(2):
                for got, want in zip(ours(h, y, w), plain(h, y, w), strict=True):
                    for one, other in zip(got.addressable_shards, want.addressable_shards, strict=True):
                        np.testing.assert_array_equal(np.asarray(one.data), np.asarray(other.data))
            ran += 1
    print(f"RAN {ran} programs with collectives after their bodies")


def program(mesh, axis, body, multiply):
    everywhere = mesh.axis_names

    def step(h, w):
        late = jax.pure_callback(come_late, jax.ShapeDtypeStruct((), np.float32), lax.axis_index(everywhere))
        d = multiply(h + late, w, axis)[: h.shape[0]]
        return lax.clamp(-9.0, lax.psum(d, everywhere), 9.0)

    def local(h, y, w):
        results = [body(lambda h: step(h, w), h)]
        for i in range(BEHIND):
            y = lax.clamp(-9.0, lax.psum((i % 3 + 1) * y, everywhere), 9.0)
            results.append(y)
        return results

    specs = (P(everywhere), P(everywhere), P())
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(everywhere), check_vma=False))


def come_late(device):
    if device == jax.device_count() - 1:
        time.sleep(LATE)
    return np.float32(0)


def gathered(h, w, axis):
    return lax.all_gather(h, axis, tiled=True) @ w


def loop(step, h):
    return lax.fori_loop(0, 3, lambda _, h: step(h), h)


def branch(step, h):
    return lax.cond(h.sum() > np.inf, lambda h: h, step, h)
