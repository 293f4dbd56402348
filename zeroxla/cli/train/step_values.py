"""`StepValues`: what is recorded and shown of each training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from zeroxla.cli.train.task import Task
from zeroxla.cli.train.utilization import peak_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepValues:
    """Turns a step's metrics into values and a line.

    Attributes:
      task: the model and its data.
      num_rows: the rows of a batch.
      schedule: the learning rate by step; None if it is the optimizer's own matter.
      least_s: the seconds that the model's products of a step take at the devices' peak; None if
        that is not known.
      of_program: what is the same in every step, by name: bytes on the wire and in memory.
    """

    task: Task
    num_rows: int
    schedule: optax.Schedule | None
    least_s: float | None
    of_program: Mapping[str, float]

    def read(
        self, number: int, metrics: Mapping[str, Any], seconds: float, phases: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the values to record; reading them waits until the step is done.

        Args:
          number: the step.
          metrics: its metrics, on the devices.
          seconds: the time since the step before.
          phases: the host's seconds in each phase since then.
        """
        values = {
            name: np.asarray(value).item()
            for name, value in jax.device_get(dict(metrics)).items()
            if name not in ("examples_per_s", "tokens_per_s") and np.ndim(value) == 0
        }
        values |= {"examples": number * self.num_rows, "step_s": seconds, **phases}
        values[f"{self.task.counted}_per_s"] = self.task.num_counted / seconds
        if self.least_s is not None:
            values["mfu"] = self.least_s / seconds
        if self.schedule is not None:
            values["learning_rate"] = np.asarray(self.schedule(number - 1)).item()
        return {**values, **self.of_program, **peak_bytes()}

    def line(self, values: Mapping[str, float]) -> str:
        """Return the text beside the progress bar."""
        numbers = "".join(f", {name} {values[name]:.2f}" for name in self.task.numbers)
        shares = numbers + "".join(f", {name} {values[name]:.0%}" for name in self.task.metrics)
        skipped = f", {values['skipped']:.0f} skipped" if values["skipped"] else ""
        rate, counted = values[f"{self.task.counted}_per_s"], self.task.counted
        used = f", MFU {values['mfu']:.1%}" if "mfu" in values else ""
        disk = "".join(
            f", {values[name] / 1e6:,.0f} MB/s {way}"
            for way, name in (("in", "disk_read_bytes_per_s"), ("out", "disk_write_bytes_per_s"))
            if name in values
        )
        return f"loss {values['loss']:.3f}{shares}{skipped}, {rate:,.0f} {counted}/s{used}{disk}"
