"""Programs drawn at random, with many calls that do not depend on each other, under schedules that differ on each rank.
Run by `ranks.py schedules` on each rank. Each program is run several times, with several runs in flight, while every
rank delays its arrivals and resumptions at random. Operands are small integers, so results are exact: each element is
compared with `jnp.matmul` on one device. A call that gets the operands of another one is wrong by more than a
rounding."""

from __future__ import annotations

import json
import os
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from shards import put

import jaxmp
from jaxmp._src.platform.runtime import native

M, K, N = 8, 16, 32
KINDS = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
IN, HIDDEN = P("x", None), P(None, "x")
# With processes along "data" and the devices of each along "x": gradients sum over processes, and gather within one.
IN_OF_BOTH, HIDDEN_OF_BOTH = P(("data", "x"), None), P("data", "x")
SPECS = {"up": HIDDEN, "down": IN, "b_up": P("x"), "b_down": P()}


def main(initialize, process):
    asked = json.loads(os.environ.get("SCHEDULES", "{}"))
    seed, given = asked.get("seed", 0), asked.get("given", [])
    programs = max(len(given), asked.get("programs", 0))
    initialize()
    wrong = 0
    for i in range(0, programs, 2):  # two programs are in flight at a time
        numbers = range(i, min(i + 2, programs))
        pair = [given[j] if j < len(given) else draw(random.Random(1000 * seed + j)) for j in numbers]
        print(f"programs {i}, {i + 1}: {pair}")
        native.extension().set_schedule_noise(process * 7919 + i + 1, asked.get("microseconds", 300))
        bad = run(pair, np.random.default_rng(i), runs=asked.get("runs", 4))
        if bad:
            print(f"WRONG programs {i}, {i + 1} of seed {seed}: {bad} results of {pair}")
        wrong += bad
        if i % 20 == 18:
            jax.clear_caches()
    print(f"RAN {programs} programs, {wrong} results are wrong")
    assert not wrong


def draw(rng: random.Random) -> dict:
    """Draws a program: for each input the statements that it goes through."""
    kinds = ("layer", "inner", "remat", "scan", "loop", "cond", "towers", "wide", "sums", "own")
    ninputs = rng.choice((2, 3, 4))
    # One statement for all inputs half of the time: calls of equal fields that do not depend on each other.
    shared = [rng.choice(kinds) for _ in range(rng.choice((1, 1, 2)))]
    inputs = [shared if rng.random() < 0.6 else [rng.choice(kinds)] for _ in range(ninputs)]
    return {
        "inputs": inputs,
        "axes": rng.choice(("explicit", "explicit", "auto")),
        "mesh": rng.choice(("x", "x", "data and x")),
        "grad": rng.random() < 0.8,
    }


def program(drawn: dict, mm):
    """The function of weights, inputs and a flag; `mm(a, b, spec, bias)` multiplies."""
    hidden, rows = (HIDDEN, IN) if drawn["mesh"] == "x" else (HIDDEN_OF_BOTH, IN_OF_BOTH)

    def layer(w, x):
        h = jax.nn.relu(mm(x, w["up"], hidden, w["b_up"]))
        return jnp.clip(mm(h, w["down"], rows, w["b_down"]), -2, 2)

    inner = jax.jit(layer)

    def towers(w, x):
        return layer(w, x) - jnp.flip(layer(w, -x), axis=1)

    def scan(w, x):
        def body(carry, _):
            one, other = carry
            return (layer(w, one), inner(w, other)), None

        (one, other), _ = lax.scan(body, (x, -x), None, length=2)
        return one - 2 * other

    def loop(w, x):
        return lax.fori_loop(0, 2, lambda _, h: layer(w, h) + x, x)

    def own(x):  # a sum over ranks by XLA
        return jnp.clip(x - 2 * x.sum(0, keepdims=True), -2, 2)

    def sums(w, x):
        return lax.fori_loop(0, 2, lambda _, h: own(layer(w, h) + x), x)

    statements = {
        "layer": lambda w, x, flag: layer(w, x),
        "inner": lambda w, x, flag: inner(w, x) + inner(w, 2 * x),
        "remat": lambda w, x, flag: jax.checkpoint(layer)(w, x),
        "scan": lambda w, x, flag: scan(w, x),
        "loop": lambda w, x, flag: loop(w, x),
        "cond": lambda w, x, flag: lax.cond(flag, lambda x: layer(w, x), lambda x: -layer(w, 2 * x), x),
        "towers": lambda w, x, flag: towers(w, x),
        "sums": lambda w, x, flag: sums(w, x),
        "own": lambda w, x, flag: own(x),
        "wide": lambda w, x, flag: jnp.clip(mm(mm(x, w["up"], hidden), w["down"], rows), -2, 2),
    }

    def forward(w, xs, flag):
        results = []
        for names, x in zip(drawn["inputs"], xs, strict=True):
            for name in names:
                x = statements[name](w, x, flag)
            results.append(x)
        return results

    def loss(w, xs, flag):
        results = forward(w, xs, flag)
        return sum((i + 1) * x.sum() for i, x in enumerate(results)), results

    # Reverse mode needs loops of a known length, and fori_loop has one here.
    return jax.grad(loss, argnums=(0, 1), has_aux=True) if drawn["grad"] else forward


def run(programs: list[dict], data: np.random.Generator, *, runs: int) -> int:
    """The number of results of the programs, run in turns, that differ from one device's."""
    compiled, wanted = zip(*(prepared(drawn, data, runs) for drawn in programs), strict=True)
    got = [[step(i) for step in compiled] for i in range(runs)]  # all of them in flight
    want = [[plain(i) for plain in wanted] for i in range(runs)]
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return sum(not is_equal(one, np.asarray(other)) for one, other in pairs)


def prepared(drawn: dict, data: np.random.Generator, runs: int):
    """(a run of this program by its number, the same on one device)."""
    is_explicit = drawn["axes"] == "explicit"
    is_line = drawn["mesh"] == "x"
    shape = (jax.device_count(),) if is_line else (jax.process_count(), jax.local_device_count())
    names = ("x",) if is_line else ("data", "x")
    mesh = jax.make_mesh(shape, names, axis_types=(KINDS[drawn["axes"]],) * len(names))
    w = {"up": ints(data, K, N, most=1), "down": ints(data, N, K, most=1)}
    w |= {"b_up": ints(data, N, most=1), "b_down": ints(data, K, most=1)}
    inputs = [[ints(data, M, K, most=2) for _ in drawn["inputs"]] for _ in range(runs)]
    with jax.set_mesh(mesh):

        def ours(a, b, spec, bias=None):
            if is_explicit:
                return jaxmp.linear(a, b, bias, out_sharding=spec)
            return lax.with_sharding_constraint(jaxmp.linear(a, b, bias), NamedSharding(mesh, spec))

        placed_w = {name: put(mesh, x, SPECS[name]) for name, x in w.items()}
        placed = [[put(mesh, x, IN if is_line else IN_OF_BOTH) for x in xs] for xs in inputs]
        compiled = jax.jit(program(drawn, ours)).lower(placed_w, placed[0], True).compile()
    text = compiled.as_text()
    every_call_has_a_number_of_its_own(text)
    if os.environ.get("CHUNKS") and is_line and any(names != ["own"] for names in drawn["inputs"]):
        assert "jaxmp_start_product" in text, text
    plain = jax.jit(program(drawn, lambda a, b, spec, bias=0: jnp.matmul(a, b) + bias))

    def on_one_device(i):
        with jax.default_device(jax.local_devices()[0]):
            return plain(w, inputs[i], i % 2 == 0)

    return lambda i: compiled(placed_w, placed[i], i % 2 == 0), on_one_device


def every_call_has_a_number_of_its_own(text: str):
    """No two instructions of the compiled program meet other processes under one program and index."""
    for target in ("barrier", "collective"):
        calls = re.findall(rf'custom_call_target="jaxmp_process_{target}".*', text)
        names = [re.search(r"index = (\d+) .*?(program = \S+)", call).groups() for call in calls]
        assert len(set(names)) == len(names), sorted(names)
    for groups in re.findall(r'custom_call_target="jaxmp_process_collective".*? groups = dense<(.*?)> : ', text):
        numbers = re.findall(r"\d+", groups)
        assert min(map(numbers.count, numbers)) > 1 or numbers == ["0"], f"a collective of one rank: {groups}"


def is_equal(got, want) -> bool:
    assert np.abs(want).max(initial=0) < 2**24, "sums are no longer exact"
    return all(np.array_equal(np.asarray(shard.data), want[shard.index]) for shard in got.addressable_shards)


def ints(data, *shape, most):
    return data.integers(-most, most + 1, shape).astype(np.float32)
