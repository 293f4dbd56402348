"""Reads TensorBoard's event files."""

from __future__ import annotations


def read_events(path):
    """Return {(tag, step): value} and the steps at which a session started."""
    from tensorboardX.proto.event_pb2 import Event

    scalars, starts = {}, []
    for file in sorted(path.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[12 + size + 4 :]
            scalars |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
            if event.HasField("session_log"):
                starts.append(event.step)
    return scalars, starts
