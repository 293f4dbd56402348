"""The main job: train a language model on text with ZeRO-3, into a run folder."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zeroxla import data
from zeroxla.checkpoint.checkpointer import Checkpointer
from zeroxla.checkpoint.failures import SaveError
from zeroxla.config import ZeroConfig
from zeroxla.hosts.batches import global_batch, process_shard
from zeroxla.hosts.environment import STARTED
from zeroxla.hosts.exchange import agree, on_first
from zeroxla.interrupt import StopRequest, stop_on_signal
from zeroxla.run_folder import CHECKPOINTS, NoRunFolder, RunFolder, read_config
from zeroxla.sample import continue_text
from zeroxla.state import full_params
from zeroxla.step import make_step
from zeroxla.train_model import choose, keep
from zeroxla.train_options import RunOptions, TrainOptions
from zeroxla.train_output import Output
from zeroxla.train_setup import (
    check_same,
    circumstances,
    mesh_for,
    optimizer_for,
    schedule_for,
)
from zeroxla.weights.pretrained import from_pretrained


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
        job = _Job(options, mesh, Output(width))
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    with contextlib.closing(job):
        return job.run()


class _Job:
    """One run: what is decided before the first step, and the loop."""

    def __init__(self, options: TrainOptions, mesh: Mesh, output: Output) -> None:
        text, run = options.text, options.output
        self.options, self.mesh, self.output = options, mesh, output
        self.state: Any  # a TrainState; None until it is made
        choice = choose(options, run.run if run.resume else None)
        self.model, self.vocabulary = choice.model, choice.vocabulary
        corpus = data.load_corpus(text.data, holdout=text.holdout)
        self.corpus = self.vocabulary.corpus(corpus)
        shape = {"batch": text.batch, "length": text.length}
        seed = options.training.seed
        # Each process cuts its own rows of every batch.
        index, count = process_shard(mesh)
        part = {"shard_index": index, "shard_count": count}
        self.batches = iter(data.training_batches(self.corpus.train, **shape, **part, seed=seed))
        valid = data.validation_batches(self.corpus.valid, **shape, num_batches=run.eval_batches)
        self.valid_batches = [
            global_batch({"tokens": np.split(batch["tokens"], count)[index]}, mesh)
            for batch in valid
        ]
        self.unigram_entropy = data.unigram_entropy(self.corpus.valid)

        self.schedule = schedule_for(options)
        config = getattr(ZeroConfig, options.mesh.zero)(
            compute_dtype=options.mesh.compute_dtype,
            accumulate=options.mesh.accumulate,
            persistence_threshold=options.mesh.persistence_threshold,
        )
        optimizer = optimizer_for(options, self.schedule)
        self.step = make_step(self.model, self.mesh, optimizer, config=config)
        # Traces the model, so that what does not fit the devices is found before files are made.
        shapes = self.step.abstract_state(self.valid_batches[0])

        started = os.environ.get(STARTED) or time.strftime("%Y%m%d-%H%M%S")
        self.path = run.run or Path("runs") / f"train-{started}"
        here = circumstances(self.corpus, self.mesh)
        agree("text", {"fingerprint": here["text"]["fingerprint"]}, "give all hosts the same files")
        folder = functools.partial(on_first, "run folder")
        if run.resume:
            check_same(read_config(self.path), here)
            self.checkpoints = self.checkpointer(run)
            restored = self.checkpoints.restore(shapes)
            self.done, self.state = restored.number, restored.state
            self.batches.set_state(restored.position)
            found = folder(
                lambda: RunFolder.reopen(self.path, step=self.done, report=self.output.warn)
            )
        else:
            key, init = jax.random.key(seed), options.model.init
            if init is not None:
                self.state = from_pretrained(self.model, init, self.step, key=key)
            record = {"options": options.to_dict(), **here}
            found = folder(lambda: self.new_folder(record))
            self.checkpoints = self.checkpointer(run)
            self.done = 0
            if init is None:
                self.state = None  # made in run(), after the set-up is printed
        self.folder = found or NoRunFolder()

    def checkpointer(self, run: RunOptions) -> Checkpointer:
        return Checkpointer(
            self.path / CHECKPOINTS, keep=run.keep, every=run.save_every, report=self.output.warn
        )

    def new_folder(self, record: dict[str, Any]) -> RunFolder:
        folder = RunFolder.create(self.path, record, self.output.warn)
        keep(self.options, self.path)
        return folder

    def run(self) -> int:
        num_steps = self.options.training.steps
        self.output.setup(self.mesh, self.corpus, self.vocabulary.unit)
        if self.done:
            self.output.print(f"Resuming {self.path} after step {self.done}")
        if self.state is None:
            key = jax.random.key(self.options.training.seed)
            self.state = self.step.init(key, self.valid_batches[0])
        self.output.program(self.step, self.state, self.valid_batches[0])
        with (
            stop_on_signal(self.announce_stop) as stop,
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
        text = self.options.text
        values["tokens_per_s"] = text.batch * text.length / (now - self.clock)
        values["learning_rate"] = np.asarray(self.schedule(number - 1)).item()
        self.clock = now
        self.folder.log(number, values)
        skipped = f", {values['skipped']:.0f} skipped" if values["skipped"] else ""
        self.bar.update(
            self.bar.task_ids[0],
            completed=number,
            status=f"loss {values['loss']:.3f}{skipped}, {values['tokens_per_s']:,.0f} tokens/s",
        )

    def evaluate(self) -> float:
        """Return the mean loss on the validation batches, after recording it."""
        losses = [self.step.eval(self.state, batch)["loss"] for batch in self.valid_batches]
        loss = float(np.mean(jax.device_get(losses), dtype=np.float64))
        self.folder.log(self.done, {"valid_loss": loss})
        self.output.print(f"step {self.done}: validation loss {loss:.4f}")
        return loss

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
            # As it was typed: in a virtual environment the bare name may not be on PATH.
            program = sys.argv[0] if Path(sys.argv[0]).name == "zeroxla" else "zeroxla"
            resume = f"{program} train --resume --run {shlex.quote(str(self.path))}"
            self.output.print(
                f"Stopped after step {self.done} and saved. Continue with:\n  {resume}"
            )
        return 0 if saved else 1

    def finish(self) -> int:
        saved = self.save(last=True)  # first: it is what cannot be made again
        loss = self.evaluate()
        sample = self.sample()
        self.folder.close()
        self.folder.plot(unigram_entropy=self.unigram_entropy, unit=self.vocabulary.unit)
        if sample:
            self.folder.write_text("sample.txt", sample)
        self.output.result(loss, self.unigram_entropy, self.vocabulary.unit, self.path)
        return 0 if saved else 1

    def sample(self) -> str:
        """Return the prompt with a sampled continuation, after printing it."""
        options = self.options.output
        if options.sample_bytes == 0:
            return ""
        params = full_params(self.state)  # all processes take part in this
        if jax.process_index() != 0:
            return ""
        apply = self.step.adapted.apply
        assert apply is not None
        numbers = continue_text(
            lambda params, tokens: jnp.asarray(apply(params, {}, tokens)),
            params,
            self.vocabulary.encode(options.prompt),
            num_tokens=options.sample_bytes,
            length=self.options.text.length,
            temperature=options.temperature,
            key=jax.random.key(self.options.training.seed),
        )
        continuation = self.vocabulary.decode(numbers)
        self.output.continuation(options.prompt, continuation)
        return options.prompt + continuation

    def announce_stop(self) -> None:
        self.output.print(
            "Stopping after this step; a second Ctrl-C stops at once, without saving."
        )

    def close(self) -> None:
        self.checkpoints.close()
