"""Every pair of features: it trains as one device does, or is refused by a text that says why.

`make test` and `make test-slow` run groups of features that hold together; `make test-full` runs
every pair. `make test` takes the groups that do not begin with one of `LONG`: here the quick tests
are no cover. The features of the others have quick tests of their own elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from compose.features import (
    BY_NAME,
    ELSEWHERE,
    FEATURES,
    REFUSED,
    SAME_PROGRAM,
    WITHOUT_EFFECT,
    pairs,
)
from compose.jobs import Job, reference_of
from tools.quick import quick_compilation  # noqa: F401

import zeroxla

pytestmark = pytest.mark.usefixtures("quick_compilation")

EXACT, EXACT_LOSS = 2e-4, 1e-5
"""Largest relative errors of features that round nothing: of the change of the parameters over all
steps, and of each loss."""
LOSS_SHARE = 0.01
"""Largest relative error of a loss, as a share of the error of a feature."""
LONG = (
    "nnx",
    "functions",
    "unrolled layers",
    "attention and loss in blocks",
    "optimizer of matrices",
    "optimizer that reads the loss",
    "optimizer on disk",
)
"""The first features of groups that are left to the slow tests, as groups of one feature are."""


def _is_plain(one, other):
    """Whether both features can be on, and neither is refused or without effect."""
    names = frozenset({one.name, other.name})
    return one.meets(other) and names not in REFUSED and names not in WITHOUT_EFFECT


def _groups():
    """Groups of up to seven features that hold together; every feature is in one."""
    groups = []
    for feature in FEATURES:
        fitting = (g for g in groups if len(g) < 7 and all(_is_plain(feature, x) for x in g))
        group = next((g for g in fitting if not _takes_all_devices([*g, feature])), None)
        if group is None:
            groups.append([feature])
        else:
            group.append(feature)
    return groups


def _takes_all_devices(features):
    """Whether stages and axes leave a group one device for data. They meet in pairs."""
    slots = {slot for feature in features for slot in feature.slots}
    return "mesh.pipe" in slots and not slots.isdisjoint({"mesh.tensor", "mesh.context"})


def _job(*features):
    job = Job()
    for feature in features:
        for slot, value in feature.slots.items():
            job.set(slot, value)
    return job


@functools.cache
def _program(feature):
    """The digest of the program of a job with one feature; None for none."""
    features = () if feature is None else (feature,)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore", UserWarning)
        return _job(*features).make(Path(folder)).program


def _errors(run):
    """The relative errors of a run's losses, and of its change of the parameters."""
    losses, start, after = reference_of(run)
    of_losses = [abs(x / y - 1) for x, y in zip(run.losses, losses, strict=True)]
    moved = [x - y for x, y in zip(_floats(run.after), _floats(run.start), strict=True)]
    wanted = [x - y for x, y in zip(_floats(after), _floats(start), strict=True)]
    return max(of_losses), _distance(moved, wanted) / _distance(wanted)


def _floats(tree):
    """The leaves that training changes; of a model with adapters, these."""
    tree = tree.get("lora", tree)
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def _distance(one, other=None):
    other = other or [np.zeros_like(x) for x in one]
    assert [x.shape for x in one] == [x.shape for x in other]
    return np.sqrt(sum(float(np.sum((x - y) ** 2)) for x, y in zip(one, other, strict=True)))


def _run(features, folder):
    """Run a job; return the run and its warnings, once its results equal the reference."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        run = _job(*features).run(folder)
    of_losses, of_parameters = _errors(run)
    error = sum(feature.error for feature in features)
    assert of_losses < EXACT_LOSS + error * LOSS_SHARE
    assert of_parameters < EXACT + error
    return run, sorted({str(w.message) for w in caught if issubclass(w.category, UserWarning)})


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(
            group,
            id=", ".join(feature.name for feature in group),
            marks=pytest.mark.slow if len(group) == 1 or group[0].name in LONG else (),
        )
        for group in _groups()
    ],
)
def test_features_that_are_on_together(group, tmp_path):
    run, texts = _run(group, tmp_path)
    assert texts == []
    assert [feature.name for feature in group if not feature.holds(run)] == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("one", "other"), [pytest.param(*pair, id=" + ".join(x.name for x in pair)) for pair in pairs()]
)
def test_a_pair(one, other, tmp_path):
    names = frozenset({one.name, other.name})
    if names in REFUSED:
        with pytest.raises((ValueError, NotImplementedError), match=REFUSED[names]):
            _job(one, other).run(tmp_path)
        return
    run, texts = _run((one, other), tmp_path)
    if names in WITHOUT_EFFECT:
        assert any(re.search(WITHOUT_EFFECT[names], text) for text in texts), texts
        return
    assert texts == []
    for feature, beside in ((one, other), (other, one)):
        assert feature.holds(run), f"{feature.name} was not on"
        if feature.changes(beside) and (feature.name, beside.name) not in SAME_PROGRAM:
            text = f"{feature.name} changes nothing beside {beside.name}, and nothing says so"
            assert run.program != _program(beside), text


@pytest.mark.slow
def test_every_feature_changes_the_program():
    silent = [f.name for f in FEATURES if f.in_program and _program(f) == _program(None)]
    assert silent == []


def test_every_option_is_in_the_list():
    """A new option must enter the list of features, or the list of those met elsewhere."""
    options = {
        *(f"ZeroConfig.{f.name}" for f in dataclasses.fields(zeroxla.ZeroConfig)),
        *(f"Offload.{f.name}" for f in dataclasses.fields(zeroxla.Offload)),
        *(
            f"make_step.{name}"
            for name, x in inspect.signature(zeroxla.make_step).parameters.items()
            if x.kind is not x.VAR_KEYWORD  # misspelt names, which are refused
        ),
        *(f"Pipeline.{name}" for name in inspect.signature(zeroxla.Pipeline).parameters),
    }
    of_model = inspect.signature(zeroxla.Pipeline.from_model).parameters
    options |= {f"Pipeline.from_model.{name}" for name in ("model", "loss") if name in of_model}
    covered = {field for feature in FEATURES for field in feature.fields} | set(ELSEWHERE)
    assert options - covered == set()
    assert covered - options == set()


def test_lists_name_pairs_that_exist():
    known = {frozenset({one.name, other.name}) for one, other in pairs()}
    assert set(REFUSED) | set(WITHOUT_EFFECT) | set(map(frozenset, SAME_PROGRAM)) <= known
    assert not set(REFUSED) & set(WITHOUT_EFFECT)
    assert not (set(REFUSED) | set(WITHOUT_EFFECT)) & set(map(frozenset, SAME_PROGRAM))
    assert len(BY_NAME) == len(FEATURES)


def test_the_page_is_written_from_the_list():
    """`python scripts/pairs_page.py` writes it."""
    script = Path(__file__).resolve().parents[2] / "scripts" / "pairs_page.py"
    subprocess.run([sys.executable, script, "--check"], check=True)
