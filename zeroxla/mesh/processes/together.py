"""`together`: a failure in one process stops all of them, as the others would wait for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from zeroxla.mesh.processes.exchange import exchange

_T = TypeVar("_T")
_TIMEOUT_S = 24 * 3600.0
"""Seconds. A process may write or read for hours while the others wait."""


def together(
    topic: str,
    action: Callable[[], _T],
    *,
    timeout: float = _TIMEOUT_S,
    name: str | None = None,
) -> _T:
    """Run an action in every process, and return when all processes have finished theirs.

    Args:
      topic: name of the action, for messages.
      action: this process's part. It must not wait for another process.
      timeout: seconds to wait for the other processes.
      name: as in `exchange`.

    Raises:
      Exception: the action raised it in this process.
      ValueError: the action failed in another process.
      TimeoutError: another process did not finish in time.
    """
    try:
        result = action()
    except Exception as error:
        exchange(topic, json.dumps(str(error)), timeout=timeout, name=name)
        raise
    said = exchange(topic, json.dumps(None), timeout=timeout, name=name)
    for process, text in enumerate(map(json.loads, said)):
        if text is not None:
            raise ValueError(f"process {process} failed at its {topic}: {text}")
    return result
