"""What one rank of a drawn job does, by `ranks.py chaos_rank`: training steps, and its fault where it is the victim.

Prints COME and the time ahead of each step, FAULT and the time at the fault, SAW as `ranks.py` does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

STEPS = 3


def main(initialize, process: int) -> None:
    fault = json.loads(os.environ["CHAOS_FAULT"])
    is_victim = fault["victim"] == process
    initialize()
    for step in range(STEPS):
        is_now = is_victim and step == fault["step"]
        # Compiled ahead, so that the time from the last COME is the time in which a fault is seen.
        run, operands = program(fault["model"], fault["is_backward"], fault["kind"] if is_now else "")
        compiled = run.lower(*operands).compile()
        if is_now:
            act(fault)
        print(f"COME {time.time():.3f}", flush=True)
        jax.block_until_ready(compiled(*operands))


def act(fault) -> None:
    """The victim's fault: now, or by a timer in the middle of the step that follows."""
    kind = fault["kind"]
    print(f"FAULT {time.time():.3f}", flush=True)
    if kind in ("kill", "stop"):
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind]
        if fault["delay"]:
            threading.Timer(fault["delay"], os.kill, (os.getpid(), number)).start()
        else:
            os.kill(os.getpid(), number)
    elif kind == "late":
        time.sleep(float(os.environ["JAXMP_TIMEOUT"]) / 2)
    elif kind == "raise":
        raise ValueError("bad luck")
    elif kind == "leave":
        sys.exit(0)


def program(model: str, is_backward: bool, kind: str):
    """(a jitted step, its operands) of one of the models; `kind` is what the victim has otherwise: "rows", "k", ..."""
    ndevices = jax.device_count()
    dtype = "bfloat16" if kind == "dtype" else "float32"
    rows, k = (16 if kind == "rows" else 8) * ndevices, (16 if kind == "k" else 8) * ndevices
    shape, names = {"grid": ((2, ndevices // 2), ("d", "x"))}.get(model, ((ndevices,), ("x",)))
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(shape))
    jax.set_mesh(mesh)
    first, second, batch = {
        "gather": (P(None, "x"), P("x", None), P("x", None)),  # rows gathered, then scattered
        "reduce": (P(None, "x"), P("x", None), P(None, None)),  # a column-parallel and a row-parallel layer
        "data": (P(None, None), P(None, None), P("x", None)),  # the same weights everywhere: sums in the gradient
        "grid": (P(None, "x"), P("x", None), P("d", None)),  # both
    }[model]
    hidden = P(batch[0] if model in ("data", "grid") else None, first[1])

    def ones(shape, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(shape, sharding, lambda index: np.ones(shape, dtype)[index])

    operands = (
        ones((k, 8 * ndevices), first),
        ones((8 * ndevices,), P(first[1])),
        ones((8 * ndevices, k), second),
        ones((rows, k), batch),
    )

    def forward(up, bias, down, x):
        h = jaxmp.linear(x, up, bias, activation="relu", out_sharding=hidden)
        return jnp.sum(jaxmp.matmul(h, down, out_sharding=batch).astype(jnp.float32))

    return jax.jit(jax.grad(forward, argnums=(0, 1, 2, 3)) if is_backward else forward), operands
