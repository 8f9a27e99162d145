"""Results of `audit(vary="processes")`. Run by `ranks.py audited` on 4 devices of 2 processes, and on 2 of 2."""

from __future__ import annotations

import contextlib
import functools
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from shards import mesh_of, put

import jaxmp

K = 4096
audit = functools.partial(jaxmp.audit, vary="processes", quiet=True)


def main(initialize, process):
    initialize()
    mesh = mesh_of()
    a = put(mesh, normal(6, K), P(None, "x"))
    b = put(mesh, normal(K, 5), P("x", None))
    sums_are_named(a, b)
    bits_are_kept(a, b)
    a_program_is_followed(mesh, a)
    the_first_process_prints(a)
    arrays_of_several_processes_need_processes(a)
    print("RAN", jax.device_count())


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def sums_are_named(a, b):
    """Sums over the mesh's axis: of 4 parts here and of fewer on one process."""
    found = audit(lambda a, b: (jnp.sum(a, axis=1), jaxmp.matmul(a, b, out_sharding=P(None, None))))(a, b)
    assert {row.kind for row in found.rows} == {"sum", "product"}, found
    (trial,) = found.trials  # `fuse` refuses a program with a call of jaxmp that has no level
    assert (trial.differing, trial.outputs) == (2, 2)
    assert trial.remedy.startswith('jaxmp.fuse(fn, determinism="topology") (fuse: ')
    assert "the program calls jaxmp with determinism='run_to_run'" in trial.remedy
    ndevices, nlocal = jax.device_count(), jax.local_device_count()
    assert found.reference == f"x={nlocal} of one process"
    assert found.variants == (f"x={ndevices} of 2 processes",)
    (one,) = (row for row in found.rows if row.kind == "sum")
    assert one.line.startswith("audited.py:")
    assert 0 < one.difference.differing <= one.difference.elements == 6
    assert 0 < one.difference.ulps < 1000


def bits_are_kept(a, b):
    def program(a, b):
        return jnp.sin(jnp.matmul(a, b, out_sharding=P(None, None)))

    found = audit(jaxmp.fuse(program, determinism="topology"))(a, b)
    assert (found.rows, found.uncompared, found.outputs) == ((), (), ()), found
    assert found.compared == 5  # the call, sin, and the three operations that keep XLA from merging sin


def a_program_is_followed(mesh, a):
    """Loops, branches, keys, numbers of the host, whole and sharded arrays; a difference planted in each step."""

    def program(a, key, bias):
        def step(carry, row):
            return planted(carry + row), jnp.sin(row)

        start = jnp.where(bias[0] > 0, jax.random.normal(key, (K,)), jnp.zeros(K))
        start = jax.sharding.reshard(start, P("x"))
        carry, rows = jax.lax.scan(step, start, a)
        carry = jax.lax.fori_loop(0, 3, lambda _, c: c * jnp.float32(0.5), carry)
        return jax.lax.cond(bias[1] > 0, jnp.sin, jnp.cos, carry), rows

    found = audit(program)(a, jax.random.key(3), np.array([1, -1], np.float32))
    assert [(row.operation, row.count, row.runs) for row in found.rows] == [("shard_map", 6, 6)], found
    assert not found.uncompared
    assert {output.name for output in found.outputs} == {"[0]"}
    (row,) = found.rows
    assert (row.difference.differing, row.difference.elements, row.difference.ulps) == (K, K, 1)


def planted(x):
    """One unit in the last place up, on all devices of the job alone."""

    def local(x):
        is_whole = jax.lax.axis_size("x") == jax.device_count()
        return jnp.nextafter(x, jnp.float32(jnp.inf)) if is_whole else x * jnp.float32(1)

    return jax.shard_map(local, in_specs=P("x"), out_specs=P("x"))(x)


def the_first_process_prints(a):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        jaxmp.audit(jnp.sin, vary="processes")(a)
    assert bool(printed.getvalue()) == (jax.process_index() == 0)


def arrays_of_several_processes_need_processes(a):
    for vary in ("batch", "mesh"):
        with pytest.raises(ValueError, match=re.escape('a part of; pass vary="processes", or arrays of this process')):
            audit(jnp.sin, vary=vary)(a)
    alone = jax.make_mesh((1,), ("x",), devices=jax.local_devices()[:1])
    with pytest.raises(ValueError, match=re.escape("devices of every process of a job of several, got {'x': 1} of 1")):
        audit(jnp.sin)(jax.device_put(np.ones(4), NamedSharding(alone, P())))
