"""When a profile begins and ends, and what a run's observer tells and counts."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from zeroxla.cli.phase_seconds import PhaseSeconds
from zeroxla.cli.tracking.observer import Observer
from zeroxla.cli.tracking.options import TrackingOptions
from zeroxla.cli.tracking.profiled_steps import ProfiledSteps
from zeroxla.cli.tracking.profiler import Profiler
from zeroxla.cli.tracking.trackers import Trackers


@pytest.fixture
def told(monkeypatch):
    """Return a list of the calls to JAX's profiler."""
    told = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *a, **k: told.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: told.append("stop"))
    return told


@pytest.mark.parametrize(("first", "count"), [(1, 3), (3, 2)], ids=["new", "continued"])
def test_steps_are_traced_once_the_devices_are_done_with_those_before(first, count, told, tmp_path):
    """A run that goes on may begin between the first and the last step."""
    profiler = Profiler(ProfiledSteps(2, 4), tmp_path)
    traced = []
    for number in range(first, 7):
        profiler.before(number, lambda: told.append("settle"))
        with profiler.step(number):
            told.append(number)
        traced.append(profiler.after(number, lambda: told.append("settle")))
    begin = max(first, 2)
    inside = ["settle", "start", *range(begin, 5), "settle", "stop"]
    assert told == [*range(first, begin), *inside, 5, 6]
    assert [x for x in traced if x] == [count]
    profiler.close()
    assert told[-1] == 6


def test_a_trace_that_still_runs_ends_with_the_run(told, tmp_path):
    profiler = Profiler(ProfiledSteps(2, 4), tmp_path)
    profiler.before(2, lambda: None)
    profiler.close()
    profiler.close()
    assert told == ["start", "stop"]


def test_without_steps_nothing_is_traced(told, tmp_path):
    profiler = Profiler(None, tmp_path)
    profiler.before(1, lambda: told.append("settle"))
    assert profiler.after(1, lambda: told.append("settle")) == 0
    assert told == []


@pytest.mark.parametrize("process", [0, 1])
def test_the_first_process_alone_makes_profiles(process, told, tmp_path, monkeypatch):
    monkeypatch.setattr("zeroxla.cli.tracking.observer.on_first", lambda topic, action: None)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    options = TrackingOptions(track=(), profile="1:2")
    observer = Observer.of(options, 3, tmp_path, print)
    observer.profiler.before(1, lambda: None)
    observer.end(finished=True)
    assert told == (["start", "stop"] if process == 0 else [])


@pytest.mark.parametrize("finished", [True, False])
def test_trackers_are_told_how_a_run_ended(finished, tmp_path):
    ends = []
    trackers = Trackers({"mine": SimpleNamespace(end=ends.append)}, print)
    Observer(trackers=trackers, profiler=Profiler(None, tmp_path)).end(finished=finished)
    assert ends == [finished]


def test_the_seconds_of_a_phase_add_up(monkeypatch):
    clock = iter([0.0, 1.0, 5.0, 7.0, 8.0, 8.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    seconds = PhaseSeconds()
    for phase in ("data", "data", "save"):
        with seconds(phase):
            pass
    assert seconds.taken() == {"data_s": 3.0, "save_s": 0.5}
    assert seconds.taken() == {}
