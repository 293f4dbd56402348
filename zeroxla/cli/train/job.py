"""The main job: train a model with ZeRO-3, over stages or not, into a run folder."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zeroxla.checkpoint.checkpointer import Checkpointer
from zeroxla.checkpoint.errors import SaveError
from zeroxla.cli.interrupt import StopRequest, stop_on_signal
from zeroxla.cli.run_folder import CHECKPOINTS, NoRunFolder, RunFolder, read_config
from zeroxla.cli.train.options import RunOptions, TrainOptions
from zeroxla.cli.train.output import Output
from zeroxla.cli.train.plot import plot_run
from zeroxla.cli.train.setup import (
    check_same,
    circumstances,
    mesh_for,
    microbatches_for,
    optimizer_for,
    schedule_for,
)
from zeroxla.cli.train.stages import Stages
from zeroxla.cli.train.task import make_task
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.batches import global_batch, process_shard
from zeroxla.mesh.processes.environment import STARTED
from zeroxla.mesh.processes.exchange import agree, on_first
from zeroxla.step.disk.steps import has_disk
from zeroxla.step.make import make_step


class UsageError(ValueError):
    """An option or an input cannot work; the text says why and what to do."""


def train(options: TrainOptions) -> int:
    """Run the job, printing what it does.

    Args:
      options: What to train, on what, and where to write.

    Returns:
      The exit status: 0, also when interrupted and saved; 1 if the last state could not be saved.

    Raises:
      UsageError: An option or an input cannot work; found before the first step.
      RunFolderError: Something besides a checkpoint could not be written at the end.
    """
    # In a file or a pipe the tables need not be cut to a terminal's width.
    width = None if sys.stdout.isatty() else 120
    try:
        mesh = mesh_for(options)
        # Of several processes the first one speaks, and writes the run folder.
        job = _TrainJob(options, mesh, Output(width))
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    with contextlib.closing(job):
        return job.run()


class _TrainJob:
    """One run: what is decided before the first step, and the loop."""

    def __init__(self, options: TrainOptions, mesh: Mesh, output: Output) -> None:
        run, seed = options.output, options.training.seed
        self.options, self.mesh, self.output = options, mesh, output
        self.state: Any  # a TrainState; None until it is made
        self.task = make_task(options, run.run if run.resume else None)
        # Each process cuts its own rows of every batch.
        index, count = process_shard(mesh)
        self.batches = iter(self.task.training(index, count))

        def own_rows(x: np.ndarray) -> np.ndarray:
            return np.split(x, count)[index]

        self.valid_batches = [
            global_batch(jax.tree.map(own_rows, batch), mesh) for batch in self.task.validation()
        ]

        self.schedule = schedule_for(options)
        config = getattr(ZeroConfig, options.mesh.zero)(
            compute_dtype=options.mesh.compute_dtype,
            accumulate=microbatches_for(options, mesh),
            persistence_threshold=options.mesh.persistence_threshold,
            offload=options.offload.offload(options.offload.offload_path),
        )
        optimizer = optimizer_for(options, self.schedule)
        self.step = make_step(self.task.model, self.mesh, optimizer, config=config)
        # Traces the model, so that what does not fit the devices is found before files are made.
        shapes = self.step.abstract_state(self.valid_batches[0])
        # And so is a disk without room.
        self.on_disk = self.step.disk.writer(shapes) if has_disk(shapes) else None
        self.stages: Stages | None = None
        if options.pipeline.pipe > 1:
            self.stages = Stages.of(self.step, self.task.model)

        started = os.environ.get(STARTED) or time.strftime("%Y%m%d-%H%M%S")
        self.path = run.run or Path("runs") / f"train-{started}"
        data = self.task.data
        here = circumstances({data: self.task.record()}, self.mesh)
        agree(data, {"fingerprint": here[data]["fingerprint"]}, "give all hosts the same files")
        folder = functools.partial(on_first, "run folder")
        if run.resume:
            check_same(read_config(self.path), here, data)
            self.checkpoints = self.checkpointer(run)
            restored = self.checkpoints.restore(self.step)
            self.done, self.state = restored.number, restored.state
            self.batches.set_state(restored.position)
            found = folder(
                lambda: RunFolder.reopen(self.path, step=self.done, report=self.output.warn)
            )
        else:
            self.state = self.task.begin(self.step, jax.random.key(seed))  # else made in run()
            record = {"command": "train", "options": options.to_dict(), **here}
            found = folder(lambda: self.new_folder(record))
            self.checkpoints = self.checkpointer(run)
            self.done = 0
        self.folder = found or NoRunFolder()

    def checkpointer(self, run: RunOptions) -> Checkpointer:
        return Checkpointer(
            self.path / CHECKPOINTS, keep=run.keep, every=run.save_every, report=self.output.warn
        )

    def new_folder(self, record: dict[str, Any]) -> RunFolder:
        folder = RunFolder.create(self.path, record, self.output.warn)
        self.task.keep(self.path)
        return folder

    def run(self) -> int:
        num_steps = self.options.training.steps
        self.output.setup(self.mesh, self.task.source)
        if self.done:
            self.output.print(f"Resuming {self.path} after step {self.done}")
        if self.state is None:
            key = jax.random.key(self.options.training.seed)
            self.state = self.step.init(key, self.valid_batches[0])
        self.output.program(self.step, self.state, self.valid_batches[0], self.stages)
        if self.stages:
            self.stages.write(self.folder)
        with (
            stop_on_signal(lambda: self.output.stopping("step")) as stop,
            self.output.progress(num_steps, self.done) as self.bar,
        ):
            self.loop(num_steps, stop)
        if self.done < num_steps:
            return self.finish_interrupted()
        return self.finish()

    def loop(self, num_steps: int, stop: StopRequest) -> None:
        output = self.options.output
        waiting = None  # the step before: its metrics are read while the devices do the next one
        self.clock = time.perf_counter()
        stopping = stop.requested_by(self.done)
        while self.done < num_steps and not stopping:
            batch = global_batch(next(self.batches), self.mesh)
            self.state, metrics = self.step(self.state, batch)
            self.done += 1
            self.record(waiting)
            waiting = (self.done, metrics)
            stopping = stop.requested_by(self.done)
            evaluate = self.done % output.eval_every == 0 and self.done < num_steps
            save = self.done % output.save_every == 0 and self.done < num_steps
            if evaluate or save or stopping:
                self.record(waiting)
                waiting = None
                if evaluate:
                    self.evaluate()
                if save:
                    self.save()
                self.clock = time.perf_counter()
        self.record(waiting)

    def record(self, waiting: tuple[int, dict[str, Any]] | None) -> None:
        """Write one step's metrics; reading them waits until the step is done."""
        if waiting is None:
            return
        number, metrics = waiting
        values = {
            name: np.asarray(value).item()
            for name, value in jax.device_get(metrics).items()
            if name not in ("examples_per_s", "tokens_per_s") and np.ndim(value) == 0
        }
        now = time.perf_counter()
        rate = self.task.num_counted / (now - self.clock)
        values[f"{self.task.counted}_per_s"] = rate
        values["learning_rate"] = np.asarray(self.schedule(number - 1)).item()
        self.clock = now
        self.folder.log(number, values)
        shares = "".join(f", {name} {values[name]:.0%}" for name in self.task.metrics)
        skipped = f", {values['skipped']:.0f} skipped" if values["skipped"] else ""
        disk = "".join(
            f", {values[name] / 1e6:,.0f} MB/s {way}"
            for way, name in (("in", "disk_read_bytes_per_s"), ("out", "disk_write_bytes_per_s"))
            if name in values
        )
        text = f"loss {values['loss']:.3f}{shares}{skipped}, {rate:,.0f} {self.task.counted}/s"
        self.bar.update(self.bar.task_ids[0], completed=number, status=text + disk)

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss and metrics on the validation batches, after recording them."""
        found = jax.device_get([self.step.eval(self.state, batch) for batch in self.valid_batches])
        means = {
            name: float(np.mean([values[name] for values in found], dtype=np.float64))
            for name in ("loss", *self.task.metrics)
        }
        self.folder.log(self.done, {f"valid_{name}": value for name, value in means.items()})
        shares = "".join(f", {name} {means[name]:.1%}" for name in self.task.metrics)
        self.output.print(f"step {self.done}: validation loss {means['loss']:.4f}{shares}")
        return means

    def save(self, *, last: bool = False) -> bool:
        """Write a checkpoint, the last one until it is whole; report a failure and return False."""
        position, config = self.batches.get_state(), self.step.config
        try:
            self.checkpoints.save(self.done, self.state, position, config=config, force=last)
            if last:
                self.checkpoints.wait()
        except SaveError as error:
            self.output.warn(str(error))
            return False
        return True

    def finish_interrupted(self) -> int:
        saved = self.save(last=True)
        self.folder.close()
        if saved:
            self.output.stopped(f"step {self.done}", "train", self.path)
        return 0 if saved else 1

    def finish(self) -> int:
        saved = self.save(last=True)  # first: it is what cannot be made again
        values = self.evaluate()
        self.folder.close()
        picture = plot_run(
            self.folder.metrics(),
            guess=self.task.guess,
            guess_name=self.task.guess_name,
            unit=self.task.unit,
            metrics=self.task.metrics,
        )
        self.folder.write_figure("loss.png", picture)
        self.task.show(self.step, self.state, self.folder, self.output)
        self.output.result(values, self.task, self.path)
        return 0 if saved else 1

    def close(self) -> None:
        self.checkpoints.close()
