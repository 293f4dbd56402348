"""`Stall`: something that makes a step longer or larger than it need be, with the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from zeroxla.frontend.rewrite.report import Finding
from zeroxla.planning.explain.link_uses import LinkUse
from zeroxla.planning.explain.origins import Origin
from zeroxla.planning.explain.remedies import Case, Remedy, remedy_for
from zeroxla.planning.lanes import COMPUTE, Event
from zeroxla.planning.target import Target
from zeroxla.planning.timeline import CUDNN_SCOPE
from zeroxla.program.live.residents import Resident
from zeroxla.program.paths import short_line
from zeroxla.program.report import format_bytes

WAIT, ATTENTION, LOSS, RESIDUAL = "wait", "attention", "loss", "residual"
LARGE = 0.1
"""A residual is large that takes this share of the memory that a program may hold."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Something that a setting would shorten.

    Attributes:
      kind: `WAIT` for a link, `ATTENTION` or `LOSS` that writes all scores or logits to memory, or
        a large `RESIDUAL`.
      what: what it is, in words.
      line: "folder/file.py:line" of the model; empty if it is not known.
      seconds: the time of a step that it takes.
      remedy: the setting.
    """

    kind: str
    what: str
    line: str
    seconds: float
    remedy: Remedy


def waiting(uses: Iterable[LinkUse], case: Case, least_s: float) -> list[Stall]:
    """Return the waits for links that a setting would hide or shorten.

    Args:
      uses: what takes links.
      case: the step.
      least_s: shorter waits are left out. Those at the ends of a step do not count.
    """
    found = []
    for use in uses:
        remedy = remedy_for(use, case) if use.hideable_s >= least_s else None
        if remedy is not None:
            found.append(
                Stall(
                    kind=WAIT,
                    what=f"{use.name}: {use.what}",
                    line=use.line,
                    seconds=use.hideable_s,
                    remedy=remedy,
                )
            )
    return found


def unfused(
    findings: Iterable[Finding], events: Sequence[Event], target: Target, least_s: float
) -> list[Stall]:
    """Return what is written to memory in full and could be computed by blocks.

    Args:
      findings: what a rewrite would change.
      events: the events of the step as it is.
      target: the devices. On some of them cuDNN computes a model's attention in one kernel.
      least_s: what takes less time for its memory is left out.
    """
    one_kernel = target.device.has_attention
    places: dict[tuple[str, str, str], list[Finding]] = {}
    for x in findings:
        if (
            x.becomes is not None
            and x.kind in (ATTENTION, LOSS)
            and not (one_kernel and CUDNN_SCOPE in x.scope)
        ):
            places.setdefault((x.kind, x.line, x.shape), []).append(x)
    found = []
    for (kind, line, shape), alike in places.items():
        dims = shape[shape.index("[") + 1 : shape.rindex("]")]
        seconds = sum(_seconds(event) for event in events if _has(event, dims))
        if seconds < least_s:
            continue
        first = alike[0]
        scopes = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        text = f"rewrite=True: {first.becomes}, which never holds {shape}"
        found.append(
            Stall(
                kind=kind,
                what=f"{kind} in {first.scope}{scopes} writes {shape} to memory",
                line=short_line(line),
                seconds=seconds,
                remedy=Remedy(text=text, changes={"rewrite": True}),
            )
        )
    return found


def large(residents: Iterable[Resident], target: Target) -> list[Resident]:
    """Return the arrays, or those that are alike, that take much of a device's memory."""
    least = LARGE * target.device.usable_bytes
    return [x for x in residents if x.num_bytes >= least]


def large_residuals(
    residents: Iterable[Resident], total_bytes: int, least_bytes: int, target: Target
) -> list[Stall]:
    """Return the stalls of residuals that take much of a device's memory.

    Args:
      residents: such residuals.
      total_bytes: all that a device holds at the peak.
      least_bytes: the least that a memory budget can make of that.
      target: the devices.
    """
    found = []
    for x in residents:
        budget = max(least_bytes, int(total_bytes - x.num_bytes / 2))
        if budget > (1 - LARGE / 2) * total_bytes:
            continue
        count = f"{x.count} x " if x.count > 1 else ""
        text = (
            f"memory={budget}: a budget of {format_bytes(budget)}, in which backward computes such "
            "values again; or jax.checkpoint around the line"
        )
        room = format_bytes(target.device.usable_bytes)
        found.append(
            Stall(
                kind=RESIDUAL,
                what=f"{x.name} leaves {count}{x.shape} for backward, {format_bytes(x.num_bytes)} "
                f"of the {room} that a program may hold",
                line=x.line,
                # It is written in forward and read in backward.
                seconds=2 * target.memory_s(x.num_bytes),
                remedy=Remedy(text=text, changes={"memory": budget}),
            )
        )
    return found


def _seconds(event: Event) -> float:
    return event.end_s - event.start_s


def _has(event: Event, dims: str) -> bool:
    return event.lane == COMPUTE and isinstance(event.what, Origin) and dims in event.what.dims
