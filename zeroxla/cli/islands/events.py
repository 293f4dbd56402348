"""What happens among islands, as a coordinator tells it, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def in_words(event: Mapping[str, Any]) -> str:
    """Return a line about an event of a `Coordinator`."""
    match event["what"]:
        case "joined":
            return f"{_process(event)} has joined"
        case "lost":
            return f"{_process(event)} has left"
        case "started":
            return f"{_islands(event['slots'])} begin at round {event['round']}"
        case "closed":
            absent = event["left_out"]
            without = f", without {_islands(absent)}" if absent else ""
            return (
                f"round {event['round']}: {_islands(event['slots'])} in {event['seconds']:.2f} s"
                f"{without}"
            )
        case "unsaved":
            return f"cannot write {event['path']} ({event['error']}); rounds wait until it can"
    return str(dict(event))


def is_rare(event: Mapping[str, Any]) -> bool:
    """Return whether an event is more than a round in which all took part."""
    return event["what"] != "closed" or bool(event["left_out"])


def _process(event: Mapping[str, Any]) -> str:
    island = f"island {event['slot']}"
    return f"process {event['process']} of {island}" if event["process"] else island


def _islands(slots: Iterable[int]) -> str:
    numbers = list(slots)
    return f"island{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
