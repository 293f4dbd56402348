"""Moves a state on disk to and from checkpoints through host memory, some arrays at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import orbax.checkpoint as ocp

from zeroxla.checkpoint.entries import Entry
from zeroxla.config.offload import PINNED
from zeroxla.mesh.processes.together import together
from zeroxla.offload.disk.disk_array import DiskArray, write
from zeroxla.offload.memory_kinds import place_of
from zeroxla.program.chunks import packed
from zeroxla.program.paths import Path as Name
from zeroxla.step.disk.writer import DiskWriter
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step

BATCH_BYTES = 256 * 2**20
"""Bytes of arrays in host memory at a time; the largest array's if that is more."""


class DiskHandler(ocp.type_handlers.ArrayHandler):
    """Writes `DiskArray`s as Orbax writes arrays of devices.

    It reads the version of the file that is in force when the save begins. The step after next
    would write over that version, so it waits until it has been read.
    """

    async def serialize(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, values: Sequence[DiskArray], infos: Sequence[Any], args: Any = None
    ) -> list[Any]:
        args = args or [ocp.SaveArgs()] * len(values)
        return [_Writes(super().serialize, list(zip(values, infos, args, strict=True)))]


class _Writes(ocp.future.Future):  # pyright: ignore[reportAttributeAccessIssue]
    """Writes some arrays when `result` is called for the first time."""

    def __init__(self, serialize: Any, jobs: list[tuple[DiskArray, Any, Any]]) -> None:
        self._serialize, self._jobs = serialize, jobs
        self._file, self._version = jobs[0][0].file, jobs[0][0].version
        self._file.hold(self._version)

    def result(self, timeout: float | None = None) -> None:
        ends = None if timeout is None else time.monotonic() + timeout
        jobs, self._jobs = self._jobs, []
        if not jobs:
            return
        try:
            for batch in packed(jobs, lambda job: job[0].nbytes, BATCH_BYTES):
                arriving = [array.read() for array, _, _ in batch]
                arrays = [x.result(memory_kind=PINNED) for x in arriving]
                infos, args = [info for _, info, _ in batch], [arg for _, _, arg in batch]
                for future in _run(self._serialize(arrays, infos, args)):
                    future.result(None if ends is None else max(0, ends - time.monotonic()))
        finally:
            self._file.let_go(self._version)


def _run(coroutine: Coroutine[Any, Any, Sequence[Any]]) -> Sequence[Any]:
    """Run a coroutine on a thread of its own: on this one, Orbax may be running its own loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


Read = Callable[[Mapping[Name, Entry]], Mapping[Name, jax.Array]]
"""Reads arrays of a checkpoint as their entries say they are stored."""


def to_disk(
    read: Read,
    wanted: Mapping[Name, Entry],
    writer: DiskWriter,
) -> dict[Name, DiskArray]:
    """Read arrays of a checkpoint into the file of a state.

    Args:
      read: reads some arrays.
      wanted: the arrays, in the writer's order.
      writer: fills the file.
    """
    jobs = list(zip(writer.shapes, wanted.items(), strict=True))
    found: dict[int, Name] = {i: path for i, (path, _) in jobs}
    try:
        for batch in packed(jobs, lambda job: job[1][1].array.nbytes, BATCH_BYTES):
            arrays = read({path: _on_host(entry) for _, (path, entry) in batch})
            for i, (path, _) in batch:
                writer.write(i, arrays[path])
        return {found[i]: array for i, array in writer.finish().items()}
    except BaseException:
        writer.abandon()
        raise


def writer_of(like: Step | TrainState, shapes: TrainState) -> DiskWriter:
    """Return the writer that fills the file of a state.

    Raises:
      ValueError: there is no step that says where the file is.
    """
    if isinstance(like, Step):
        return like.disk.writer(shapes)
    raise ValueError("these shapes are of a state on disk, whose file a step makes; pass the step")


def by_place(wanted: Mapping[Name, Entry]) -> tuple[dict[Name, Entry], dict[Name, Entry]]:
    """Return the arrays of a state that are in memory, and those on disk."""
    in_memory = {path: e for path, e in wanted.items() if place_of(e.array) != "disk"}
    return in_memory, {path: e for path, e in wanted.items() if path not in in_memory}


def replaced_on_disk(state: TrainState, read: Read, wanted: Mapping[Name, Entry]) -> TrainState:
    """Return a state with some arrays on disk replaced from a checkpoint. The given state is then
    no longer valid.

    Args:
      state: a state of arrays, not of shapes.
      read: reads arrays, as in `to_disk`.
      wanted: the arrays to replace.

    Raises:
      ValueError: the state holds shapes, or is no longer valid.
    """
    arrays = [e.array for e in wanted.values()]
    if not all(isinstance(x, DiskArray) for x in arrays):
        raise ValueError(
            "these shapes are of a state on disk: parameters are read into the file of one that is "
            "there; pass the state, or restore all of it with the step"
        )
    file = arrays[0].file
    arrays[0].check()
    file.wait_for_readers()
    try:
        for batch in packed(wanted.items(), lambda job: job[1].array.nbytes, BATCH_BYTES):
            found = read({path: _on_host(entry) for path, entry in batch})
            futures = [
                future
                for path, entry in batch
                for future in write(entry.array.shards(), found[path], file)
            ]
            for future in futures:
                future.result()
        together("state on disk", file.commit)
    except BaseException:
        file.abandon()
        raise
    return jax.tree.map(
        lambda x: dataclasses.replace(x, version=file.version) if isinstance(x, DiskArray) else x,
        state,
    )


def _on_host(entry: Entry) -> Entry:
    x = entry.array
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind(PINNED))
    return dataclasses.replace(entry, array=shape)
