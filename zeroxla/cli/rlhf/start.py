"""`Start`: the model with which a run of `zeroxla rlhf` begins.

It has learned text, in this run or in another.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from zeroxla.checkpoint.checkpointer import Checkpointer
from zeroxla.checkpoint.weights.pretrained import from_pretrained
from zeroxla.cli.data import text as data
from zeroxla.cli.deepspeed_file import kept_deepspeed
from zeroxla.cli.errors import DivergedError
from zeroxla.cli.mesh_options import PipelineOptions
from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.run_folder import CHECKPOINTS, check_command, has_checkpoint, read_config
from zeroxla.cli.run_sections import stored_options
from zeroxla.cli.train.model import MODEL, ModelChoice, choose, keep, with_plan
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.train.setup import USUAL, optimizer_for, schedule_for
from zeroxla.cli.zero_options import zero_config
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.batches import process_shard
from zeroxla.pipeline.pipeline import Pipeline
from zeroxla.step.disk.steps import has_disk
from zeroxla.step.make import make_step
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step

START = "start"
"""The folder of a run with its first checkpoint, from which the reference is made."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """A language model, its text, and its first parameters.

    Attributes:
      options: the options of `zeroxla train` that made the model, or would make it.
      choice: the model and its vocabulary.
      corpus: the text, in the model's tokens.
      mesh, config: the mesh and the options of all steps.
      step: a step of the model without an optimizer.
      batch: the shapes of the batch that the step has seen.
      stages: the options of a pipeline.
    """

    options: TrainOptions
    choice: ModelChoice
    corpus: data.Corpus
    mesh: Mesh
    config: ZeroConfig
    step: Step
    batch: Any
    stages: PipelineOptions

    @staticmethod
    def of(options: RlhfOptions, mesh: Mesh, run: Path | None) -> Start:
        """Read the text and the options of the model with which a run begins.

        Args:
          options: the run's options.
          mesh: the mesh of all steps.
          run: the run's folder if it is resumed; None in a new run.

        Raises:
          ImportError, ValueError: the run of --init-run, the text or an option cannot work.
        """
        before, folder = _before(options, run)
        choice = choose(before, folder)
        text = before.text
        corpus = choice.vocabulary.corpus(data.load_corpus(text.data, holdout=text.holdout))
        config = zero_config(options, USUAL, deepspeed=kept_deepspeed(options.zero, run))
        without = dataclasses.replace(config, optimizer=None)
        stages = options.pipeline
        model = staged(choice.model, stages)
        step = make_step(model, mesh, optax.set_to_zero(), config=without, weights=stages.weights)
        batch = {"tokens": jax.ShapeDtypeStruct((text.batch, text.length + 1), np.int32)}
        step.abstract_state(batch)
        return Start(
            options=before,
            choice=choice,
            corpus=corpus,
            mesh=mesh,
            config=config,
            step=step,
            batch=batch,
            stages=stages,
        )

    def restored(self, folder: Path, report: Callable[[str], None]) -> TrainState:
        """Return a state with the parameters of the newest checkpoint in a folder."""
        like = self.step.shapes()
        if has_disk(like):  # they are read into the file of a state that is there
            like = self.step.init(jax.random.key(0), self.batch)
        with Checkpointer(folder, keep=None, report=report) as checkpointer:
            params = checkpointer.restore_params(like).params
        return self.step.init_from(params, jax.random.key(0), donate=True)

    def pretrained(self, folder: Path) -> TrainState:
        """Return a state with the weights in the folder of --init.

        Raises:
          ImportError, ValueError: as `zeroxla.from_pretrained`.
        """
        return from_pretrained(self.choice.model, folder, self.step)

    def learned(self, done: Callable[[int, float], None]) -> TrainState:
        """Let the model learn text, and return its state.

        Args:
          done: called after each step, with its number and the loss of the step before.

        Raises:
          DivergedError: the loss at the end is not finite.
        """
        options = self.options
        optimizer = optimizer_for(options, schedule_for(options))
        config = dataclasses.replace(self.config, optimizer=None)
        model, weights = staged(self.choice.model, self.stages), self.stages.weights
        step = make_step(model, self.mesh, optimizer, config=config, weights=weights)
        index, count = process_shard(self.mesh)
        batches = data.training_batches(
            self.corpus.train,
            batch=options.text.batch,
            length=options.text.length,
            seed=options.training.seed,
            shard_index=index,
            shard_count=count,
        )
        state, loss = None, None
        for i, rows in zip(range(options.training.steps), batches):
            batch = step.place(rows)
            if state is None:
                state = step.init(jax.random.key(options.training.seed), batch)
            before = float("nan") if loss is None else float(loss)  # while this step runs
            state, metrics = step(state, batch)
            loss = metrics["loss"]
            done(i + 1, before)
        assert state is not None
        assert loss is not None
        if not np.isfinite(float(loss)):
            raise DivergedError(
                f"the model did not learn the text: after {options.training.steps} steps "
                "(--pretrain-steps) its loss is not finite; look at the text of --data"
            )
        return self.step.init_from(state.params, jax.random.key(0), donate=True)

    def keep(self, run: Path, source: Path | None) -> None:
        """Copy the config and tokenizer of the model into the run's folder, if it came with some,
        from the folder of --init or the run of --init-run.

        Args:
          run: the run's folder.
          source: the folder of --init-run.

        Raises:
          ValueError: they cannot be copied.
        """
        if source is None:
            keep(self.options, run)  # of --init
        if source is None or not (source / MODEL).is_dir():
            return
        try:
            shutil.copytree(source / MODEL, run / MODEL, dirs_exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot copy {source / MODEL} to {run}: {error}") from error

    def prompts(self, options: RlhfOptions) -> Any:
        """Return an endless iterator of prompts, one array per iteration. They are pieces of the
        text; the iterator's position can be saved."""
        settings = options.settings
        return iter(
            data.training_batches(
                self.corpus.train,
                batch=settings.num_prompts,
                length=settings.prompt_length - 1,
                seed=options.learning.seed,
            )
        )


def actor_of(run: Path, model: Any) -> Any:
    """Return the model whose state a run's checkpoints hold: with adapters, if the actor has some.

    Args:
      run: the run's folder.
      model: the model without adapters.
    """
    storage = stored_options(RlhfOptions, run).as_storage()
    return model if storage.rank is None else with_plan(storage.with_adapters(model))


def _before(options: RlhfOptions, run: Path | None) -> tuple[TrainOptions, Path | None]:
    """Return the options with which the model learned text, and the folder of a run that may hold
    the model's files."""
    if run is not None:
        return stored_options(TrainOptions, run, "before"), run
    source = options.start.init_run
    if source is None:
        return options.as_train(), None
    source = source.expanduser()
    config = read_config(source)
    check_command(source, config, "train")
    stored = stored_options(TrainOptions, source)
    if stored.model.model != "gpt":
        raise ValueError(f"--init-run {source}: {stored.model.model} is no language model")
    if not has_checkpoint(source):
        raise ValueError(f"--init-run {source} holds no checkpoint yet; let it train until it has")
    if options.start.data:
        text = dataclasses.replace(stored.text, data=options.start.data)
        stored = dataclasses.replace(stored, text=text)
    return stored, source


def source_of(options: RlhfOptions) -> Path | None:
    """Return the folder of the checkpoints of --init-run; None without --init-run."""
    source = options.start.init_run
    return None if source is None else source.expanduser() / CHECKPOINTS


def staged(model: Any, stages: PipelineOptions) -> Any:
    """Return a model as a pipeline if the options ask for stages."""
    return Pipeline.from_model(model, **stages.as_arguments) if stages.pipe > 1 else model
