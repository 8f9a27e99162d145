"""The model of time: its order and its limits, by hand; no test measures time. Without these tests, a slower link could
improve a prediction, transfers could count as hidden although nothing hides them, or the rate of another type could be
used."""

import dataclasses
import itertools

import cases
import jax
import pytest
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._src.platform.hardware import calibration
from jaxmp._src.platform.hardware.call_time import Transfer, best_chunks, call_time, kind_of
from jaxmp._src.platform.hardware.hardware import MACHINES
from jaxmp._src.tools.cli import calibrate, main

# 1 op/ns, 1 byte/ns of memory, 0.1 byte/ns of links: times below are in ns.
SIMPLE = jaxmp.Hardware("simple", {"float32": 1e9}, memory_bandwidth=1e9, link_bandwidth=1e8)


def time_of(hardware=SIMPLE, *, flops=0, nbytes=0, moved=0, nranks=4, ndevices=4, stride=1, is_fused=True):
    transfers = (Transfer(moved, nranks, stride),) if moved else ()
    return call_time(
        hardware, flops=flops, kind="float32", ndevices=ndevices, nbytes=nbytes, transfers=transfers, is_fused=is_fused
    )


# 8 ranks in two nodes of 4: 4/7 of the received bytes come from the other node, over 4 networks together. With every
# other device: two ranks in each of 4 nodes, so 6/7 comes from outside over 2 networks. Every fourth: one per node.
NODES = jaxmp.Hardware("two", {"float32": 1e9}, 1e9, link_bandwidth=1e8, node=4, network_bandwidth=1e6)
SHARED = jaxmp.Hardware("shared", {"float32": 1e9}, 1e9, 1e8, is_shared=True)  # one processor for all devices
TIMES = [
    (SIMPLE, {"flops": 4000, "nbytes": 10}, {"total": 1000, "bound": "compute"}),
    (SIMPLE, {"flops": 40, "nbytes": 1000}, {"total": 1000, "bound": "memory"}),
    # A quarter of the work, then three quarters of it during the transfer.
    (SIMPLE, {"flops": 4000, "moved": 75}, {"total": 250 + 750, "bound": "compute"}),
    (SIMPLE, {"flops": 4000, "moved": 90}, {"total": 250 + 900, "bound": "compute"}),
    (SIMPLE, {"flops": 4000, "moved": 200}, {"total": 250 + 2000, "bound": "link"}),
    (SIMPLE, {"flops": 4000, "moved": 200, "is_fused": False}, {"total": 1000 + 2000, "bound": "link"}),
    (SIMPLE, {"flops": 0, "moved": 50}, {"total": 500, "bound": "link"}),
    (NODES, {"moved": 700, "nranks": 8, "ndevices": 8}, {"link": 400 / 4 * 1000}),
    (NODES, {"moved": 700, "nranks": 8, "ndevices": 16, "stride": 2}, {"link": 600 / 2 * 1000}),
    (NODES, {"moved": 700, "nranks": 8, "ndevices": 32, "stride": 4}, {"link": 700 * 1000}),
    (NODES, {"moved": 700, "nranks": 4, "ndevices": 8}, {"link": 700 * 10}),
    (SHARED, {"flops": 4000}, {"compute": 4 * 1000}),
    (SHARED, {"nbytes": 100}, {"memory": 4 * 100}),
    # On a shared processor arithmetic and traffic take turns; elsewhere they overlap.
    (SIMPLE, {"flops": 16000, "nbytes": 3000}, {"total": 4000}),
    (SHARED, {"flops": 16000, "nbytes": 3000}, {"total": 16000 + 12000}),
]


@pytest.mark.parametrize(("hardware", "options", "expected"), TIMES)
def test_times_by_hand(hardware, options, expected):
    time = time_of(hardware, **options)
    for name, value in expected.items():
        assert getattr(time, name) == (value if name == "bound" else pytest.approx(value * 1e-9))
    if hardware is SIMPLE:
        assert time.total == pytest.approx(time.overhead + max(time.compute, time.memory) + time.exposed)


def test_more_of_anything_never_takes_less_time():
    amounts = (0, 10, 1000, 100000)
    for flops, nbytes, moved, is_fused in itertools.product(amounts, amounts, amounts, (True, False)):
        first = {"flops": flops, "nbytes": nbytes, "moved": moved, "is_fused": is_fused}
        total = time_of(**first).total
        for name in ("flops", "nbytes", "moved"):
            assert time_of(**first | {name: 2 * first[name] + 1}).total >= total
        assert time_of(**first | {"is_fused": False}).total >= total * (1 - 1e-12)
        faster = jaxmp.Hardware("faster", {"float32": 2e9}, memory_bandwidth=2e9, link_bandwidth=2e8)
        assert time_of(faster, **first).total == pytest.approx(total / 2)


def test_types_have_the_rate_of_their_kind():
    kinds = {"float8_e4m3fn": "float8", "float4_e2m1fn": "float4", "complex64": "float32", "complex128": "float64"}
    kinds |= {name: name for name in ("float32", "float64", "bfloat16", "float16", "int8")}
    assert {name: kind_of(name) for name in kinds} == kinds
    assert kind_of("float32", "32F_FAST_TF32") == "tf32"
    assert kind_of("float32", "32F_FAST_16BF") == "bfloat16"
    with pytest.raises(ValueError, match="simple has no rate for bfloat16, only for float32"):
        SIMPLE.rate("bfloat16")


@pytest.mark.parametrize("name", MACHINES)
def test_the_rates_of_data_sheets_are_in_order(name):
    machine = MACHINES[name]
    rates = machine.rates
    assert rates["float64"] <= rates["float32"] < rates["tf32"] < rates["bfloat16"] == rates["float16"]
    assert rates["float8"] == pytest.approx(2 * rates["bfloat16"], rel=1e-3)
    assert machine.memory_bandwidth > machine.link_bandwidth > machine.network_bandwidth
    assert machine.source


def test_explain_predicts_each_call(mesh_of, capsys):
    """An all-gather that takes longer than its product, on a machine with a memory per device."""
    mesh = mesh_of({"x": 4})
    machine = jaxmp.Hardware("simple", {"float32": 1e9}, memory_bandwidth=1e12, link_bandwidth=1e6)
    a, b = (cases.typed(mesh, shape, *spec) for shape, spec in (((16, 32), P("x", None)), ((32, 8), P(None, "x"))))

    def product(a, b):
        return jaxmp.matmul(a, b, out_sharding=P(None, "x"))

    with jax.set_mesh(mesh):
        found = jaxmp.explain(product, hardware=machine)(a, b)
    (time,) = found.times
    work, link = 2 * 16 * 8 * 32 / 4 / 1e9, 3 * 4 * 32 * 4 / 1e6
    assert time.compute == pytest.approx(work)
    assert time.link == pytest.approx(link)
    assert found.seconds == pytest.approx(work / 4 + link)
    assert found.exposed_seconds == pytest.approx(link - work * 3 / 4)
    out = capsys.readouterr().out
    assert "bound by" in out.splitlines()[0]
    assert out.splitlines()[1].endswith(" link")
    assert "predicted on simple: " in out
    with jax.set_mesh(mesh):
        assert jaxmp.explain(product, quiet=True)(a, b).times == (None,)


def test_host_calls_on_one_processor_move_nothing_over_links(mesh_of):
    mesh = mesh_of({"x": 4})
    shared = jaxmp.Hardware("shared", {"float32": 1e9}, memory_bandwidth=1e9, link_bandwidth=1e3, is_shared=True)
    a, b = (cases.typed(mesh, (16, 16), *spec) for spec in (P("x", None), P(None, "x")))

    def product(a, b, implementation):
        return jaxmp.matmul(a, b, out_sharding=P(None, "x"), implementation=implementation)

    held, received = 3 * 16 * 16 * 4, 4 * 3 * 4 * 16 * 4  # bytes on all devices together
    for implementation, link, nbytes in (("host", 0, held), ("xla", received / 1e3, held + received)):
        with jax.set_mesh(mesh):
            found = jaxmp.explain(lambda a, b, i=implementation: product(a, b, i), quiet=True, hardware=shared)(a, b)
        (time,) = found.times
        assert time.link == time.exposed == pytest.approx(link)
        assert time.compute == pytest.approx(2 * 16**3 / 1e9)
        assert time.memory == pytest.approx(nbytes / 1e9)


def test_a_loop_counts_each_time_and_a_collective_is_not_hidden(mesh_of):
    mesh = mesh_of({"x": 4})

    def program(a, b):
        step = lambda x, _: (jax.sharding.reshard(jaxmp.matmul(x, b), P("x", None)), None)  # noqa: E731
        return jax.lax.scan(step, a, length=3)[0]

    a = cases.typed(mesh, (16, 16), "x", None)
    b = cases.typed(mesh, (16, 16), None, None)
    with jax.set_mesh(mesh):
        found = jaxmp.explain(program, quiet=True, hardware=SIMPLE)(a, b)
    assert found.seconds == pytest.approx(3 * sum(time.total for time in found.times))

    def gradient(a, b):
        return jax.grad(lambda b: jaxmp.matmul(a, b, out_sharding=P(None, "x")).sum())(b)

    b = cases.typed(mesh, (16, 16), None, "x")
    with jax.set_mesh(mesh):
        found = jaxmp.explain(gradient, quiet=True, hardware=SIMPLE)(a, b)
    gathers = [time for row, time in zip(found.rows, found.times, strict=True) if row.operation == "all_gather"]
    assert gathers
    for time in gathers:
        assert time.exposed == time.link == pytest.approx(3 * 4 * 16 * 4 / 1e8)


def test_a_product_between_machines_is_cut_where_that_hides_much():
    """One chunk takes 2 s; n chunks take 1 + 1 / n, plus a latency each, which a longer product hides."""
    machine = dataclasses.replace(SIMPLE, rates={"float32": 1e6}, network_bandwidth=1e6, launch=0.0, latency=0.0)
    call = {"flops": 1e6, "kind": "float32", "nbytes": 0, "transfers": [Transfer(10**6, 2)], "ndevices": 1}

    def chunks(possible=(2, 4, 8), **changes):
        fields = {name: changes.pop(name) for name in list(changes) if hasattr(machine, name)}
        return best_chunks(dataclasses.replace(machine, **fields), possible, **call | changes)

    assert chunks() == 8
    assert chunks(network_latency=0.05) == 4  # 8: 1.525, 4: 1.45
    assert chunks(flops=2e6, network_latency=0.1) == 8  # 8: 2.225, 4: 2.35
    assert chunks((3, 5)) == 5
    assert chunks(()) == 1
    assert chunks(flops=1e5) == chunks(network_bandwidth=1e7) == 1  # would hide a tenth at most
    assert chunks(nbytes=4e5, memory_bandwidth=1e6) == 1  # copying takes 0.8 s
    assert chunks(ndevices=4) == 8
    assert chunks(network_load=0.7) == 8  # 1.74
    assert chunks(network_load=0.9) == 1  # 1.91: the processor moves what it should multiply
    busy = {"nbytes": 1e5, "memory_bandwidth": 1e6, "network_load": 0.7, "new_memory_bandwidth": 2**27}
    assert chunks(**busy) == 1  # 1.94
    assert chunks(sums=[2**26], **busy) == 8  # the whole takes 2.5: each call allocates its sums
    assert chunks(sums=[2**25], **busy) == chunks(sums=[2**30], **busy) == 1  # new memory in no call; in every chunk
    between = dataclasses.replace(machine, link_bandwidth=1e6)
    exposed = [call_time(between, **call, chunks=n).exposed for n in (1, 8)]
    assert exposed == pytest.approx([1, 1 / 8])


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jaxmp" / "hardware.json"


def test_this_machine_is_measured_once_and_kept(own_cache, monkeypatch, capsys):
    """Small products keep this short; the numbers are useless, but present."""
    with pytest.raises(ValueError, match='hardware "this" has not been measured yet; run jaxmp info --calibrate'):
        jaxmp.explain(jaxmp.matmul, hardware="this")
    monkeypatch.setattr(calibrate, "_LARGE", 32)
    monkeypatch.setattr(calibrate, "_STREAM", 2**12)
    real = calibrate.interleaved

    def timed(calls, **_):
        return dict.fromkeys(real(calls, seconds=1e-4, rounds=(1, 1)), 0.001)

    monkeypatch.setattr(calibrate, "interleaved", timed)
    assert main.main(["info", "--calibrate", "--json"]) == 0
    assert own_cache.exists()
    a = jax.ShapeDtypeStruct((4, 4), "bfloat16")
    machine = jaxmp.explain(jaxmp.matmul, quiet=True, hardware="this")(a, a).hardware
    assert machine.rates["bfloat16"] == pytest.approx(2 * 32**3 / 1e-3)
    assert machine.memory_bandwidth == pytest.approx(2 * 2**12 / 1e-3)
    assert machine.is_shared
    assert set(machine.xla_rates) == {"float32", "float64", "bfloat16", "float16"}
    assert set(machine.rates) == {*machine.xla_rates, "float8", "float4"}
    assert "bfloat16" in capsys.readouterr().out


def test_rates_of_another_machine_are_not_taken(own_cache, monkeypatch):
    calibration.save({"name": "x"})
    assert calibration.load() == {"name": "x"}
    monkeypatch.setattr(calibration, "_FORMAT", 0)
    assert calibration.load() is None
    own_cache.write_text("{")
    assert calibration.load() is None


def test_symbols_and_types_without_a_rate_have_no_time():
    (m,) = jax.export.symbolic_shape("m")
    symbolic = jax.ShapeDtypeStruct((m, 4), "float32"), jax.ShapeDtypeStruct((4, 4), "float32")
    wide = (jax.ShapeDtypeStruct((4, 4), "float64"),) * 2
    with jax.enable_x64(True):
        for operands in (symbolic, wide):
            found = jaxmp.explain(jaxmp.matmul, quiet=True, hardware=SIMPLE)(*operands)
            assert (found.times, found.seconds) == ((None,), 0)
            assert "; 1 row not counted, because XLA partitions it, its extents are symbols, or " in str(found)
