"""The validation loss of the outer parameters that islands have kept as snapshots."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from faults_islands_figures import Found
from faults_islands_task import (
    LENGTH,
    NUM_VALID_BATCHES,
    VALID_ROWS,
    batch_of,
    keep_compiled,
    make_island_step,
)

from zeroxla.cli.data.text import validation_batches


def losses_of(runs: Mapping[str, Found], work: Path, seed: int) -> dict[str, Found]:
    """Return runs with the loss of each snapshot in the folder of their name.

    Args:
      runs: the runs, by name.
      work: where their folders and the text are.
      seed: from which they began.
    """
    keep_compiled(str(work / "compiled"))
    valid = np.load(work / "valid.npy")
    batches = list(
        validation_batches(valid, batch=VALID_ROWS, length=LENGTH, num_batches=NUM_VALID_BATCHES)
    )
    step, first = make_island_step(), batch_of(valid, 0, 0, 0)
    state = step.init(jax.random.key(seed), first)
    leaves, tree = jax.tree.flatten(state.params)

    def loss(path: Path) -> float:
        vector, at, own = np.load(path), 0, []
        assert len(vector) == sum(x.size for x in leaves), "fragments are not runs of whole leaves"
        for x in leaves:
            part = vector[at : at + x.size].reshape(x.shape)
            own.append(jax.device_put(part, x.sharding))
            at += x.size
        with_them = dataclasses.replace(state, params=tree.unflatten(own))
        return float(np.mean([float(step.eval(with_them, b)["loss"]) for b in batches]))

    found = {}
    for name, run in runs.items():
        at = {e["version"]: e["at"] for e in run.events if e["what"] == "snapshot"}
        points = [
            (
                at[version],
                run.length * _rows_until(run, version),
                loss(work / name / f"outer-{version:06}.npy"),
            )
            for version in sorted(at)
        ]
        found[name] = dataclasses.replace(run, losses=points)
    return found


def _rows_until(run: Found, version: int) -> float:
    """Return the rows that count in the outer parameters after all rounds below a number."""
    each = (x for x in run.rounds if x["round"] < version)
    return sum(sum(x["rows"].values()) for x in each) / run.fragments
