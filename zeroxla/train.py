"""The main job: train a byte-level GPT on text with ZeRO-3, into a run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console
from rich.markup import escape

import zeroxla.inspect
from models import GPT
from zeroxla import data
from zeroxla.checkpoint import Checkpoints, SaveError
from zeroxla.config import ZeroConfig
from zeroxla.interrupt import StopRequest
from zeroxla.mesh import make_mesh, simulate
from zeroxla.progress import TrainingProgress
from zeroxla.run_folder import CHECKPOINTS, RunFolder, RunFolderError, read_config
from zeroxla.sample import continue_text
from zeroxla.state import TrainState, full_params
from zeroxla.step import Step, make_step
from zeroxla.train_options import TrainOptions

NUM_SIMULATED = 8
SIMULATED_NODES = 2


class UsageError(ValueError):
    """An option or an input cannot work; the text says why and what to do."""


def train(options: TrainOptions) -> int:
    """Run the job; print what it does.

    Args:
      options: What to train, on what, and where to write.

    Returns:
      The exit status: 0, or 1 if the last checkpoint could not be written.

    Raises:
      UsageError: An option or input cannot work. Raised before the run folder is touched, except
        when that folder cannot be written.
      RunFolderError: A file other than a checkpoint could not be written at the end.
    """
    console = Console(highlight=False)
    with _usage_errors():
        job = _Job(options, console)
    try:
        return job.run()
    finally:
        job.close()


class _Job:
    """One run: what was decided before the first step, and the loop."""

    def __init__(self, options: TrainOptions, console: Console):
        text, out = options.text, options.output
        self._options, self._console = options, console
        self._corpus = corpus = data.load_corpus(text.data, holdout=text.holdout)
        self._batches = data.training_batches(
            corpus.train, batch=text.batch, length=text.length, seed=options.training.seed
        )
        self._valid = list(
            data.validation_batches(
                corpus.valid, batch=text.batch, length=text.length, num_batches=out.eval_batches
            )
        )
        self._unigram_entropy = data.unigram_entropy(corpus.valid)
        self._mesh = _mesh(options)
        self._schedule = _schedule(options)
        self._model = GPT(
            vocab=data.VOCABULARY, length=text.length, **dataclasses.asdict(options.model)
        )
        self._step = make_step(
            self._model,
            self._mesh,
            _optimizer(options, self._schedule),
            config=ZeroConfig(
                compute_dtype=options.mesh.compute_dtype,
                accumulate=options.mesh.accumulate,
                persistence_threshold=options.mesh.persistence_threshold,
            ),
        )
        # Traces the model: an option that does not fit the devices is found before any file is made.
        self._shapes = self._step.abstract_state(self._valid[0])

        self._path = out.run or Path("runs") / time.strftime("train-%Y%m%d-%H%M%S")
        config = {"options": options.to_dict(), **_circumstances(corpus, self._mesh)}
        if out.resume:
            _check_same_circumstances(config, read_config(self._path))
            self._checkpoints = Checkpoints(self._path / CHECKPOINTS, keep=out.keep)
            self._folder = RunFolder.reopen(
                self._path, step=self._checkpoints.latest() or 0, report=self._warn
            )
        else:
            self._folder = RunFolder.create(self._path, config, self._warn)
            self._checkpoints = Checkpoints(self._path / CHECKPOINTS, keep=out.keep)

    def run(self) -> int:
        options, out = self._options, self._options.output
        num_steps = options.training.steps
        self._print_setup()
        self._iterator = iter(self._batches)
        if out.resume:
            done, state, position = self._checkpoints.restore(self._shapes)
            self._iterator.set_state(position)
            self._console.print(f"Resumed {self._path} after step {done}.")
        else:
            done = 0
            state = self._step.init(jax.random.key(options.training.seed), self._valid[0])

        with (
            StopRequest(on_request=self._announce_stop) as stop,
            TrainingProgress(self._console, num_steps, done) as progress,
        ):
            waiting = None  # metrics of the step before, read while the devices work on this one
            clock = time.perf_counter()
            while done < num_steps and not stop.requested:
                state, metrics = self._step(state, next(self._iterator))
                done += 1
                ahead = (done, metrics)
                waiting, clock = self._record(waiting, clock, progress), clock
                waiting = ahead
            ...
