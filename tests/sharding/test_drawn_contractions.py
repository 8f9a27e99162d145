"""Contractions drawn at random: letters, meshes of up to three axes, and every role of an axis; values and cotangents.

Operands are small integers, so results are equal to the bit whatever the order of sums. `JAXMP_FUZZ=n` draws n
contractions instead of a few, from `JAXMP_FUZZ_SEED` on.
"""

import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

MESHES = ({"x": 2, "y": 2, "z": 2}, {"x": 4, "y": 2}, {"x": 2, "y": 2}, {"x": 8})
PER_PROGRAM = 10
COUNT = int(os.environ.get("JAXMP_FUZZ", "0")) or 30
SEED = int(os.environ.get("JAXMP_FUZZ_SEED", "0"))


def draw(rng, axes):
    """(einsum's subscripts, the extent of each letter, the shardings of a, b and the result)."""
    letters = iter("bmnkpqrstu")
    batch, rows, cols, contracted = (
        [next(letters) for _ in range(rng.choice(counts))] for counts in ((0, 0, 0, 1), (1, 1, 2), (1, 1, 2), (1, 1, 2))
    )
    a, b, d = batch + rows + contracted, batch + contracted + cols, batch + rows + cols
    for side in (a, b, *([d] if rng.random() < 0.3 else [])):
        rng.shuffle(side)
    extents = {letter: 8 * rng.choice((1, 1, 2)) for letter in {*a, *b}}
    return f"{''.join(a)},{''.join(b)}->{''.join(d)}", extents, [sharding(rng, side, axes) for side in (a, b, d)]


def sharding(rng, side, axes):
    dims = {letter: [] for letter in side}
    for axis in rng.sample(axes, len(axes)):
        letter = rng.choice([*side, None])
        if letter is not None:
            dims[letter].append(axis)
    return P(*(tuple(dims[letter]) or None for letter in side))


@pytest.mark.parametrize("number", range(-(-COUNT // PER_PROGRAM)))
def test_drawn_contractions(number):
    rng = random.Random(1_000_003 * SEED + number)
    sizes = rng.choice(MESHES)
    kinds, devices = (AxisType.Explicit,) * len(sizes), jax.devices()[: int(np.prod([*sizes.values()]))]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)
    drawn = [draw(rng, [*sizes]) for _ in range(PER_PROGRAM)]
    data = np.random.default_rng(number)

    def integers(side, extents):
        return data.integers(-2, 3, [extents[letter] for letter in side]).astype(np.float32)

    arrays = [[integers(side, extents) for side in text.replace("->", ",").split(",")] for text, extents, _ in drawn]

    def program(library, with_shardings, arrays):
        results = []
        for (text, _, specs), (a, b, ct) in zip(drawn, arrays, strict=True):
            out = {"out_sharding": specs[2]} if with_shardings else {}
            d, pull = jax.vjp(lambda a, b, text=text, out=out: library.einsum(text, a, b, **out), a, b)
            results.append((d, *pull(ct)))
        return results

    want = jax.jit(lambda arrays: program(jnp, False, arrays))(arrays)
    with jax.set_mesh(mesh):
        placed = [
            [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(each, specs, strict=True)]
            for each, (_, _, specs) in zip(arrays, drawn, strict=True)
        ]
        got = jax.jit(lambda arrays: program(jaxmp, True, arrays))(placed)
    for case, found, expected in zip(drawn, got, want, strict=True):
        assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, case[2][2]), found[0].ndim), case
        for name, x, y in zip(("d", "cotangent of a", "cotangent of b"), found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=f"{name} of {case}")
    if number % 20 == 19:
        jax.clear_caches()
