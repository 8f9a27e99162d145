"""Drawn products with reduced operands or unreduced results: values, types and tags are JAX's, also under `fuse`.

A wrong plan would sum a gradient twice, or lose the tag and sum in every microbatch, with the right values.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import require_devices
from jax import lax
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P

import jaxmp

SUBSCRIPTS = "mk,kn->mn", "mk,nk->mn", "km,kn->nm", "bmk,kn->bmn", "bmk,bkn->bmn", "mjk,jkn->mn", "mk,nkp->mnp"
TRANSFORMS = "none", "vmap", "jvp", *("grad", "remat", "scan") * 3  # JAX refuses most gradients
OPTIONS = {}, {"determinism": "batch"}, {"implementation": "host"}, {"implementation": "xla"}
GROUP = 40  # programs of one compilation


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A product, the shardings and tags of its operands and result, and what is done with it."""

    subscripts: str
    specs: tuple[P, P, P | None]
    dtype: str
    transform: str
    options: int

    def __str__(self):
        return f"{self.subscripts} {self.specs} {self.dtype} {self.transform} {OPTIONS[self.options]}"

    def shapes(self):
        return [tuple(4 if index == "b" else 8 for index in term) for term in self.subscripts.split("->")[0].split(",")]

    def run(self, module, a, b):
        """Returns the results of the program, on operands without shardings."""
        options = OPTIONS[self.options] if module is jaxmp else {}
        of_a, of_b, of_d = self.specs

        def product(a, b):
            return module.einsum(self.subscripts, a, b, out_sharding=of_d, **options)

        def loss(a, b):
            d = (jax.checkpoint(product) if self.transform == "remat" else product)(a, b)
            d = reshard(d, P(*jax.typeof(d).sharding.spec.partitions))  # takes the sum that is deferred
            return (d * jnp.asarray(np.arange(d.size).reshape(d.shape) % 3 - 1, d.dtype)).sum()

        placed = reshard(a, of_a), reshard(b, of_b)
        if self.transform == "none":
            return product(*placed)
        if self.transform == "jvp":
            return jax.jvp(product, placed, placed)
        if self.transform == "vmap":
            stacked = reshard(jnp.stack([a, -a, a + a]), P(None, *of_a.partitions))
            return jax.vmap(product, (0, None))(stacked, placed[1])
        if self.transform != "scan":
            return jax.grad(loss, (0, 1))(*placed)
        kind = jax.eval_shape(jax.grad(loss, 1), *placed)
        where = jax.typeof(placed[1]).sharding.update(spec=kind.sharding.spec)
        total = jnp.zeros(kind.shape, kind.dtype, out_sharding=where)

        def step(total, a):
            return total + jax.grad(loss, 1)(reshard(a, of_a), placed[1]), None

        total, _ = lax.scan(step, total, jnp.stack([a, -a, a + a, a]))
        return total, reshard(total, P(*of_b.partitions))


def draw(rng):
    """Returns a drawn program; most of these JAX takes."""
    subscripts = str(rng.choice(SUBSCRIPTS))
    (a, b), d = subscripts.split("->")[0].split(","), subscripts.split("->")[1]
    axes, reduced, unreduced = dict.fromkeys(a + b, ()), {"a": set(), "b": set()}, set()
    shared = {index for index in a if index in b}
    for axis in rng.permutation(["x", "y"]).tolist():
        index = rng.choice([*sorted(axes), ""])
        if not index:
            continue
        axes[index] += (axis,)
        other = None if index in shared else "b" if index in a else "a"
        if other and rng.random() < 0.7:
            reduced[other].add(axis)
        if index in shared and index not in d:
            unreduced.add(axis)
    if rng.random() < 0.3:
        unreduced = set()
    is_summed = any(axes[index] for index in shared if index not in d)
    dims_a, dims_b, dims = ([axes[index] or None for index in term] for term in (a, b, d))
    specs = P(*dims_a, reduced=reduced["a"]), P(*dims_b, reduced=reduced["b"])
    out = P(*dims, unreduced=unreduced) if is_summed or rng.random() < 0.3 else None
    transform, dtype = str(rng.choice(TRANSFORMS)), str(rng.choice(["float32", "bfloat16", "int32"]))
    options = int(rng.integers(len(OPTIONS)))
    if dtype == "int32":
        transform, options = str(rng.choice(["none", "vmap"])), 0
    return Drawn(subscripts, (*specs, out), dtype, transform, options)


def programs(rng):
    """Yields drawn programs that JAX takes, each with its operands."""
    for _ in range(200 * GROUP):
        drawn = draw(rng)
        if not any(spec and (spec.reduced or spec.unreduced) for spec in drawn.specs):
            continue
        operands = [jnp.asarray(rng.integers(-1, 2, shape), drawn.dtype) for shape in drawn.shapes()]
        try:
            jax.eval_shape(functools.partial(drawn.run, jnp), *operands)
        except Exception:  # JAX refuses it, with one of several types
            continue
        yield drawn, operands


def same(drawn, want, got):
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert jax.typeof(w) == jax.typeof(g), str(drawn)
        for one, other in zip(w.addressable_shards, g.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(one.data), np.asarray(other.data), str(drawn))


@pytest.mark.small("values", of=lambda group: (0,))
@pytest.mark.parametrize("group", range(50))
def test_drawn_programs_with_tags_agree_with_jax(group):
    require_devices(4)
    rng = np.random.default_rng([55, group])
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        drawn, operands = zip(*itertools.islice(programs(rng), GROUP), strict=True)
        assert len(drawn) == GROUP

        def run(module, operands):
            return [each.run(module, *given) for each, given in zip(drawn, operands, strict=True)]

        plain = functools.partial(run, jnp)
        want = jax.jit(plain)(operands)
        for f in (functools.partial(run, jaxmp), jaxmp.fuse(plain)):
            for each, w, g in zip(drawn, want, jax.jit(f)(operands), strict=True):
                same(each, w, g)
