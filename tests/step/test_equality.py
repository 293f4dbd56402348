"""Training on a mesh equals training on one device: loss, gradients, metrics, and 20 steps.

The default run takes the smoke tests of cases that are not long, and rows that together with these
have every value of each setting and a case of each file of the zoo. `-m slow` has every mesh.
`-m slow` takes the rest of a cover of all cases and `-m full` every case on every mesh.
`python benchmarks/equality_matrix.py` writes the results of the last one to benchmarks/results.
"""

import dataclasses
import itertools
import json
import os
from pathlib import Path

import pytest
from tools.equality import (
    GRADIENT_TOLERANCE,
    HOPS,
    MESHES,
    STEPS_TOLERANCE,
    TWICE,
    Row,
    Settings,
    cover,
    matrix,
    measure,
    pairs,
)
from tools.quick import covering, quick_compilation, thinned  # noqa: F401
from tools.zoo import CASES

# Once failed, and not in the cover: an empty leaf on one device.
FAILED = [Row(case="scalars", mesh=(1, 1), settings=Settings(small_units=True, keep=True))]
SMOKE = ("gpt_scan", "nnx_batchnorm", "nested_scans", "custom_vjp")
# Left to the slow tests with the heavy cases, also where they are smoke tests.
LONG = (
    "gpt_scan",
    "llama_scan",
    "nnx_batchnorm",
    "nnx_scan_with_state",
    "nnx_low_rank",
    "unused_leaves",
    "scan_axis_1",
    "odd_embedding",
)


def settings_of(row):
    """Return what rows are chosen for."""
    return {CASES[row.case].make.__module__, *dataclasses.asdict(row.settings).items()}


def marked(rows):
    """Return parameters for the cover's rows: smoke tests, quick ones, and slow ones."""
    firsts = {row.case: row for row in reversed(rows)}
    smoke = [firsts[case] for case in SMOKE]
    slow = [row for row in rows if CASES[row.case].heavy or row.case in LONG]
    quick = [row for row in smoke if row not in slow]
    others = [row for row in rows if row not in smoke and row not in slow]
    met = set().union(*map(settings_of, quick))
    both = (pytest.mark.slow, pytest.mark.smoke)
    return [
        *(pytest.param(row, marks=pytest.mark.smoke) for row in quick),
        *covering(others, lambda row: settings_of(row) - met),
        *(pytest.param(row, marks=both if row in smoke else pytest.mark.slow) for row in slow),
    ]


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
@pytest.mark.parametrize("row", [*marked(list(cover())), *thinned([], slow=FAILED)], ids=str)
def test_training_equals_one_device(row):
    check(row)


@pytest.mark.full
@pytest.mark.parametrize("row", list(matrix()), ids=str)
def test_training_equals_one_device_on_every_mesh(row):
    check(row)


def test_the_cover_meets_every_pair():
    rows = list(cover())
    values = {
        "mesh": MESHES,
        "persistence": (0, 40, None),
        "small_units": (False, True),
        "prefetch": (False, True),
        "keep": (False, True),
        "alone": (False, True),
        "accumulate": (1, 2),
        "hops": HOPS,
    }
    assert list(values) == ["mesh", *(field.name for field in dataclasses.fields(Settings))]
    wanted = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(values, 2)
        for x, y in itertools.product(values[a], values[b])
    }
    assert set().union(*map(pairs, rows)) == wanted
    for case in CASES:
        first, *others = (row for row in rows if row.case == case)
        assert first.settings.persistence == 0
        assert first.settings.small_units
        assert len(others) == (case in TWICE)
        for second in others:
            assert first.mesh != second.mesh
            for name in ("prefetch", "keep", "alone", "accumulate", "hops"):
                assert getattr(first.settings, name) != getattr(second.settings, name)
