"""The job of `zeroxla train`: train a model with ZeRO-3, over stages or not, into a run folder."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zeroxla.cli.deepspeed_file import keep_deepspeed
from zeroxla.cli.divergence import Divergence
from zeroxla.cli.interrupt import StopRequest
from zeroxla.cli.job import Job
from zeroxla.cli.run_job import run_job
from zeroxla.cli.train.feed import Feed
from zeroxla.cli.train.island import (
    AsIsland,
    inner_of,
    num_taken,
    status_of,
    steps_of,
)
from zeroxla.cli.train.make_task import make_task
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.train.output import Output
from zeroxla.cli.train.plot import plot_run
from zeroxla.cli.train.setup import (
    config_for,
    mesh_for,
    optimizer_for,
    schedule_for,
    takes_file_optimizer,
)
from zeroxla.cli.train.stages import Stages
from zeroxla.cli.train.step_values import StepValues
from zeroxla.cli.train.targets import count_targets
from zeroxla.cli.train.utilization import peak_flops_per_s
from zeroxla.step.disk.steps import has_disk
from zeroxla.step.make import make_step
from zeroxla.step.state import TrainState


def train(options: TrainOptions, slot: int | None = None) -> int:
    """Run the job, and print its progress and results.

    Args:
      options: the model, the data and the run folder.
      slot: the number of the island that this run is; None if it is none.

    Returns, raises: as `run_job`.
    """
    # The mesh first: it starts JAX, and then it is known which process speaks.
    return run_job(lambda: TrainJob(options, mesh_for(options), Output(), slot))


class TrainJob(Job[TrainOptions, Output]):
    """A run of `zeroxla train`."""

    command, unit, label = "train", "step", "training"

    def __init__(
        self, options: TrainOptions, mesh: Mesh, output: Output, slot: int | None = None
    ) -> None:
        super().__init__(options, mesh, output, slot)
        self.state: Any  # a TrainState, or an IslandState; None until it is made
        config = config_for(options, mesh, self.path if options.output.resume else None)
        run = self.path if options.output.resume else None
        self.task = make_task(options, run, output.warn)
        self.schedule, optimizer = None, config.optimizer
        if not takes_file_optimizer(options, config):
            self.schedule = schedule_for(options)
            optimizer = optimizer_for(options, self.schedule)
            config = dataclasses.replace(config, optimizer=None)
        self.step = make_step(
            self.task.model,
            mesh,
            optimizer,
            loss=self.task.loss,
            config=config,
            weights=options.pipeline.weights,
        )
        self.island = None if slot is None else AsIsland(self.step, slot, output.warn)
        # Traces the model, so that what does not fit the devices is found before files are made.
        self.feed = Feed(self.task, self.step, slot or 0)
        self.batches = self.feed.batches
        # And so is a disk without room.
        shapes = self.feed.shapes
        self.on_disk = self.step.disk.writer(shapes) if has_disk(shapes) else None
        self.divergence = Divergence(limit=options.training.max_skipped, warn=output.warn)
        self.stages: Stages | None = None
        if options.pipeline.pipe > 1:
            self.stages = Stages.of(self.step, self.task.model)
        if not options.output.resume:
            key = jax.random.key(options.training.seed)
            self.state = self.task.begin(self.step, key)  # None: it is made in begin()
        self.open_run(self.task.data, self.task.record())

    @property
    def num_steps(self) -> int:
        return self.options.training.steps

    @property
    def source(self) -> str:
        return self.task.source

    def keep(self) -> None:
        self.task.keep(self.path)
        keep_deepspeed(self.options.zero, self.path)

    def restore(self) -> None:
        if self.island is None:
            restored = self.checkpoints.restore(self.step)
        else:
            restored = self.island.restore(self.checkpoints)
        self.done, self.state = restored.number, restored.state
        self.batches.set_state(restored.position)

    def begin(self) -> None:
        if self.state is None:
            key = jax.random.key(self.options.training.seed)
            self.state = self.step.init(key, self.feed.example)
        resumed = self.options.output.resume
        self.feed.begin(inner_of(self.state), self.path, resumed=resumed)
        self.valid_batches = self.feed.validation(inner_of(self.state))
        rows = self.valid_batches[0]
        self.program = self.output.program(self.step, inner_of(self.state), rows, self.stages)
        peak = peak_flops_per_s(self.mesh.devices.flat[0].device_kind, self.mesh.size)
        self.values = StepValues(
            task=self.task,
            num_rows=self.options.text.batch,
            schedule=self.schedule,
            least_s=self.step.model_flops() / peak if peak else None,
            of_program=self.program.values(),
        )
        if self.stages:
            self.stages.write(self.folder)
        if self.island is not None:
            self.state = self.island.begin(
                self.state,
                self.batches,
                self.options.text.batch,
                resumed=self.options.output.resume,
            )
            self.done = self.done or steps_of(self.state)
            self.output.print(
                f"Island {self.island.slot} begins after step {self.done}, and after "
                f"{num_taken(self.batches)} batches of its part of the data"
            )

    def loop(self, stop: StopRequest) -> None:
        output = self.options.output
        waiting = None  # the step before: its metrics are read while the devices do the next one
        self.clock = time.perf_counter()
        stopping = stop.requested_by(self.done)
        while self.done < self.num_steps and not stopping:
            batch = self.feed.next(inner_of(self.state), self.observer.seconds)
            counts = count_targets(batch)
            take = self.step if self.island is None else self.island.step
            self.observer.profiler.before(self.done + 1, self.settle)
            with self.observer.profiler.step(self.done + 1), self.observer.seconds("dispatch"):
                self.state, metrics = take(self.state, batch)
            self.done += 1
            if count := self.observer.profiler.after(self.done, self.settle):
                self.output.profile(self.observer.profiler.folder, self.program, count)
            phases = self.observer.seconds.taken()
            self.record(waiting)
            waiting = (self.done, {**metrics, **counts}, phases)
            stopping = stop.requested_by(self.done)
            evaluate, save = self.is_due(output.eval_every), self.is_due(output.save_every)
            if evaluate or save or stopping:
                self.record(waiting)
                waiting = None
                if evaluate:
                    if save and self.island is not None:  # The checkpoint has what is evaluated.
                        self.state = self.island.settle(self.state)
                    self.evaluate()
                elif save:
                    self.check_loss()
                if save and self.divergence.may_save(self.done):
                    with self.observer.seconds("save"):
                        self.save()
                    self.log(self.done, self.observer.seconds.taken())
                self.clock = time.perf_counter()
        self.record(waiting)
        if self.done == self.num_steps:
            if self.island is not None:
                self.state = self.island.settle(self.state)
            self.results = self.evaluate()  # before the last checkpoint, which may replace others
        self.divergence.check_end(self.done)

    def settle(self) -> None:
        """Wait until the devices have done all steps."""
        jax.block_until_ready(inner_of(self.state))

    def record(self, waiting: tuple[int, dict[str, Any], dict[str, float]] | None) -> None:
        """Write one step's metrics; reading them waits until the step is done."""
        if waiting is None:
            return
        number, metrics, phases = waiting
        with self.observer.seconds("wait"):
            jax.block_until_ready(metrics)
        now, phases = time.perf_counter(), phases | self.observer.seconds.taken()
        values = self.values.read(number, metrics, now - self.clock, phases)
        self.clock = now
        self.log(number, values)
        self.show_progress(number, self.values.line(values) + status_of(values))
        self.divergence.took(
            number,
            finite=bool(values["finite"]),
            loss=values["loss"],
            scaled="loss_scale" in values,
        )

    def result(self) -> TrainState:
        """Return the state with what has been learned; an island's has what all islands share."""
        return self.state if self.island is None else self.island.shared(self.state)

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss and metrics on the validation batches, after recording them."""
        state = self.result()
        started = time.perf_counter()
        found = jax.device_get([self.step.eval(state, batch) for batch in self.valid_batches])
        seconds = time.perf_counter() - started
        means = {
            name: float(np.average([float(v[name]) for v in found], weights=self.feed.weights))
            for name in ("loss", *self.task.numbers, *self.task.metrics)
        }
        named = {f"valid_{name}": value for name, value in means.items()}
        self.log(self.done, {**named, "eval_s": seconds})
        numbers = "".join(f", {name} {means[name]:.4f}" for name in self.task.numbers)
        shares = numbers + "".join(f", {name} {means[name]:.1%}" for name in self.task.metrics)
        self.output.print(f"step {self.done}: validation loss {means['loss']:.4f}{shares}")
        self.divergence.evaluated(self.done, means["loss"])
        return means

    def check_loss(self) -> None:
        """Compute the loss of one validation batch, to learn whether the last update spoiled the
        parameters. The step's own loss was computed before that update."""
        values = self.step.eval(inner_of(self.state), self.valid_batches[0])
        self.divergence.evaluated(self.done, np.asarray(values["loss"]).item())

    def write_checkpoint(self, *, last: bool) -> None:
        position, config = self.batches.get_state(), self.step.config
        saved = self.state
        if self.island is not None:
            # The last state has been settled, or is saved at once after a request to stop.
            self.state, saved = self.island.to_save(self.state, settle=not last)
        self.checkpoints.save(self.done, saved, position, config=config, force=last)

    def finish(self) -> None:
        self.folder.close()
        picture = plot_run(
            self.folder.metrics(),
            guess=self.task.guess,
            guess_name=self.task.guess_name,
            unit=self.task.unit,
            numbers=self.task.numbers,
            metrics=self.task.metrics,
        )
        self.folder.write_figure("loss.png", picture)
        self.task.show(self.step, self.result(), self.folder, self.output)
        self.output.result(self.results, self.task, self.path)

    def close(self) -> None:
        self.batches.close()
        if self.island is not None:
            self.island.close()
        super().close()
