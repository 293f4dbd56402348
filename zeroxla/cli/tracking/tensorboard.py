"""`TensorBoardEvents`: a run's metrics as an event file of its folder."""

# Generated protobuf modules make their names when they are imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from zeroxla.cli.tracking.tracker import TrackedRun


class TensorBoardEvents:
    """Writes events that TensorBoard shows: `tensorboard --logdir runs`.

    tensorboardX's own writer is not used: it writes from a thread with a bounded queue, and when a
    full disk has ended that thread, the training loop blocks on the queue for ever.
    """

    def begin(self, run: TrackedRun) -> None:
        """Begin an event file. In a run that goes on, tell TensorBoard to forget later steps."""
        self._files, self._name = run.files, f"events.out.tfevents.{time.time_ns()}"
        self._keep(file_version="brain.Event:2")
        if run.step:
            log = SessionLog(status=SessionLog.START)
            self._keep(step=run.step + 1, session_log=log)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of a step."""
        scalars = [Summary.Value(tag=n, simple_value=float(v)) for n, v in values.items()]
        self._files.append(self._name, _record(step=step, summary=Summary(value=scalars)))

    def end(self, finished: bool) -> None:
        """Do nothing: each step was written at once, or waits for room on the disk."""

    def _keep(self, **fields: Any) -> None:
        self._files.keep(self._name, _record(**fields))


def _record(**fields: Any) -> bytes:
    """Return an event in TensorFlow's record format: length, its checksum, data, its checksum."""
    data = Event(wall_time=time.time(), **fields).SerializeToString()
    size = struct.pack("<Q", len(data))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (size, data)]
    return size + checksums[0] + data + checksums[1]
