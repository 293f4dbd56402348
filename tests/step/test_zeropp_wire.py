"""The bytes that ZeRO++ sends and keeps: bytes and dtypes from the program, memory from the
compiler.

M, as everywhere, is the number of bytes of the quantized leaves in 16 bits. Counts are of payloads,
of which a host sends (nodes - 1) / nodes.
"""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import Feedback, WireFormat, ZeroConfig
from zeroxla.inspect import comms
from zeroxla.models import GPT

pytestmark = pytest.mark.usefixtures("quick_compilation")

needs_barriers = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="XLA on JAX 0.10's CPU backend merges gathers, and memory is another",
)

WIDTH, LAYERS, LENGTH, NODES, DEVICES = 128, 2, 32, 2, 4
PRESETS = {
    "zeropp": ZeroConfig.zeropp,
    "zeropp_hq": ZeroConfig.zeropp_hq,
    "zeropp_min": ZeroConfig.zeropp_min,
}
# In units of M: forward gather, reduce.
BYTES = {"zeropp": (0.5, 0.25), "zeropp_hq": (0.5, 0.25), "zeropp_min": (0.25, 0.25)}
ONCE = {"inter_node_gather": "step", "inter_node_reduce": "step"}


@functools.cache
def build(make=ZeroConfig, *, scan=True, layers=LAYERS, nodes=NODES, devices=DEVICES, **options):
    """Return (step, lowered program, bytes of the quantized leaves in 16 bit)."""
    model = GPT.tiny(layers=layers, scan=scan, width=WIDTH, length=LENGTH, vocab=8)
    mesh = zeroxla.make_mesh(nodes=nodes, devices_per_node=devices)
    config = make(**{"persistence_threshold": 0, **options})
    step = zeroxla.make_step(model, mesh, optax.sgd(1e-3), config=config)
    rows = nodes * devices * config.accumulate
    batch = {"tokens": jax.ShapeDtypeStruct((rows, LENGTH + 1), jnp.int32)}
    lowered = step.lower(step.abstract_state(batch), batch)
    quantized = [row for row in step.describe().rows if "int" in row.wires]
    assert make is ZeroConfig or len(quantized) == 4 * (1 if scan else LAYERS)
    return step, lowered, 2 * sum(math.prod(row.shape) for row in quantized)


def report(*args, **options):
    step, lowered, _ = build(*args, **options)
    return comms(lowered, step.mesh)


def sent(found, m, **filters):
    """What hosts send of quantized wires, in units of M."""
    return found.cross_host_bytes(dtype="u8", **filters) / m * NODES / (NODES - 1)


@pytest.mark.parametrize("scan", thinned([False], slow=[True]))
@pytest.mark.parametrize("preset", thinned(["zeropp_min"], slow=["zeropp", "zeropp_hq"]))
def test_hosts_send_what_the_table_says(preset, scan):
    found, (_, _, m) = report(PRESETS[preset], scan=scan), build(PRESETS[preset], scan=scan)
    gather, reduce = BYTES[preset]
    for phase, payload in (("forward gather", gather), ("reduce", reduce)):
        # Steps of the blocks, and zeros up to a multiple of 16: at most 4 %.
        assert payload <= sent(found, m, phase=phase) <= 1.04 * payload
    assert found.cross_host_bytes(phase="backward gather") == 0
    assert not found.flat(min_elements=64)
    # What is not quantized is the tables, norms and biases, in 16 bit; inside the node backward
    # gathers secondary shards in the compute dtype.
    assert {r.dtype for r in found.select(phase="forward gather")} == {"u8", "u16"}
    backward = {r.dtype for r in found.select(phase="backward gather")}
    assert backward == ({"u8", "u16"} if preset == "zeropp_min" else {"f32", "u16"})
    assert {r.dtype for r in found.select(phase="reduce")} == {"u8", "u16"}


@pytest.mark.slow
@pytest.mark.parametrize("preset", thinned(["zeropp"], slow=["zeropp_hq", "zeropp_min"]))
def test_the_compiled_program_sends_the_same(preset):
    step, lowered, m = build(PRESETS[preset])
    found = comms(lowered.compile(), step.mesh)
    wires = found.select(dtype="u8")
    assert {row.kind for row in wires} == {"all-gather", "all-to-all"}
    total = found.cross_host_bytes(dtype="u8") / m * NODES / (NODES - 1)
    assert sum(BYTES[preset]) <= total <= 1.04 * sum(BYTES[preset])


@pytest.mark.parametrize("preset", thinned(["zeropp"], slow=["zeropp_hq", "zeropp_min"]))
def test_micro_batches_send_nothing_more_between_hosts(preset):
    one, four = (report(PRESETS[preset], accumulate=k, **ONCE) for k in (1, 4))
    for phase in ("gather", "reduce"):
        sent_bytes = one.cross_host_bytes(phase=phase)
        assert sent_bytes == four.cross_host_bytes(phase=phase) > 0


@pytest.mark.slow
def test_each_micro_batch_sends_again_unless_told_otherwise():
    one, four = (report(ZeroConfig.zeropp, accumulate=k).cross_host_bytes() for k in (1, 4))
    assert four == pytest.approx(4 * one, rel=0.01)


def test_both_hops_of_a_gather_carry_the_wire():
    found = report(weight_wire=WireFormat(bits=8))
    for phase in ("forward gather", "backward gather"):
        for axis in ("node", "device"):
            assert found.count(phase=phase, axis=axis, dtype="u8") > 0
    # What backward gathers inside the node is the wire again, or values in the compute dtype.
    for secondary, dtypes in (("wire", {"u8", "f32"}), ("compute", {"f32"})):
        kept = report(weight_wire=WireFormat(bits=8), hpz_size="node", secondary=secondary)
        assert {row.dtype for row in kept.select(phase="backward gather")} == dtypes


@pytest.mark.slow
def test_a_secondary_group_of_two_devices_gathers_among_two():
    found = report(hpz_size=2)
    rows = found.select(phase="backward gather")
    assert {(row.axis, row.group_size) for row in rows} == {("device", 2)}
    rows = report(nodes=4, devices=2, hpz_size=4).select(phase="backward gather")
    assert {(row.axis, row.group_size) for row in rows} == {("node", 2), ("device", 2)}


@pytest.mark.slow
def test_one_node_quantizes_on_its_only_hop():
    found = report(gradient_wire=WireFormat(bits=4), nodes=1, devices=8)
    assert found.count(phase="reduce", axis="device", dtype="u8") > 0
    assert found.cross_host_bytes() == 0


@pytest.mark.slow
def test_nodes_of_one_device_quantize_once():
    options = {"inter_node_gradient_wire": WireFormat(bits=4), "nodes": 8, "devices": 1}
    found, (*_, m) = report(**options), build(**options)
    sent_bytes = found.total_bytes(phase="reduce", dtype="u8")
    assert m / 4 * 7 / 8 <= sent_bytes <= 1.04 * m / 4 * 7 / 8


# memory


@functools.cache
def temp_bytes(**options):
    step, lowered, _ = build(compute_dtype="bfloat16", reduce_dtype="bfloat16", **options)
    return zeroxla.inspect.memory(lowered.compile()).temp_bytes, step.describe()


@pytest.mark.slow
@needs_barriers
@pytest.mark.parametrize(
    ("options", "per_element"),
    [
        ({"hpz_size": "node"}, 2),
        ({"hpz_size": "node", "weight_wire": WireFormat(bits=8), "secondary": "wire"}, 1),
    ],
    ids=["16 bit", "int8"],
)
def test_a_secondary_shard_adds_what_is_described(options, per_element):
    """Within 5 % of the leaves / devices per node, in a scanned model, whose tape holds it all:
    of what each layer adds."""
    base = {k: v for k, v in options.items() if k == "weight_wire"}
    grown = {}
    for name, each in (("plain", base), ("kept", options)):
        few, many = (temp_bytes(layers=layers, **each) for layers in (2, 4))
        grown[name] = (many[0] - few[0]) / 2
        described = (many[1].secondary_bytes - few[1].secondary_bytes) / 2
    matrices, others = 12 * WIDTH**2, 13 * WIDTH
    assert grown["kept"] - grown["plain"] == pytest.approx(
        per_element * matrices / DEVICES, rel=0.05
    )
    # Norms and biases are kept in 16 bit.
    expected = (per_element * matrices + 2 * others) / DEVICES
    assert described == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_the_only_micro_batch_of_a_step_sends_its_gradients_as_they_come():
    """It has nothing to wait for, but errors belong to the step."""
    texts = [
        build(inter_node_reduce=when, gradient_wire=WireFormat(), **more)[1].as_text()
        for when, more in (
            ("step", {}),
            ("microbatch", {}),
            ("step", {"error_feedback": Feedback()}),
        )
    ]
    assert texts[0] == texts[1] != texts[2]
    waiting = [build(inter_node_reduce="step", accumulate=k)[0].programs for k in (1, 2)]
    assert [p.wiring.collectives.reduces.stops_at_node for p in waiting] == [False, True]


def test_a_gradient_that_waits_for_the_node_hop_is_described():
    step, *_ = build(inter_node_reduce="step", accumulate=2)
    other, *_ = build(inter_node_reduce="step")
    elements = sum(math.prod(row.shape) for row in step.describe().rows)
    assert step.describe().gradient_bytes == pytest.approx(4 * elements / DEVICES, rel=0.01)
    assert other.describe().gradient_bytes == pytest.approx(
        4 * elements / (NODES * DEVICES), rel=0.01
    )


def test_what_wires_remember_is_in_the_state():
    step, *_ = build(ZeroConfig.zeropp_min, error_feedback=Feedback())
    batch = {"tokens": jax.ShapeDtypeStruct((8, LENGTH + 1), jnp.int32)}
    wires = step.abstract_state(batch).wire_state
    matrices = LAYERS * 12 * WIDTH**2

    def device_bytes(arrays):
        shards = [x.sharding.shard_shape(x.shape) for x in arrays if x is not None]
        sizes = [x.dtype.itemsize for x in arrays if x is not None]
        return sum(math.prod(s) * n for s, n in zip(shards, sizes, strict=True))

    # 1/devices per node of the leaves: the copies in the compute dtype, the errors in 8 bit.
    assert device_bytes(wires.copies) == 4 * matrices / DEVICES
    assert matrices / DEVICES <= device_bytes(wires.errors) <= 1.03 * matrices / DEVICES
