"""Between checkpoints and a state on disk: by way of host memory, some arrays at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from zeroxla.checkpoint.logical import Entry
from zeroxla.offload.disk.array import DiskArray
from zeroxla.offload.disk.writer import DiskWriter
from zeroxla.packing import packed
from zeroxla.paths import Path as Name

BATCH_BYTES = 256 * 2**20
"""Of arrays that are in host memory at a time, or the largest array's."""

HOST = "pinned_host"
"""The memory that all backends have."""


class DiskHandler(ocp.type_handlers.ArrayHandler):
    """Writes `DiskArray`s as Orbax writes arrays of devices.

    What it reads is the version of the file that is in force when the save begins; the step after
    next, which would write over that, waits until it is read.
    """

    async def serialize(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, values: Sequence[DiskArray], infos: Sequence[Any], args: Any = None
    ) -> list[Any]:
        args = args or [ocp.SaveArgs()] * len(values)
        return [_Writes(super().serialize, list(zip(values, infos, args, strict=True)))]


class _Writes(ocp.future.Future):  # pyright: ignore[reportAttributeAccessIssue]
    """The writing of some arrays, which the first call of `result` does."""

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
                arrays = [x.result(memory_kind=HOST) for x in arriving]
                infos, args = [info for _, info, _ in batch], [arg for _, _, arg in batch]
                for future in asyncio.run(self._serialize(arrays, infos, args)):
                    future.result(None if ends is None else max(0, ends - time.monotonic()))
        finally:
            self._file.let_go(self._version)


def to_disk(
    read: Callable[[Mapping[Name, Entry]], Mapping[Name, jax.Array]],
    wanted: Mapping[Name, Entry],
    writer: DiskWriter,
) -> dict[Name, DiskArray]:
    """Read arrays of a checkpoint into the file of a state.

    Args:
      read: reads some as their entries say they are stored.
      wanted: the arrays, in the order of the writer's.
      writer: of the file.
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


def _on_host(entry: Entry) -> Entry:
    x = entry.array
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind(HOST))
    return dataclasses.replace(entry, array=shape)
