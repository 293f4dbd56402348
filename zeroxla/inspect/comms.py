"""`comms`: reads from a program which bytes travel over which axes of its mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from zeroxla.inspect.comms_report import CommsReport, Row
from zeroxla.inspect.traffic import messages, received_bytes
from zeroxla.program import hlo
from zeroxla.program.phases import phase_of
from zeroxla.step.islands.exchange_bytes import ExchangeBytes


def comms(
    program: jax.stages.Lowered | jax.stages.Compiled | str,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    *,
    host_axes: Sequence[str] = ("pipe", "node"),
    while_trips: int | None = None,
    islands: ExchangeBytes | None = None,
) -> CommsReport:
    """Report the collectives of a program, mapped to the axes of its mesh.

    A compiled program shows the collectives that run, with those that the compiler inserted (for
    the optimizer) or merged, and without those that it dropped. A lowered program shows only the
    collectives that were written in `shard_map`, dead code included. The CPU backend widens 16-bit
    floats to float32 (float8 to float16) before they travel; there, read the wire dtypes and bytes
    of such collectives from the lowered program.

    Args:
      program: a lowered or compiled program, or HLO text: compiled.as_text(), or
        lowered.as_text(dialect="hlo", debug_info=True). Without debug_info phases are unknown.
      mesh: the mesh that the program was built for. Device groups are read as positions in
        mesh.devices.flat.
      host_axes: axes whose neighbours are other hosts. Axes that the mesh lacks are ignored. By
        default every node of every stage is a host; give ("node",) if one host has all stages.
      while_trips: the trip count to assume for loops whose own depends on data.
      islands: what islands exchange besides, as `Island.describe` returns it.

    Returns:
      The report. Collectives of one-device groups move nothing and are left out.

    Raises:
      ValueError: the text is no HLO, the program was built for another number of devices, or a
        loop with collectives has no fixed trip count and `while_trips` is None.
      NotImplementedError: a collective of a sixth kind (see `Row.kind` for the five).

    Cost: reads the program's text, about 1 s per 200 000 lines. Nothing runs.

    Phases come from the `jax.named_scope` names `gather`, `forward`, `backward`, `reduce`,
    `update`, `deal`, `move` and `send` in an op's path, and from the transforms that JAX notes
    there.
    """
    if isinstance(program, jax.stages.Lowered):
        text = program.as_text(dialect="hlo", debug_info=True)
    elif isinstance(program, jax.stages.Compiled):
        text = program.as_text()
    else:
        text = program
    if not isinstance(text, str):
        raise ValueError(
            f"comms() reads a lowered or compiled program or HLO text, not {type(program).__name__}"
        )
    module = hlo.parse(text)
    shape = {str(name): int(size) for name, size in mesh.shape.items()}
    world = math.prod(shape.values())
    if module.num_partitions not in (None, world):
        raise ValueError(
            f"the program was compiled for {module.num_partitions} devices, the mesh {shape} has "
            f"{world}; pass the mesh that the program was built for"
        )
    places = _places(shape)
    host_dims = [dim for dim, name in enumerate(shape) if name in host_axes]
    hosts = [tuple(place) for place in places[:, host_dims].tolist()]
    rows = []
    for collective in hlo.collectives(module, while_trips=while_trips):
        row = _row(collective, places, tuple(shape), hosts)
        if row is not None:
            rows.append(row)
    return CommsReport(mesh_shape=shape, collectives=tuple(rows), islands=islands)


def _row(
    collective: hlo.Collective,
    places: np.ndarray,
    axes: tuple[str, ...],
    hosts: list[tuple[int, ...]],
) -> Row | None:
    groups = _groups_of(collective, len(places))
    beyond = [i for group in groups for i in group if i >= len(places)]
    if beyond:
        raise ValueError(
            f"{collective.name!r} names device {max(beyond)}, but the mesh has {len(places)} "
            "devices; pass the mesh that the program was built for"
        )
    spanned = _spanned(groups, places, axes)
    if not spanned:
        return None
    arrays = collective.results if collective.kind == "all-gather" else collective.operands
    num_bytes = sum(array.num_bytes for array in arrays)
    size = max(len(group) for group in groups)
    received = received_bytes(collective.kind, num_bytes, size)
    sent = dict.fromkeys(hosts, 0.0)
    for group in groups:
        for source, target, share in messages(collective.kind, group, num_bytes):
            if hosts[source] != hosts[target]:
                sent[hosts[source]] += share
    return Row(
        axis="+".join(spanned),
        kind=collective.kind,
        phase=phase_of(collective.op_name, collective.kind),
        dtype="+".join(dict.fromkeys(array.dtype for array in arrays)),
        group_size=size,
        count=collective.count,
        elements=sum(array.num_elements for array in arrays),
        received_bytes=received * collective.count,
        cross_host_bytes=max(sent.values()) * collective.count,
        branches=collective.branches,
        conditional=bool(collective.branches),
        op_name=collective.op_name,
    )


def axes_of(collective: hlo.Collective, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of a mesh that the groups of a collective span; () if it moves nothing.

    Args:
      collective: a collective of a program that was built for the mesh.
      mesh_shape: axis lengths, outermost first.
    """
    places = _places(mesh_shape)
    return tuple(_spanned(_groups_of(collective, len(places)), places, tuple(mesh_shape)))


def _places(mesh_shape: Mapping[str, int]) -> np.ndarray:
    """Return the place of each device position on the mesh, [world, axes]."""
    lengths = tuple(mesh_shape.values())
    return np.stack(np.unravel_index(np.arange(math.prod(lengths)), lengths), axis=1)


def _groups_of(collective: hlo.Collective, world: int) -> Sequence[Sequence[int]]:
    if collective.kind == "collective-permute":
        return collective.pairs  # Groups of two. A pair of the same device moves nothing.
    return collective.groups or [range(world)]


def _spanned(
    groups: Sequence[Sequence[int]], places: np.ndarray, axes: tuple[str, ...]
) -> list[str]:
    return [
        name
        for dim, name in enumerate(axes)
        if any(len(set(places[list(group), dim].tolist())) > 1 for group in groups)
    ]
