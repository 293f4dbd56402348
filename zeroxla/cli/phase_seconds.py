"""`PhaseSeconds`: where the host's time goes while a run's loop turns."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import jax


class PhaseSeconds:
    """Adds up the seconds of named phases, and shows each phase in profiles.

    >>> seconds = PhaseSeconds()
    >>> with seconds("data"):
    ...     batch = sum(range(1000))
    >>> list(seconds.taken())
    ['data_s']
    >>> seconds.taken()
    {}
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count what runs inside for a phase. Phases do not nest."""
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(phase):
            yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def taken(self) -> dict[str, float]:
        """Return the seconds of each phase as "PHASE_s", and begin anew."""
        found, self._seconds = self._seconds, {}
        return {f"{phase}_s": seconds for phase, seconds in found.items()}
