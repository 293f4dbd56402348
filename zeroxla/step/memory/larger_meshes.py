"""`larger_meshes`: what a device would hold if there were more nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from zeroxla.mesh.axes import NODE, world_size
from zeroxla.offload.array_bytes import shard_bytes
from zeroxla.program.live.kinds import GATHERED, SUB_GROUPS
from zeroxla.program.report import format_bytes
from zeroxla.step.memory.step_memory import OTHER_STATE, StepMemory

_WHOLE = {GATHERED, OTHER_STATE, SUB_GROUPS}
MOST_TIMES = 1024
"""Meshes with more than this many times the nodes are not tried."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LargerMesh:
    """A mesh with more nodes.

    Attributes:
      shape: the lengths of its axes.
      num_bytes: what each device would hold at the peak, by division.
      rows: the rows of a batch.
    """

    shape: dict[str, int]
    num_bytes: int
    rows: int


def larger_meshes(
    memory: StepMemory, mesh: Mesh, batch: Any, accumulate: int, room: int | None
) -> list[LargerMesh]:
    """Return the next two larger meshes on which a step would fit by division.

    Shards, gradients, rows and activations are divided by the added nodes; gathered leaves, model
    state and sub-groups are not. If a device's rows cannot be divided, the batch grows instead, and
    they and the activations stay as they are.

    Args:
      memory: what a device holds now.
      mesh: the mesh now.
      batch: the global batch, or its shapes with shardings.
      accumulate: the number of micro-batches.
      room: the bytes that a device has; None if that is not known: then the next two are returned.
    """
    parts, rows = memory.parts(), jax.tree.leaves(batch)[0].shape[0]
    own_rows = rows // (world_size(mesh) * accumulate)
    whole = sum(num_bytes for kind, num_bytes in parts.items() if kind in _WHOLE)
    whole -= shard_bytes(batch)
    stored = memory.state_bytes - parts[OTHER_STATE]
    activations = memory.total_bytes - stored - whole
    found: list[LargerMesh] = []
    times = 2
    while times <= MOST_TIMES and len(found) < 2:
        same_batch = own_rows % times == 0
        divided = stored / times + (activations / times if same_batch else activations)
        larger = LargerMesh(
            shape={**mesh.shape, NODE: mesh.shape[NODE] * times},
            num_bytes=int(whole + divided),
            rows=rows if same_batch else rows * times,
        )
        if room is None or larger.num_bytes <= room:
            found.append(larger)
        times *= 2
    return found


def in_words(meshes: list[LargerMesh], rows: int) -> str:
    """Return meshes in words; empty if there are none."""
    found = []
    for mesh in meshes:
        axes = " x ".join(f"{name}={length}" for name, length in mesh.shape.items())
        more = "" if mesh.rows == rows else f" with {mesh.rows} rows"
        found.append(f"{format_bytes(mesh.num_bytes)} on {axes}{more}")
    return " or ".join(found)
