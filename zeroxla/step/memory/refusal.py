"""`refusal`: the text of the error when a step cannot be made to fit a memory."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from zeroxla.program.report import format_bytes
from zeroxla.step.memory.fit_report import MemoryFit
from zeroxla.step.memory.larger_meshes import LargerMesh, in_words
from zeroxla.step.memory.step_memory import StepMemory, largest_in_words


def refusal(
    fit: MemoryFit, mesh: Mesh, batch: Any, memory: StepMemory, larger: list[LargerMesh]
) -> str:
    """Return the text of the error when nothing fits.

    Args:
      fit: what was tried.
      mesh: the mesh.
      batch: the global batch, or its shapes.
      memory: what a device holds that runs the smallest program.
      larger: the next larger meshes on which it would fit.
    """
    least = fit.smallest
    rows = jax.tree.leaves(batch)[0].shape[0]
    more = f": by division a device would hold {in_words(larger, rows)}" if larger else ""
    return (
        f"memory={format_bytes(fit.total_bytes)}: a step of {rows} rows on {mesh.size} devices "
        f"takes {format_bytes(least.num_bytes)} on each at least, {format_bytes(least.rest)} of "
        f"them for state, batch and results and {format_bytes(least.temp_bytes)} for temporaries, "
        "with all activations computed again that can be; the largest: "
        f"{largest_in_words(memory)}; give it that much, fewer rows (or more micro-batches, "
        f"accumulate=), or more devices{more}"
    )
