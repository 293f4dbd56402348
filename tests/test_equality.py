"""Training on a mesh equals training on one device: loss, gradients, metrics, and 20 steps.

The default run takes two rows for each case of the zoo; `-m full` takes every case on every mesh,
and `python tests/equality_table.py` writes what it finds to benchmarks/results/equality.md.
"""

import dataclasses
import itertools
import json
import os
from pathlib import Path

import pytest

from equality import (
    GRADIENT_TOLERANCE,
    MESHES,
    STEPS_TOLERANCE,
    Row,
    Settings,
    cover,
    matrix,
    measure,
)
from quick import quick_compilation  # noqa: F401
from zoo import CASES

SMOKE = ("gpt_scan", "nnx_batchnorm", "nested_scans", "custom_vjp")


def marked(rows):
    """Parameters for rows; the first row of some cases is a smoke test."""
    seen = set()
    for row in rows:
        smoke = row.case in SMOKE and row.case not in seen
        seen.add(row.case)
        yield pytest.param(row, id=str(row), marks=[pytest.mark.smoke] if smoke else [])


def check(row: Row) -> None:
    errors = measure(row)
    if (path := os.environ.get("EQUALITY_RESULTS")) is not None:
        with Path(path).open("a") as file:
            line = {**dataclasses.asdict(row), **dataclasses.asdict(errors)}
            file.write(json.dumps(line) + "\n")
    assert errors.loss <= GRADIENT_TOLERANCE, errors
    assert errors.gradient[1] <= GRADIENT_TOLERANCE, errors
    assert errors.norm <= GRADIENT_TOLERANCE, errors
    assert errors.metrics <= GRADIENT_TOLERANCE, errors
    assert errors.params[1] <= STEPS_TOLERANCE, errors
    assert errors.model_state[1] <= STEPS_TOLERANCE, errors


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("row", list(marked(cover())))
def test_training_equals_one_device(row):
    check(row)


@pytest.mark.full
@pytest.mark.parametrize("row", [pytest.param(row, id=str(row)) for row in matrix()])
def test_training_equals_one_device_on_every_mesh(row):
    check(row)


def test_the_cover_meets_every_pair():
    rows = list(cover())
    names = [field.name for field in dataclasses.fields(Settings)]
    values = {name: {getattr(row.settings, name) for row in rows} for name in names}
    values["mesh"] = set(MESHES)
    assert values["persistence"] == {0, 40, None} and values["accumulate"] == {1, 2}

    def value(row, name):
        return row.mesh if name == "mesh" else getattr(row.settings, name)

    for a, b in itertools.combinations(values, 2):
        met = {(value(row, a), value(row, b)) for row in rows}
        assert met == set(itertools.product(values[a], values[b])), (a, b)
    for name in ("prefetch", "keep", "accumulate"):
        met = {(row.case, value(row, name)) for row in rows}
        assert met == set(itertools.product(CASES, values[name])), name
    for case in CASES:
        assert len({row.mesh for row in rows if row.case == case}) == 2, case
