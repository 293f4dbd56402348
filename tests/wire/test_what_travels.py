"""In a train step each unit is gathered once forward and once backward, and reduced once.

Expected counts and bytes are worked out here by hand, leaf by leaf, and held against the report on
the program. Compiled programs are read where it matters that XLA keeps the collectives apart. On
JAX 0.10 XLA's CPU backend drops the barriers and merges forward with backward gathers, so those
tests skip there. The others read the lowered program, on every version.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla.inspect import comms
from zeroxla.models import GPT, Llama
from zeroxla.program import hlo

pytestmark = pytest.mark.usefixtures("quick_compilation")

LAYERS, WIDTH, VOCAB, LENGTH = 3, 64, 8, 8

# Width 64: a block has 12 * 64^2 + 13 * 64 elements, enough to be a unit of its own, and 11 * 64 of
# them are biases, which backward does not read: 0.5 % of three times the block. All are small
# enough to join its unit's one wire, and every dim divides by 8: no padding.
SHAPE = {"layers": LAYERS, "width": WIDTH, "vocab": VOCAB, "heads": 4}
MODELS = {
    "gpt-unrolled": GPT.tiny(scan=False, length=LENGTH, **SHAPE),
    "gpt-scanned": GPT.tiny(scan=True, length=LENGTH, **SHAPE),
    "llama": Llama.tiny(scan=True, hidden=4 * WIDTH, **SHAPE),
}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

needs_barriers = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="XLA on JAX 0.10's CPU backend merges backward gathers with forward ones",
)


class Uses(NamedTuple):
    """How often one leaf is gathered in forward, gathered in backward, and reduced, a step."""

    forward: int
    backward: int
    reduce: int


def uses_of(path: str) -> Uses:
    """The uses of a leaf, from what its gradients need.

    Backward needs a kernel for the input's gradient and a norm's scale likewise; it needs neither a
    bias nor a table in which rows are only looked up. GPT's token table is also its head: gathered
    at the lookup, again at the head, and for the head's backward; its gradients are summed first.
    """
    if path == "wte/embedding":
        return Uses(2, 1, 1)
    if path in ("wpe/embedding", "embed_tokens/embedding") or path.endswith("bias"):
        return Uses(1, 0, 1)
    return Uses(1, 1, 1)


# A unit has one collective per hop. GPT: the two tables, the blocks, the last norm, and the token
# table again, as the head. Llama: the table, the blocks, last norm and head together.
COUNTS = {
    "gpt-unrolled": Uses(LAYERS + 3, LAYERS + 2, LAYERS + 2),
    "gpt-scanned": Uses(LAYERS + 3, LAYERS + 2, LAYERS + 2),
    "llama": Uses(LAYERS + 2, LAYERS + 1, LAYERS + 2),
}
PHASES = Uses("forward gather", "backward gather", "reduce")  # type: ignore[arg-type]


class Case(NamedTuple):
    """A step's program: leaf sizes by path, the lowered form, and what was asked for."""

    mesh: jax.sharding.Mesh
    sizes: dict[str, int]
    lowered: jax.stages.Lowered


@functools.cache
def build(name: str, nodes: int = 2, devices: int = 4, **options: Any) -> Case:
    mesh = zeroxla.make_mesh(nodes=nodes, devices_per_node=devices)
    config = zeroxla.ZeroConfig(**{"persistence_threshold": 0, **options})
    step = zeroxla.make_step(MODELS[name], mesh, OPTIMIZER, config=config)
    rows = nodes * devices * config.accumulate
    batch = {"tokens": jax.ShapeDtypeStruct((rows, LENGTH + 1), jnp.int32)}
    state = step.abstract_state(batch)
    sizes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
    }
    return Case(mesh, sizes, step.lower(state, batch))


@functools.cache
def compiled_report(name: str, **options: Any) -> Any:
    case = build(name, **options)
    return comms(case.lowered.compile(), case.mesh)


def lowered_report(name: str, *args: int, **options: Any) -> Any:
    case = build(name, *args, **options)
    return comms(case.lowered, case.mesh)


def elements(sizes: dict[str, int], use: str) -> int:
    """How many elements of leaves travel for one use ("forward", "backward", "reduce")."""
    return sum(size * getattr(uses_of(path), use) for path, size in sizes.items())


# Of the models whose programs are compiled: Llama's are gathered as the scanned GPT's are.
COMPILED = thinned(["gpt-scanned"], slow=["gpt-unrolled", "llama"])


@needs_barriers
@pytest.mark.parametrize("name", COMPILED)
def test_each_unit_is_gathered_once_forward_once_backward_and_reduced_once(name):
    report = compiled_report(name)
    for phase, count in zip(PHASES, COUNTS[name], strict=True):
        for hop in ("node", "device"):
            assert report.count(phase=phase, axis=hop) == count, (phase, hop)
    assert {(row.phase, row.kind) for row in report.collectives if row.phase in PHASES} == {
        ("forward gather", "all-gather"),
        ("backward gather", "all-gather"),
        ("reduce", "reduce-scatter"),
    }


@pytest.mark.slow
@needs_barriers
def test_gathering_ahead_changes_no_count():
    report = compiled_report("gpt-unrolled", prefetch_bucket=10**6)
    for phase, count in zip(PHASES, COUNTS["gpt-unrolled"], strict=True):
        assert {report.count(phase=phase, axis=hop) for hop in ("node", "device")} == {count}


@needs_barriers
@pytest.mark.parametrize("name", COMPILED)
def test_bytes_are_those_of_the_leaves_leaf_by_leaf(name):
    sizes, report = build(name).sizes, compiled_report(name)
    for phase, use in zip(PHASES, Uses._fields, strict=True):
        wire_bytes = 4 * elements(sizes, use)
        assert report.total_bytes(phase=phase) == pytest.approx(wire_bytes * (1 - 1 / 8), rel=1e-9)
        assert report.cross_host_bytes(phase=phase) == pytest.approx(wire_bytes / 2, rel=1e-9)


@needs_barriers
@pytest.mark.parametrize("name", COMPILED)
def test_a_device_receives_three_times_the_model_a_step(name):
    sizes, report = build(name).sizes, compiled_report(name)
    expected = 3 * (1 - 1 / 8) * 4 * sum(sizes.values())
    assert report.total_bytes() == pytest.approx(expected, rel=0.01)


@needs_barriers
@pytest.mark.parametrize("name", COMPILED)
def test_only_scalars_travel_over_both_axes_at_once(name):
    report, num_leaves = compiled_report(name), len(build(name).sizes)
    # The one of them is the optimizer's norm of the gradients: the compiler joins a scalar a leaf.
    assert [(row.phase, row.kind) for row in report.flat()] == [("update", "all-reduce")]
    assert all(row.elements <= num_leaves for row in report.flat())
    # Loss, weight, norm and count of bad values, summed hop by hop.
    others = [(row.axis, row.elements) for row in report.select(phase="other")]
    assert sorted(others) == [("device", 4), ("node", 4)]


def test_half_precision_travels_as_16_bits_both_ways():
    check_half_precision("gpt-scanned", lowered_report)


@pytest.mark.slow
@needs_barriers
@pytest.mark.parametrize("name", ["gpt-scanned", "gpt-unrolled"])
def test_half_precision_still_does_when_compiled(name):
    check_half_precision(name, compiled_report)


def check_half_precision(name, report_of):
    options = {"compute_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    sizes, report = build(name).sizes, report_of(name, **options)
    rows = [row for row in report.collectives if row.phase in PHASES]
    assert {(row.kind, row.dtype) for row in rows} == {("all-gather", "u16"), ("all-to-all", "u16")}
    for phase, use, count in zip(PHASES, Uses._fields, COUNTS[name], strict=True):
        expected = 2 * (1 - 1 / 8) * elements(sizes, use)
        assert report.total_bytes(phase=phase) == pytest.approx(expected, rel=1e-9)
        assert report.count(phase=phase, axis="node") == count
    everything = 3 * (1 - 1 / 8) * 2 * sum(sizes.values())
    assert report.total_bytes() == pytest.approx(everything, rel=0.01)


@pytest.mark.smoke
@pytest.mark.parametrize("compute_dtype", thinned(["bfloat16"], slow=["float16"]))
def test_gradients_travel_as_float32_unless_told_otherwise(compute_dtype):
    sizes = build("gpt-scanned").sizes
    report = lowered_report("gpt-scanned", compute_dtype=compute_dtype)
    assert {row.dtype for row in report.select(phase="gather")} == {"u16"}
    assert {row.dtype for row in report.select(phase="reduce")} == {"f32"}
    expected = 4 * (1 - 1 / 8) * elements(sizes, "reduce")
    assert report.total_bytes(phase="reduce") == pytest.approx(expected, rel=1e-9)


@pytest.mark.smoke
@pytest.mark.parametrize("name", thinned(["gpt-scanned"], slow=["gpt-unrolled", "llama"]))
def test_the_lowered_program_asks_for_the_same(name):
    sizes, report = build(name).sizes, lowered_report(name)
    for phase, use, count in zip(PHASES, Uses._fields, COUNTS[name], strict=True):
        expected = 4 * (1 - 1 / 8) * elements(sizes, use)
        assert report.total_bytes(phase=phase) == pytest.approx(expected, rel=1e-9)
        assert {report.count(phase=phase, axis=hop) for hop in ("node", "device")} == {count}


THRESHOLD = 300  # biases and norms of every block, but no table and no kernel


@pytest.mark.parametrize(
    ("report_of", "accumulate"),
    thinned([(lowered_report, 2)], slow=[(compiled_report, 2), (compiled_report, 1)], rows=True),
    ids=["lowered-2", "compiled-2", "compiled-1"],
)
def test_persistent_leaves_travel_once_a_step_and_the_others_once_a_micro_batch(
    report_of, accumulate
):
    name = "gpt-unrolled"
    options = {"persistence_threshold": THRESHOLD, "accumulate": accumulate}
    sizes, report = build(name).sizes, report_of(name, **options)
    persistent = {path: size for path, size in sizes.items() if size <= THRESHOLD}
    fetched = {path: size for path, size in sizes.items() if size > THRESHOLD}
    assert len(persistent) == 8 * LAYERS + 2
    # The last norm is persistent, so that its unit is gone; persistent leaves are one unit more.
    counts = Uses(
        accumulate * (LAYERS + 2) + 1, accumulate * (LAYERS + 1), accumulate * (LAYERS + 1) + 1
    )
    once = Uses(sum(persistent.values()), 0, sum(persistent.values()))
    for phase, use, count, kept in zip(PHASES, Uses._fields, counts, once, strict=True):
        assert {report.count(phase=phase, axis=hop) for hop in ("node", "device")} == {count}
        expected = 4 * (1 - 1 / 8) * (accumulate * elements(fetched, use) + kept)
        assert report.total_bytes(phase=phase) == pytest.approx(expected, rel=1e-9), phase


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-scanned", "llama"])
def test_accumulation_doubles_every_collective_but_the_sum_of_scalars(name):
    one, two = lowered_report(name), lowered_report(name, accumulate=2)
    for phase in PHASES:
        assert two.count(phase=phase) == 2 * one.count(phase=phase) > 0
        assert two.total_bytes(phase=phase) == 2 * one.total_bytes(phase=phase)
    assert two.count(kind="all-reduce") == one.count(kind="all-reduce") == 2


@pytest.mark.parametrize(
    ("nodes", "devices", "absent"),
    thinned([], slow=[(1, 8, "node"), (8, 1, "device")], rows=True),
)
def test_an_axis_of_length_1_has_no_collective(nodes, devices, absent):
    case = build("gpt-scanned", nodes, devices)
    report = comms(case.lowered, case.mesh)
    assert {row.axis for row in report.collectives} == {"node", "device"} - {absent}
    # The report leaves out groups of one device, so look for those in the program itself.
    module = hlo.parse(case.lowered.as_text(dialect="hlo"))
    groups = [group for found in hlo.collectives(module) for group in found.groups]
    assert groups
    assert {len(group) for group in groups} == {8}
    for phase, use, count in zip(PHASES, Uses._fields, COUNTS["gpt-scanned"], strict=True):
        expected = 4 * (1 - 1 / 8) * elements(case.sizes, use)
        assert report.count(phase=phase) == count
        assert report.total_bytes(phase=phase) == pytest.approx(expected, rel=1e-9)


def test_one_device_has_no_collective_at_all():
    text = build("gpt-scanned", 1, 1).lowered.as_text()
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute"):
        assert kind not in text


@pytest.mark.parametrize("name", thinned(["gpt-scanned"], slow=["gpt-unrolled"]))
def test_a_frozen_leaf_is_gathered_but_not_reduced(name):
    case = build(name, frozen=("c_fc/kernel",))
    report, free = comms(case.lowered, case.mesh), lowered_report(name)
    frozen = sum(size for path, size in case.sizes.items() if path.endswith("c_fc/kernel"))
    assert frozen == LAYERS * 4 * WIDTH**2
    fewer = free.total_bytes(phase="reduce") - report.total_bytes(phase="reduce")
    assert fewer == pytest.approx(4 * (1 - 1 / 8) * frozen, rel=1e-9)
    for phase in ("forward gather", "backward gather"):
        assert report.total_bytes(phase=phase) == free.total_bytes(phase=phase)


def test_nothing_below_the_first_trainable_leaf_is_gathered_in_backward():
    """With blocks and table frozen, the norm's gradient needs the head, and no leaf needs more."""
    case = build("llama", frozen=("embed_tokens", "layers"))
    report = comms(case.lowered, case.mesh)
    head, norm = case.sizes["lm_head"], case.sizes["norm/scale"]
    for phase, size in (("backward gather", head), ("reduce", head + norm)):
        assert report.count(phase=phase, axis="node") == 1
        assert report.total_bytes(phase=phase) == pytest.approx(4 * (1 - 1 / 8) * size, rel=1e-9)


@pytest.mark.parametrize("name", thinned(["gpt-scanned"], slow=["gpt-unrolled", "llama"]))
def test_leaves_kept_for_reuse_are_not_gathered_again(name):
    limit = 10**9
    case = build(name, max_reuse_distance=limit, max_live_parameters=limit)
    report = comms(case.lowered, case.mesh)
    assert report.count(phase="backward gather") == 0
    model = 4 * (1 - 1 / 8) * sum(case.sizes.values())
    assert report.total_bytes(phase="forward gather") == pytest.approx(model, rel=1e-9)
    assert report.total_bytes(phase="reduce") == pytest.approx(model, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distance", "fewer_forward"), thinned([(10**9, 1)], slow=[(0, 0)], rows=True)
)
def test_the_reuse_distance_and_the_live_limit_choose_what_is_kept(distance, fewer_forward):
    """Room for one table: the head stays for its own backward, gathered next. With a long reuse
    distance the table stays from the lookup to the head as well, and nothing else ever fits."""
    table = VOCAB * WIDTH
    case = build("gpt-scanned", max_reuse_distance=distance, max_live_parameters=table)
    report, free = comms(case.lowered, case.mesh), lowered_report("gpt-scanned")
    for phase, fewer in (("forward gather", fewer_forward), ("backward gather", 1)):
        saved = free.total_bytes(phase=phase) - report.total_bytes(phase=phase)
        assert saved == pytest.approx(4 * (1 - 1 / 8) * table * fewer, abs=1e-6)


@pytest.mark.parametrize(
    ("preset", "scan"),
    thinned(
        [("zeropp", True)],
        slow=[("zeropp", False), ("zeropp_hq", True), ("zeropp_hq", False)],
        rows=True,
    ),
)
def test_the_wires_of_a_units_gradients_share_an_exchange(preset, scan):
    """Of four kernels a block, each large enough to travel alone as floats."""
    model = GPT.tiny(layers=LAYERS, width=256, scan=scan)
    config = getattr(zeroxla.ZeroConfig, preset)(persistence_threshold=0)
    mesh = zeroxla.make_mesh(nodes=2)
    step = zeroxla.make_step(model, mesh, optax.sgd(0.1), config=config)
    batch = {"tokens": jax.ShapeDtypeStruct((8, LENGTH + 1), jnp.int32)}
    rows = comms(step.lower(step.abstract_state(batch), batch), mesh).rows
    wires = {r.axis: r.count for r in rows if (r.kind, r.dtype) == ("all-to-all", "u8")}
    assert wires == {"node": LAYERS, "device": LAYERS}  # the tables travel as floats
