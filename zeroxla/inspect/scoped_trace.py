"""`write_scoped_trace`: a profile whose operations are named by phase and scope."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import jax

from zeroxla.inspect.profile_events import Places, operations, read_events

NAME = "trace_by_phase.json.gz"


def write_scoped_trace(folder: str | os.PathLike[str], program: jax.stages.Compiled | str) -> Path:
    """Write a copy of a profile in which the program's operations have the names of their phases
    and of the model's scopes: "forward gather: unit[h.attn]".

    Args:
      folder, program: as for `phase_times`.

    Returns:
      The file, `trace_by_phase.json.gz` in the folder. Perfetto (ui.perfetto.dev) and Chrome's
      viewer open it. The compiler's name of an operation is in its arguments.

    Raises:
      ValueError: as `phase_times`.
    """
    places, events = Places(program), read_events(folder)
    for operation in operations(events, places.module):
        place = places.of(operation.name)
        operation.event["name"] = f"{place.phase}: {place.scope or operation.name}"
        operation.event["args"]["phase"] = place.phase
    file = Path(folder) / NAME
    with gzip.open(file, "wt") as opened:
        json.dump({"traceEvents": events}, opened)
    return file
