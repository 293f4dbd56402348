"""Memory of a step by what it consists of: against plans, the compiler, and arrays by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import Offload, ZeroConfig
from zeroxla.inspect import memory, plot_memory
from zeroxla.mesh.machines import Machines
from zeroxla.models import GPT
from zeroxla.planning.make import plan_step
from zeroxla.planning.target import Target
from zeroxla.step.memory.step_memory import STATE

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, LENGTH, WIDTH, LAYERS = 16, 32, 64, 2
SHAPE = {"vocab": 64, "length": LENGTH, "layers": LAYERS, "width": WIDTH, "heads": 4}
BATCH = {"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH + 1), jnp.int32)}


@functools.cache
def report_of(**options):
    return memory(step_of(**options))


@functools.cache
def step_of(*, scan=False, remat=False, offload="none", memory=None, accumulate=1):
    config = ZeroConfig(
        persistence_threshold=0,
        memory=memory,
        accumulate=accumulate,
        offload=Offload(optimizer=offload, sub_group=10_000),
    )
    model = GPT(**SHAPE, scan=scan, remat=remat)
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=2), optax.adam(1e-3), config=config)
    step.abstract_state(BATCH)
    return step


def planned(step):
    machines = Machines.load()
    links = dict.fromkeys(("pipe", "node", "device", "host"), machines.find_link("memory"))
    shape = {"node": 2, "device": 4}
    target = Target(device=machines.find_device("cpu"), links=links, mesh_shape=shape)
    return plan_step(step, BATCH, target)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="unrolled", marks=pytest.mark.slow),
        pytest.param({"scan": True, "accumulate": 2}, id="scanned, micro-batches"),
        pytest.param({"scan": True, "remat": True, "offload": "host"}, id="remat, on the host"),
    ],
)
def test_parts_are_those_of_the_plan(options):
    step = step_of(**options)
    report, plan = report_of(**options), planned(step).memory
    parts = dict(report.parts())
    expected = plan.parts()
    activations = parts.pop("residuals") + parts.pop("other temporaries")
    assert activations == expected.pop("activations")
    assert parts == expected
    assert report.total_bytes == plan.total_bytes


@pytest.mark.slow
def test_what_the_compiler_takes_is_near():
    step = step_of(scan=True)
    report = memory(step)
    compiled = memory(step.lower(step.shapes(), BATCH).compile())
    # As benchmarks/plan_memory.py, with XLA's scheduler for memory, which needs another process.
    assert report.total_bytes == pytest.approx(compiled.total_bytes, rel=0.1)


def test_residuals_are_named_by_the_models_lines():
    report = report_of()
    wide = [x for x in report.largest() if x.shape.endswith(f"[2,{LENGTH},{4 * WIDTH}]")]
    assert max(x.count for x in wide) == LAYERS
    for x in wide:
        assert x.kind == "residuals"
        assert x.line.startswith("models/gpt_layers.py:")
        assert x.num_bytes == x.count * 2 * LENGTH * 4 * WIDTH * 4
        assert x.scope.startswith("GPT/h_*/mlp" if x.count > 1 else "GPT/h_0/mlp")
    by_line = report.residuals_by_line()
    assert sum(by_line.values()) == report.parts()["residuals"]
    assert next(iter(by_line)).startswith("models/gpt_layers.py:")


def test_a_line_is_that_of_a_users_function():
    def loss(params, batch, key):
        hidden = jnp.tanh(batch["x"] @ params["w"])  # the line
        return jnp.mean((hidden @ params["w"].T - batch["x"]) ** 2)

    line = loss.__code__.co_firstlineno + 1
    model = (lambda key, batch: {"w": jnp.zeros((64, 512))}, loss)
    config = ZeroConfig(persistence_threshold=0)
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=1), optax.sgd(0.1), config=config)
    step.abstract_state({"x": jax.ShapeDtypeStruct((1024, 64), jnp.float32)})
    report = memory(step)
    residual = next(x for x in report.residents if x.kind == "residuals")
    assert residual.line == f"inspect/test_step_memory.py:{line}"
    assert residual.num_bytes == 1024 // 8 * 512 * 4
    # The leaf itself: gathered at the peak, and whole.
    (gathered,) = (x for x in report.residents if x.kind == "gathered leaves")
    assert (gathered.leaves, gathered.num_bytes) == (("w",), 64 * 512 * 4)
    assert report.gathered_by_unit() == {gathered.unit: gathered.num_bytes}
    (shard,) = (x for x in report.residents if x.kind == "parameters")
    assert (shard.leaves, shard.num_bytes) == (("w",), 64 * 512 * 4 // 8)


def test_leaves_of_a_loop_and_their_gradients_have_names():
    report = report_of(scan=True, remat=True)
    gathered = [x for x in report.residents if x.kind == "gathered leaves"]
    assert all(x.name.startswith("h/") for x in gathered)
    assert any("h/mlp/c_fc/kernel" in x.leaves for x in gathered)
    assert any(unit.endswith(" of a loop") for unit in report.gathered_by_unit())
    gradients = [x for x in report.residents if x.kind == "gradients" and x.leaves]
    assert sum("h/mlp/c_fc/kernel" in x.leaves for x in gradients) == 1
    assert all(x.name.startswith("gradient of ") for x in gradients)


def test_leaves_have_names_behind_quantized_wires_and_secondary_shards():
    config = ZeroConfig.zeropp(persistence_threshold=0)
    mesh = zeroxla.make_mesh(nodes=2)
    step = zeroxla.make_step(GPT(**SHAPE, scan=True), mesh, optax.adam(1e-3), config=config)
    step.abstract_state(BATCH)
    report = memory(step)
    gathered = [x for x in report.residents if x.kind == "gathered leaves"]
    assert gathered
    assert all(x.leaves for x in gathered)


@pytest.mark.parametrize("options", [{}, {"scan": True, "accumulate": 2}], ids=str)
def test_the_curve_reaches_the_peak_and_has_phases_in_order(options):
    report = report_of(**options)
    totals = [sum(point.num_bytes.values()) for point in report.curve]
    assert max(totals) == report.temporary_bytes
    peak = report.curve[totals.index(max(totals))]
    parts = {kind: n for kind, n in report.parts().items() if n and kind not in STATE}
    assert {kind: n for kind, n in peak.num_bytes.items() if n} == parts
    phases = list(dict.fromkeys(point.phase for point in report.curve))
    assert phases == ["forward", "backward", "update"]
    after = [i for i, p in enumerate(report.curve) if p.phase == "backward"]
    assert all(p.phase == "forward" for p in report.curve[: after[0]])


@pytest.mark.slow
def test_a_budget_is_seen_in_the_report():
    everything = report_of(scan=True)
    room = int(0.7 * everything.total_bytes)
    within = report_of(scan=True, memory=room)
    assert within.total_bytes <= room
    assert within.parts()["residuals"] < everything.parts()["residuals"]


def test_a_step_without_a_batch_is_refused():
    step = zeroxla.make_step(GPT(**SHAPE), zeroxla.make_mesh(nodes=2), optax.adam(1e-3))
    with pytest.raises(ValueError, match="has seen no batch"):
        memory(step)


def test_the_report_is_printed_with_lines():
    text = str(report_of())
    for words in ("residuals", "models/gpt_layers.py:", f"{LAYERS} x float32", "live ranges"):
        assert words in text


def test_the_picture_has_the_curve_the_phases_and_the_largest(tmp_path):
    report = report_of()
    figure = plot_memory(report, room=1e9, path=tmp_path / "memory.png")
    curve, bars = figure.axes
    heights = sum(patch.get_data().values - patch.get_data().baseline for patch in curve.patches)
    assert heights.max() == report.total_bytes
    texts = [text.get_text() for text in curve.texts]
    assert {"forward", "backward", "update"} <= set(texts)
    assert [bar.get_width() for bar in bars.patches] == [x.num_bytes for x in report.largest()]
    lines = [text.get_text() for text in bars.texts]
    assert all(x.line in line for x, line in zip(report.largest(), lines, strict=True))
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
