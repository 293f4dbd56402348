"""Reads the operations of a profile, and the places in the model that they belong to."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from zeroxla.program import hlo
from zeroxla.program.phases import phase_of

TRACE = "perfetto_trace.json.gz"
_LANES = re.compile(r"Stream #|XLA Ops$")
"""The threads of a GPU's or TPU's process that hold operations; others repeat them, in groups."""
_TRANSFORM = re.compile(r"\b(jit|pjit|jvp|transpose|vmap|remat|checkpoint)\(([^()]*)\)")
_MACHINERY = re.compile(
    r"train|shard_map|while|body|cond|closed_call|eval_jaxpr|branch_\d+_fun|checkpoint"
    r"|rematted_computation|custom_(?:jvp|vjp)_call|forward|backward|gather|reduce|update"
)
"""Parts of a path that say nothing about the model."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """An operation that ran.

    Attributes:
      event: the profile's event.
      name: the instruction of the program.
      device: tells devices apart.
      lane: tells threads and streams apart.
      start, end: times in us.
    """

    event: dict[str, Any]
    name: str
    device: Any
    lane: Any
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True)
class OperationPlace:
    """Where an operation belongs: its phase, and its scope in the model, "" if none is known."""

    phase: str
    scope: str


class Places:
    """The places of a program's operations.

    Args:
      program: a compiled program, or its HLO text.

    Attributes:
      module: the program's name.

    Raises:
      ValueError: the text is no HLO.
    """

    def __init__(self, program: jax.stages.Compiled | str) -> None:
        text = program if isinstance(program, str) else program.as_text()
        found = re.search(r"^HloModule ([\w.\-]+)", text or "", re.MULTILINE)
        if found is None or text is None:
            raise ValueError("a profile is read with a compiled program or its HLO text")
        self.module = found[1]
        self._computations = hlo.parse(text).computations
        self._instructions = {
            instruction.name: instruction
            for computation in self._computations.values()
            for instruction in computation.values()
        }

    def of(self, name: str) -> OperationPlace:
        """Return the place of an instruction; "other" if the program has none of this name."""
        found = self._instructions.get(name)
        if found is None:
            return OperationPlace("other", "")
        path = found.op_name
        return OperationPlace(phase_of(path, self._kind(found)), scope_of(path))

    def _kind(self, instruction: hlo.Instruction) -> str:
        """Return the kind of an instruction: of one half of an asynchronous pair that of both."""
        kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
        if kind != "async":
            return kind
        started = instruction if instruction.called else None
        for name in () if started else instruction.operands:  # a done names its start
            started = self._instructions.get(name)
        inside = self._computations.get(started.called[0], {}) if started else {}
        return next((x.opcode for x in inside.values() if x.is_root), kind)


def read_events(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the events of the newest profile in a folder.

    Raises:
      ValueError: it holds none.
    """
    files = sorted(Path(folder).glob(f"**/{TRACE}"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ValueError(
            f"{os.fspath(folder)} holds no {TRACE}; give a folder that jax.profiler.start_trace("
            "..., create_perfetto_trace=True) has written"
        )
    with gzip.open(files[-1], "rt") as file:
        return json.load(file)["traceEvents"]


def operations(events: Sequence[dict[str, Any]], module: str) -> list[Operation]:
    """Return the events that are operations of a program.

    Raises:
      ValueError: there are none.
    """
    lanes = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and _LANES.match(e["args"]["name"])
    }
    with_lanes = {pid for pid, _ in lanes}
    found = []
    for e in events:
        args = e.get("args", {})
        if e.get("ph") != "X" or "hlo_op" not in args:
            continue
        if args.get("hlo_module", module).partition("(")[0] != module:
            continue
        lane = e["pid"], e["tid"]
        if e["pid"] in with_lanes and lane not in lanes:
            continue
        device = e["pid"], args.get("device_ordinal")
        found.append(Operation(e, args["hlo_op"], device, lane, e["ts"], e["ts"] + e["dur"]))
    if not found:
        raise ValueError(
            f"the profile has no operation of the program {module!r}; give the program that ran "
            "while it was taken"
        )
    return found


def scope_of(path: str) -> str:
    """Return the part of an operation's path that names the model's own scopes; "" if none does.

    >>> scope_of("jit(train)/shard_map/while/body/transpose(jvp(forward))/h/attn/dot_general")
    'h/attn'
    """
    path = path.rpartition("/")[0]
    while (opened := _TRANSFORM.sub(r"\2", path)) != path:
        path = opened
    parts = (part for part in path.split("/") if part and not _MACHINERY.fullmatch(part))
    # Flax names the methods that it calls: "GPT.loss" says no more than "GPT".
    return "/".join(part for part in parts if "." not in part or part.startswith("unit["))
