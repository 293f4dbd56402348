"""`Profiler`: a trace of some steps of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from zeroxla.cli.tracking.profiled_steps import ProfiledSteps

FOLDER = "profile"
"""The folder of a run with its profiles."""


class Profiler:
    """Traces the devices and the host while some steps run. JAX must have started.

    Args:
      steps: the steps; None traces nothing.
      folder: the folder for traces.
    """

    def __init__(self, steps: ProfiledSteps | None, folder: Path) -> None:
        self._steps, self.folder = steps, folder
        self._first: int | None = None  # the first step of a trace that runs

    def before(self, number: int, settle: Callable[[], Any]) -> None:
        """Begin if this step is the first of those that the run still takes.

        Args:
          number: the step that comes next.
          settle: waits until the devices have done all earlier steps.
        """
        steps = self._steps
        if steps is None or self._first is not None or not steps.first <= number <= steps.last:
            return
        settle()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a line for each call of Python hides everything else
        jax.profiler.start_trace(
            str(self.folder), create_perfetto_trace=True, profiler_options=options
        )
        self._first = number

    def step(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which viewers count what runs for a step."""
        if self._first is None:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("step", step_num=number)

    def after(self, number: int, settle: Callable[[], Any]) -> int:
        """End if this step was the last one; return the number of steps in the trace, or 0.

        Args:
          number: the step that was taken.
          settle: waits until the devices have done it.
        """
        if self._first is None or self._steps is None or number < self._steps.last:
            return 0
        settle()
        first = self._first
        self.close()
        return number - first + 1

    def close(self) -> None:
        """End a trace that runs."""
        if self._first is not None:
            self._first = None
            jax.profiler.stop_trace()
