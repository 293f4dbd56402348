"""The job of `zeroxla rlhf`: learn text, then from a reward, into a run folder."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zeroxla.checkpoint.checkpointer import Checkpointer
from zeroxla.cli.deepspeed_file import keep_deepspeed
from zeroxla.cli.divergence import REMEDY, Divergence
from zeroxla.cli.errors import DivergedError
from zeroxla.cli.interrupt import StopRequest
from zeroxla.cli.job import Job
from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.rlhf.output import RlhfOutput, as_text
from zeroxla.cli.rlhf.plot import plot_run
from zeroxla.cli.rlhf.start import START, Start, source_of
from zeroxla.cli.run_job import run_job
from zeroxla.cli.train.setup import mesh_for
from zeroxla.cli.train.text import describe_corpus, record_of
from zeroxla.hybrid.prompts import NotFiniteError
from zeroxla.program.random_keys import SAMPLES
from zeroxla.rlhf.loop import Loop
from zeroxla.rlhf.make import make_loop
from zeroxla.rlhf.phase_sums import memory_by_phase
from zeroxla.rlhf.rewards import REWARDS, TextReward
from zeroxla.rlhf.states import States

CRITIC = "critic"
"""The folder of a run with the critic's checkpoints, one for each of the actor's."""
SHOWN = ("reward", "kl")
"""The metrics beside the progress bar."""


def rlhf(options: RlhfOptions) -> int:
    """Run the job, and print its progress and results.

    Args:
      options: the model, the reward and the run folder.

    Returns, raises: as `run_job`.
    """
    # The mesh first: it starts JAX, and then it is known which process speaks.
    return run_job(lambda: RlhfJob(options, mesh_for(options.as_train()), RlhfOutput()))


class RlhfJob(Job[RlhfOptions, RlhfOutput]):
    """A run of `zeroxla rlhf`; its steps are iterations."""

    command, unit, label = "rlhf", "iteration", "iterations"

    def __init__(self, options: RlhfOptions, mesh: Mesh, output: RlhfOutput) -> None:
        super().__init__(options, mesh, output)
        self.settings = options.settings
        self.start = Start.of(options, mesh, self.path if options.output.resume else None)
        self.prompts = self.start.prompts(options)
        vocabulary = self.start.choice.vocabulary
        self.reward = TextReward(function=REWARDS[options.task.reward], decode=vocabulary.decode)
        self.key = jax.random.key(options.learning.seed)
        self.states: States | None = None  # until begin() has made them
        self.critics: Checkpointer | None = None
        limit = options.learning.max_skipped
        self.actor_divergence = Divergence(limit=limit, warn=output.warn, unit=self.unit)
        self.critic_divergence = Divergence(
            limit=limit, warn=output.warn, unit=f"the critic's {self.unit}"
        )
        # Traces the models, so that what does not fit the devices is found before files are made.
        self.learner = self.make_loop()
        self.open_run("text", record_of(self.start.corpus), before=self.start.options.to_dict())

    def make_loop(self) -> Loop:
        learning, config = self.options.learning, self.start.config
        optimizer = critic_optimizer = config.optimizer
        if optimizer is None or learning.optimizer is not None:
            optimizer = learning.make(learning.learning_rate)
            critic_optimizer = learning.make(learning.critic_learning_rate)
        else:
            learning.check_own(("learning_rate", "critic_learning_rate"))
        return make_loop(
            self.start.choice.model,
            self.start.mesh,
            self.settings,
            reward=self.reward,
            optimizer=optimizer,
            critic_optimizer=critic_optimizer,
            storage=self.options.as_storage(),
            tensor=self.options.engine.tensor,
            config=dataclasses.replace(config, optimizer=None),
            pipeline=self._pipeline,
        )

    @property
    def _pipeline(self) -> dict[str, Any] | None:
        stages = self.options.pipeline
        return {**stages.as_arguments, "weights": stages.weights} if stages.pipe > 1 else None

    @property
    def num_steps(self) -> int:
        return self.options.learning.steps

    @property
    def source(self) -> str:
        return describe_corpus(self.start.corpus, "token")

    def keep(self) -> None:
        self.start.keep(self.path, self.options.start.init_run)
        keep_deepspeed(self.options.zero, self.path)

    def open_checkpoints(self) -> None:
        super().open_checkpoints()
        if self.settings.algorithm == "ppo":
            # Whole before the actor's of the same iteration begins: an actor's has a critic's.
            self.critics = self.checkpointer(CRITIC, asynchronous=False)

    def restore(self) -> None:
        """Read the newest checkpoint, and make the reference from the one at the start."""
        learner, critic, reference = self.learner, None, None
        if learner.reference is not None:
            start = self.start.restored(self.path / START, self.output.warn)
            reference = learner.reference.begin(start.params, self.key)
        restored = self.checkpoints.restore(learner.actor.step)
        if self.critics is not None and learner.critic is not None:
            critic = self.critics.restore(learner.critic, restored.number).state
        self.done = restored.number
        self.states = States(actor=restored.state, critic=critic, reference=reference)
        self.prompts.set_state(restored.position)

    def begin(self) -> None:
        """In a new run: learn text, or read what a folder or another run has learned; then keep it,
        for the reference."""
        if self.states is not None:
            return
        source, init = source_of(self.options), self.options.start.init
        if init is not None:
            start = self.start.pretrained(init)
        elif source is None:
            total = self.start.options.training.steps
            with self.output.progress(total, 0, "learning text") as bar:

                def done(number: int, loss: float) -> None:
                    bar.update(bar.task_ids[0], completed=number, status=f"loss {loss:.3f}")

                start = self.start.learned(done)
        else:
            start = self.start.restored(source, self.output.warn)
        with Checkpointer(self.path / START, asynchronous=False) as checkpointer:
            checkpointer.save(0, start, config=self.start.config)
        self.states = self.learner.begin(start.params, self.key)
        self.show("before", "Responses before")

    def loop(self, stop: StopRequest) -> None:
        while self.done < self.num_steps and not stop.requested_by(self.done):
            assert self.states is not None
            prompts = next(self.prompts)["tokens"]
            key = jax.random.fold_in(self.key, self.done)
            self.observer.profiler.before(self.done + 1, self.settle)
            try:
                with self.observer.profiler.step(self.done + 1):
                    self.states, metrics = self.learner.iterate(self.states, prompts, key)
            except NotFiniteError as error:
                raise DivergedError(
                    f"iteration {self.done + 1} cannot generate: {error}; {REMEDY}"
                ) from error
            self.done += 1
            if self.observer.profiler.after(self.done, self.settle):
                self.output.print(f"Profile: {self.observer.profiler.folder}")
            self.log(self.done, metrics)
            shown = ", ".join(f"{name} {metrics[name]:.3f}" for name in SHOWN)
            seconds = sum(value for name, value in metrics.items() if name.endswith("_s"))
            self.show_progress(self.done, f"{shown}, {seconds:.1f} s")
            self.watch(metrics)
            if self.is_due(self.options.output.save_every) and self.may_save():
                self.save()
        for divergence in (self.actor_divergence, self.critic_divergence):
            divergence.check_end(self.done)

    def settle(self) -> None:
        """Wait until the devices have done all iterations."""
        assert self.states is not None
        jax.block_until_ready((self.states.actor, self.states.critic))

    def watch(self, metrics: Mapping[str, float]) -> None:
        """Take note of an iteration's optimizer steps: it was skipped if all of them were, or if a
        loss was not finite."""
        steps = self.settings.epochs * (self.settings.rows // self.settings.minibatch_rows)
        for divergence, prefix in ((self.actor_divergence, ""), (self.critic_divergence, "value_")):
            if f"{prefix}loss" in metrics:
                loss, skipped = metrics[f"{prefix}loss"], int(metrics[f"{prefix}skipped"])
                divergence.took(
                    self.done,
                    finite=skipped < steps and math.isfinite(loss),
                    loss=loss,
                    scaled=self.start.config.compute_dtype == "float16",
                    steps=skipped,
                )

    def may_save(self) -> bool:
        """Return whether the states of actor and critic are worth a checkpoint."""
        both = (self.actor_divergence, self.critic_divergence)
        return all(divergence.may_save(self.done) for divergence in both)

    def write_checkpoint(self, *, last: bool) -> None:
        assert self.states is not None
        position, config = self.prompts.get_state(), self.start.config
        if self.critics is not None and self.states.critic is not None:
            self.critics.save(self.done, self.states.critic, config=config, force=last)
        self.checkpoints.save(self.done, self.states.actor, position, config=config, force=last)

    def finish(self) -> None:
        self.folder.close()
        assert self.states is not None
        self.show("after", "Responses after")
        memory = memory_by_phase(self.learner, self.states)
        self.folder.write_text("memory.json", json.dumps(memory.to_dict(), indent=2) + "\n")
        lines = self.folder.metrics()
        name = self.options.task.reward
        if lines:
            self.folder.write_figure("curves.png", plot_run(lines, reward=name))
            self.output.outcome(lines, name, memory, self.path)

    def show(self, when: str, title: str) -> None:
        """Print responses to prompts from the held-out text, and write them into the folder. All
        processes take part."""
        count = self.options.output.samples
        if count == 0:
            return
        assert self.states is not None
        settings = self.settings
        starts = np.linspace(
            0, len(self.start.corpus.valid) - settings.prompt_length, settings.num_prompts
        ).astype(int)
        prompts = [self.start.corpus.valid[i : i + settings.prompt_length] for i in starts]
        key = jax.random.fold_in(self.key, SAMPLES)
        rollouts = self.learner.generate(self.states, prompts, key)
        scores = self.reward(rollouts)
        decode = self.reward.decode
        # One of each group; with few prompts all of it.
        each = settings.group if settings.num_prompts >= count else 1
        samples = [
            (decode(prompt.tolist()), decode(response.tolist()), float(score))
            for prompt, response, score in zip(rollouts.prompts(), rollouts.responses(), scores)
        ][::each][:count]
        self.output.samples(title, samples)
        self.folder.write_text(f"samples_{when}.txt", as_text(samples))

    def close(self) -> None:
        try:
            if self.critics is not None:
                self.critics.close()
        finally:
            self.critics = None
            super().close()
