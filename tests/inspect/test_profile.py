"""Profiles: the time of phases and scopes, of hand-written events and of a step that runs."""

from __future__ import annotations

import gzip
import json
import os

import jax
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import inspect
from zeroxla.inspect.profile_events import TRACE, Places, operations, read_events, scope_of
from zeroxla.models import GPT

PROGRAM = """\
HloModule jit_train, num_partitions=2

body {
  x = f32[8] parameter(0)
  ROOT dot.1 = f32[8] multiply(x, x), metadata={op_name="jit(train)/forward/h/attn/dot"}
}

ENTRY main {
  x = f32[8] parameter(0)
  all-gather.1 = f32[8] all-gather(x), metadata={op_name="jit(train)/unit[h.attn]/gather/gather"}
  while.1 = f32[8] while(all-gather.1), body=body, condition=body
  ROOT add.1 = f32[8] add(while.1, x), metadata={op_name="jit(train)/update/opt/add"}
}
"""


def event(name, start, dur, *, device=0, thread=1, module="jit_train"):
    args = {"hlo_op": name, "hlo_module": module, "device_ordinal": str(device)}
    return {
        **{"ph": "X", "pid": 7, "tid": 10 * device + thread, "ts": start, "dur": dur},
        **{"name": name, "args": args},
    }


def written(folder, events):
    folder.mkdir()
    with gzip.open(folder / TRACE, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return folder


# Two devices and two steps: each gathers for 100 us, computes in a loop of 40 us with 30 us of
# products in it, waits 60 us, and updates for 20 us. The second device has a thread that repeats
# nothing of the program.
STEP = [("all-gather.1", 0, 100), ("while.1", 100, 40), ("dot.1", 105, 30), ("add.1", 200, 20)]
EVENTS = [
    event(name, start + shift, dur, device=device)
    for device in (0, 1)
    for shift in (0, 220)
    for name, start, dur in STEP
]


def test_times_of_events_add_up(tmp_path):
    other = event("add.1", 0, 1000, module="jit_evaluate", thread=2)
    times = inspect.phase_times(written(tmp_path / "a", [*EVENTS, other]), PROGRAM, steps=2)
    assert times.step == pytest.approx(0.220)
    assert times.idle == pytest.approx(0.060)
    assert times.phases == pytest.approx(
        {"forward gather": 0.100, "forward": 0.030, "update": 0.020, "other": 0.010}
    )
    assert times.scopes == pytest.approx(
        {
            ("forward gather", "unit[h.attn]"): 0.100,
            ("forward", "h/attn"): 0.030,
            ("update", "opt"): 0.020,
        }
    )
    assert list(times.phases) == ["forward gather", "forward", "update", "other"]
    assert next(iter(times.scopes)) == ("forward gather", "unit[h.attn]")  # the longest first
    assert (times.steps, times.devices) == (2, 2)
    plain = times.to_dict()
    assert plain["phases_ms"]["forward"] == pytest.approx(0.030)
    assert plain["idle_ms"] == pytest.approx(0.060)
    assert plain["scopes_ms"][0]["ms"] == pytest.approx(0.100)
    assert "unit[h.attn]" in str(times)


def test_what_ends_after_the_operation_around_it_counts_as_far_as_it_is_inside(tmp_path):
    events = [event("while.1", 0, 40), event("dot.1", 30, 20)]
    times = inspect.phase_times(written(tmp_path / "a", events), PROGRAM, steps=1)
    assert times.phases == pytest.approx({"forward": 0.020, "other": 0.030})


def test_the_newest_profile_of_a_folder_is_read(tmp_path):
    """Some backends put a number behind the program's name."""
    for name, age, us in (("b", 9, 10), ("a", 0, 20)):
        event_of_it = event("add.1", 0, us, module="jit_train(7)")
        file = written(tmp_path / name, [event_of_it]) / TRACE
        os.utime(file, (10**9 - age, 10**9 - age))
    times = inspect.phase_times(tmp_path, PROGRAM, steps=1)
    assert times.phases == pytest.approx({"update": 0.020})


def test_a_gpu_repeats_its_operations_in_groups_that_do_not_count(tmp_path):
    lanes = [
        {"ph": "M", "pid": 7, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in ((1, "Stream #13(Compute)"), (2, "Name Scope"))
    ]
    twice = [event("add.1", 0, 20), event("add.1", 0, 20, thread=2)]
    times = inspect.phase_times(written(tmp_path / "a", [*lanes, *twice]), PROGRAM, steps=1)
    assert times.phases == pytest.approx({"update": 0.020})


ASYNCHRONOUS = """\
HloModule jit_train, num_partitions=2

inside {
  x = f32[8] parameter(0)
  ROOT r = f32[4] reduce-scatter(x), dimensions={0}, metadata={op_name="NAME"}
}

ENTRY main {
  x = f32[8] parameter(0)
  all-reduce-start.1 = f32[8] all-reduce-start(x), metadata={op_name="NAME"}
  all-reduce-done.1 = f32[8] all-reduce-done(all-reduce-start.1), metadata={op_name="NAME"}
  async.1 = ((f32[8]), f32[4]) async-start(x), calls=inside, metadata={op_name="NAME"}
  ROOT done.1 = f32[4] async-done(async.1), metadata={op_name="NAME"}
}
"""


def test_both_halves_of_an_asynchronous_collective_are_of_its_phase(tmp_path):
    # The transpose of a gather keeps the gather's scope: its kind says that it is a reduce.
    text = ASYNCHRONOUS.replace("NAME", "jit(train)/transpose(gather)/psum")
    names = ("all-reduce-start.1", "all-reduce-done.1", "async.1", "done.1")
    events = [event(name, 10 * i, 10) for i, name in enumerate(names)]
    times = inspect.phase_times(written(tmp_path / "a", events), text, steps=1)
    assert times.phases == pytest.approx({"reduce": 0.040})


def test_the_trace_for_viewers_names_phases_and_scopes(tmp_path):
    file = inspect.write_scoped_trace(written(tmp_path / "a", EVENTS[:4]), PROGRAM)
    with gzip.open(file, "rt") as opened:
        events = json.load(opened)["traceEvents"]
    assert [e["name"] for e in events] == [
        "forward gather: unit[h.attn]",
        "other: while.1",
        "forward: h/attn",
        "update: opt",
    ]
    assert [e["args"]["hlo_op"] for e in events] == [name for name, *_ in STEP]
    phases = ["forward gather", "other", "forward", "update"]
    assert [e["args"]["phase"] for e in events] == phases


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match=r"holds no perfetto_trace\.json\.gz; give a folder"):
        inspect.phase_times(tmp_path, PROGRAM, steps=1)
    with pytest.raises(ValueError, match="steps=0 must be 1 or more"):
        inspect.phase_times(tmp_path, PROGRAM, steps=0)
    with pytest.raises(ValueError, match="no operation of the program 'jit_train'"):
        inspect.phase_times(written(tmp_path / "a", []), PROGRAM, steps=1)
    with pytest.raises(ValueError, match="compiled program or its HLO text"):
        inspect.phase_times(tmp_path / "a", "a poem", steps=1)


def test_scopes_of_the_model():
    path = "jit(train)/shard_map/while/body/transpose(jvp(forward))/GPT.loss/h/attn/dot_general"
    assert scope_of(path) == "h/attn"
    assert scope_of("jit(train)/transpose(jvp(unit[h.mlp]))/reduce/psum") == "unit[h.mlp]"
    assert scope_of("add") == ""


@pytest.mark.usefixtures("quick_compilation")
def test_a_step_that_ran(tmp_path):
    mesh = zeroxla.make_mesh(nodes=1, devices=jax.devices()[:2])
    step = zeroxla.make_step(GPT.tiny(layers=1), mesh, optax.adamw(1e-3))
    batch = {"tokens": np.zeros((16, 33), np.int32)}
    state = step.init(jax.random.key(0), batch)
    program = step.lower(state, batch).compile()
    state, _ = step(state, batch)
    jax.block_until_ready(state)
    with jax.profiler.trace(str(tmp_path), create_perfetto_trace=True):
        for _ in range(2):
            state, _ = step(state, batch)
        jax.block_until_ready(state)
    times = inspect.phase_times(tmp_path, program, steps=2)
    assert times.devices == 2
    assert {"forward gather", "forward", "backward", "reduce", "update"} <= set(times.phases)
    # Which places take longest is chance here: all that ran are asked for their names.
    places = Places(program)
    ran = operations(read_events(tmp_path), places.module)
    scopes = {places.of(operation.name).scope for operation in ran}
    assert {scope for _, scope in times.scopes} <= scopes
    assert any("h/" in scope for scope in scopes)
    assert any(scope.startswith("unit[") for scope in scopes)
    assert 0 <= times.idle < times.step
