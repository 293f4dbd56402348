"""What one process finds wrong stops all of them: the others would wait for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from zeroxla.mesh.processes.exchange import exchange

_T = TypeVar("_T")
_TIMEOUT_S = 24 * 3600.0
"""A process may be long at writing or reading what others wait for."""


def together(
    topic: str,
    action: Callable[[], _T],
    *,
    timeout: float = _TIMEOUT_S,
    name: str | None = None,
) -> _T:
    """Do something in every process, and go on when all have.

    Args:
      topic: what it is, for messages.
      action: this process's part; it must not wait for another process.
      timeout: seconds to wait for the others.
      name: as in `exchange`.

    Raises:
      Exception: what the action raised.
      ValueError: it failed in another process.
      TimeoutError: another process did not come.
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
