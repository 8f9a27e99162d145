"""Products whose collectives go through memory that processes share, or, where that is off, over gloo. Run by
`ranks.py memory`."""

from __future__ import annotations

import os
import re

import cases
import jax
import modes
import numpy as np
import products

from jaxmp._src.lowering import process_barrier
from jaxmp._src.runtime import native

# Of one axis or two in either order, of rows and columns; an all-reduce of few bytes and of more, which ranks divide
# or do not.
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
