"""Products with collectives through memory that processes share, or, if that is off, over gloo. Run by
`ranks.py memory`."""

from __future__ import annotations

import os
import re
from unittest import mock

import cases
import jax
import jax.export
import modes
import numpy as np
import products
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.core.lowering import process_barrier
from jaxmp._src.platform.runtime import native

# Over one axis or two in either order, of rows and columns; an all-reduce of few bytes and of more, with sizes that
# ranks divide or do not.
NAMES = ("ag", "ag-axes-reversed", "ag-transposed", "rs", "rs-two-axes", "rs-transposed", "ar-data", "ar-two-axes")
SHARDS = {name: ((21, 34, 13), (3, 2, 5)) if name.startswith("ar") else ((21, 34, 13),) for name in NAMES}
SHARDS["ar-two-axes"] = ((103, 101, 7),)
OF_XLA = r" (all-gather|all-reduce|reduce-scatter)(-start)?\("


def main(initialize, process):
    initialize()
    is_on = os.environ.get("JAXMP_SHARED_MEMORY") != "off"
    everybody = frozenset(range(jax.process_count()))
    assert native.shared_processes == (everybody if is_on else frozenset()), native.shared_processes
    found = {case.name: case for case in cases.CASES}
    for name, shards in SHARDS.items():
        for per_shard in shards:
            for dtype in (
                ("float32", "bfloat16", "complex64", "int32") if name in ("ag", "rs", "ar-data") else ("float32",)
            ):
                multiply(found[name].replace(per_shard=per_shard, dtype=dtype), is_on)
    for kind in (AxisType.Explicit, AxisType.Auto):
        exported(kind)
    if is_on:
        use = native.extension().arena_use()
        assert use["touched"] < 4 << 20, use  # blocks are written to again
    print("RAN", dict(products.RAN))
    products.RAN.clear()


def multiply(case, is_on):
    mode = modes.BY_ID["explicit"]
    a, b = case.integers(np.random.default_rng(0))
    with mode.scope(case):
        placed = products.operands(case, mode, a, b)
        compiled = jax.jit(mode.product(case)).lower(*placed).compile()
        products.compare(compiled(*placed), np.matmul(*case.op(a, b)))
        found = process_barrier.span(case.mesh, case.group, jax.sharding.get_mesh())
    text, spans = compiled.as_text(), found.group_processes > 1
    assert not spans or ("jaxmp_process_collective" in text) == is_on, text
    # Within a process too: ranks of a call share memory, or keep XLA's order of collectives.
    assert bool(re.search(OF_XLA, text)) != is_on, text
    assert len(re.findall(r" copy\(%param", text)) < 2, text  # the barrier waits with what moves alone
    products.RAN[("shared" if is_on else "gloo") if spans else "within"] += 1


def exported(kind):
    """Checks that a program without device names runs on meshes of any processes; with calls for one process, in one
    process only."""
    devices, layouts = np.array(jax.devices()), (P("x", None), P(None, "x"))
    meshes = [Mesh(each, ("x",), axis_types=(kind,)) for each in (devices, np.roll(devices, 1), jax.local_devices())]
    a, b = (np.random.default_rng(6).integers(-3, 4, shape).astype(np.float32) for shape in ((8, 16), (16, 12)))
    names = ("jaxmp_matmul", "jaxmp_partitioned_matmul")  # as in docs/matmul.md
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]

    def export(mesh):
        def loss(a, b):
            d = jaxmp.matmul(a, b, **({"out_sharding": P(None, "x")} if kind == AxisType.Explicit else {}))
            return (d * d).sum(), d

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        with jax.set_mesh(mesh):
            program = jax.export.export(step, disabled_checks=checks)(*operands(mesh))
        return jax.export.deserialize(program.serialize())

    def operands(mesh):
        return [cases.put(x, mesh, layout) for x, layout in zip((a, b), layouts, strict=True)]

    def runs(program, mesh):
        with jax.set_mesh(mesh):
            (_, d), gradients = jax.jit(program.call)(*operands(mesh))
        for got, want in zip((d, *gradients), (a @ b, 2 * (a @ b) @ b.T, a.T @ (2 * (a @ b))), strict=True):
            products.compare(got, want)
        products.RAN["exported"] += 1

    for mesh in meshes[:2]:
        runs(export(meshes[0]), mesh)
    with mock.patch.object(jax, "process_count", return_value=1):
        of_all, of_one = export(meshes[0]), export(meshes[2])
    runs(of_one, meshes[2])
    if kind == AxisType.Auto:  # partitioned in the process that runs it
        runs(of_all, meshes[0])
        return
    message = "calls that its ranks share within one process, and its 4 CPU devices belong to [24] processes"
    with pytest.raises(NotImplementedError, match=message):
        runs(of_all, meshes[1])
