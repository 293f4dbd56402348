"""Reports of `zeroxla train --pipe` on its stages: printed, and kept in the run folder."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console
from rich.table import Table

from zeroxla import inspect
from zeroxla.cli.run_folder import NoRunFolder, RunFolder
from zeroxla.mesh.axes import PIPE
from zeroxla.pipeline.partition import Partition
from zeroxla.pipeline.pipeline import Pipeline
from zeroxla.step.step import Step

TEXT, PICTURE = "pipeline.txt", "schedule.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of a pipelined step.

    Attributes:
      partition: the layers of each stage.
      schedule: the work of each stage, tick by tick.
    """

    partition: Partition
    schedule: inspect.ScheduleReport

    @classmethod
    def of(cls, step: Step, pipeline: Pipeline) -> Stages:
        """Return the stages of a step that has seen a batch.

        Raises:
          ValueError: the layers cannot be cut so.
        """
        partition = step.describe()
        assert isinstance(partition, Partition)
        num_stages, count = step.mesh.shape[PIPE], step.config.num_micro_batches
        schedule = inspect.schedule(pipeline.schedule(num_stages, count, train=True))
        return cls(partition=partition, schedule=schedule)

    def tables(self) -> list[Table]:
        """Return the layers, the stages and the schedule as rich tables."""
        return [layer_table(self.partition), self.partition.table(), self.schedule.table()]

    def write(self, folder: RunFolder | NoRunFolder) -> None:
        """Write the tables and the picture of the schedule."""
        text = io.StringIO()
        console = Console(file=text, width=120)
        for table in self.tables():
            console.print(table)
        folder.write_text(TEXT, text.getvalue())
        folder.write_figure(PICTURE, self.schedule.plot())


def layer_table(partition: Partition) -> Table:
    """Return a table of the layers' parameters, with a line between stages."""
    cut = ", ".join(map(str, partition.boundaries))
    table = Table(title=f"Layers, cut at [{cut}]", title_justify="left")
    table.add_column("layer", justify="right")
    table.add_column("kind")
    table.add_column("parameters", justify="right")
    table.add_column("stage", justify="right")
    for stage, (first, end) in enumerate(zip(partition.boundaries, partition.boundaries[1:])):
        for i in range(first, end):
            layer = partition.layers[i]
            table.add_row(str(i), layer.kind, f"{layer.parameters:,}", str(stage))
        table.add_section()
    return table
