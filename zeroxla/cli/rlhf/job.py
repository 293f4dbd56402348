"""The job of `zeroxla rlhf`: learn text, then from a reward, into a run folder."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from zeroxla.checkpoint.checkpointer import Checkpointer
from zeroxla.checkpoint.errors import SaveError
from zeroxla.cli.interrupt import StopRequest, stop_on_signal
from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.rlhf.output import RlhfOutput, as_text
from zeroxla.cli.rlhf.plot import plot_run
from zeroxla.cli.rlhf.start import START, Start, source_of
from zeroxla.cli.run_folder import CHECKPOINTS, NoRunFolder, RunFolder, read_config
from zeroxla.cli.train.job import UsageError
from zeroxla.cli.train.setup import check_same, circumstances, mesh_for
from zeroxla.cli.train.text import record_of
from zeroxla.cli.train.text import source_of as source_text
from zeroxla.mesh.processes.environment import STARTED
from zeroxla.mesh.processes.exchange import agree, on_first
from zeroxla.rlhf.loop import Loop
from zeroxla.rlhf.make import make_loop
from zeroxla.rlhf.phase_sums import memory_by_phase
from zeroxla.rlhf.rewards import REWARDS, TextReward
from zeroxla.rlhf.states import States

CRITIC = "critic"
"""The folder of a run with the checkpoints of the critic, of the same iterations as the actor's."""
SHOWN = ("reward", "kl")


def rlhf(options: RlhfOptions) -> int:
    """Run the job, printing what it does.

    Returns:
      The exit status: 0, also when interrupted and saved; 1 if the last state could not be saved.

    Raises:
      UsageError: An option or an input cannot work; found before the first iteration.
      RunFolderError: Something besides a checkpoint could not be written at the end.
    """
    width = None if sys.stdout.isatty() else 120
    try:
        mesh = mesh_for(options.as_train())
        job = _RlhfJob(options, mesh, RlhfOutput(width))
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    with contextlib.closing(job):
        return job.run()


class _RlhfJob:
    """One run: what is decided before the first iteration, and the iterations."""

    def __init__(self, options: RlhfOptions, mesh: Mesh, output: RlhfOutput) -> None:
        run = options.output
        self.options, self.output, self.settings = options, output, options.settings
        started = os.environ.get(STARTED) or time.strftime("%Y%m%d-%H%M%S")
        self.path = run.run or Path("runs") / f"rlhf-{started}"
        self.start = Start.of(options, mesh, self.path if run.resume else None)
        self.prompts = self.start.prompts(options)
        vocabulary = self.start.choice.vocabulary
        self.reward = TextReward(function=REWARDS[options.task.reward], decode=vocabulary.decode)
        self.key = jax.random.key(options.learning.seed)
        here = circumstances({"text": record_of(self.start.corpus)}, mesh)
        agree("text", {"fingerprint": here["text"]["fingerprint"]}, "give all hosts the same files")
        self.done = 0
        self.states: States | None = None  # until run() has made them
        # Traces the models, so that what does not fit the devices is found before files are made.
        self.loop = self.make_loop()
        if run.resume:
            check_same(read_config(self.path), here, "text")
            self.open_checkpoints()
            self.restore()
            found = on_first(
                "run folder",
                lambda: RunFolder.reopen(self.path, step=self.done, report=output.warn),
            )
        else:
            record = {
                "command": "rlhf",
                "options": options.to_dict(),
                "before": self.start.options.to_dict(),
                **here,
            }
            found = on_first("run folder", functools.partial(self.new_folder, record))
            self.open_checkpoints()
        self.folder = found or NoRunFolder()

    def new_folder(self, record: dict[str, Any]) -> RunFolder:
        folder = RunFolder.create(self.path, record, self.output.warn)
        self.start.keep(self.path, self.options.start.init_run)
        return folder

    def open_checkpoints(self) -> None:
        run, report = self.options.output, self.output.warn
        kinds = {"keep": run.keep, "every": run.save_every, "report": report}
        self.checkpoints = Checkpointer(self.path / CHECKPOINTS, **kinds)
        self.critics: Checkpointer | None = None
        if self.settings.algorithm == "ppo":
            # Whole before the actor's of the same iteration begins: an actor's has a critic's.
            self.critics = Checkpointer(self.path / CRITIC, asynchronous=False, **kinds)

    def make_loop(self) -> Loop:
        learning = self.options.learning
        return make_loop(
            self.start.choice.model,
            self.start.mesh,
            self.settings,
            reward=self.reward,
            optimizer=_adam(learning.learning_rate, learning.clip),
            critic_optimizer=_adam(learning.critic_learning_rate, learning.clip),
            storage=self.options.as_storage(),
            tensor=self.options.engine.tensor,
            config=self.start.config,
        )

    def restore(self) -> None:
        """Read the newest checkpoint, and make the reference of the one at the start."""
        loop, critic, reference = self.loop, None, None
        if loop.reference is not None:
            start = self.start.restored(self.path / START, self.output.warn)
            reference = loop.reference.begin(start.params, self.key)
        restored = self.checkpoints.restore(loop.actor.step)
        if self.critics is not None and loop.critic is not None:
            critic = self.critics.restore(loop.critic, restored.number).state
        self.done = restored.number
        self.states = States(actor=restored.state, critic=critic, reference=reference)
        self.prompts.set_state(restored.position)

    def run(self) -> int:
        num_steps = self.options.learning.steps
        self.output.setup(self.start.mesh, source_text(self.start.corpus, "token"))
        if self.states is None:
            self.begin()
        else:
            self.output.print(f"Resuming {self.path} after iteration {self.done}")
        with (
            stop_on_signal(lambda: self.output.stopping("iteration")) as stop,
            self.output.progress(num_steps, self.done, "iterations") as self.bar,
        ):
            self.iterate(num_steps, stop)
        if self.done < num_steps:
            return self.finish_interrupted()
        return self.finish()

    def begin(self) -> None:
        """Learn text, or read what another run has learned; then keep it, for the reference."""
        source = source_of(self.options)
        if source is None:
            total = self.start.options.training.steps
            with self.output.progress(total, 0, "learning text") as bar:

                def done(number: int, loss: float) -> None:
                    bar.update(bar.task_ids[0], completed=number, status=f"loss {loss:.3f}")

                start = self.start.learned(done)
        else:
            start = self.start.restored(source, self.output.warn)
        with Checkpointer(self.path / START, asynchronous=False) as checkpointer:
            checkpointer.save(0, start, config=self.start.config)
        self.states = self.loop.begin(start.params, self.key)
        self.show("before", "Responses before")

    def iterate(self, num_steps: int, stop: StopRequest) -> None:
        save_every = self.options.output.save_every
        while self.done < num_steps and not stop.requested_by(self.done):
            assert self.states is not None
            prompts = next(self.prompts)["tokens"]
            key = jax.random.fold_in(self.key, self.done)
            self.states, metrics = self.loop.iterate(self.states, prompts, key)
            self.done += 1
            self.folder.log(self.done, metrics)
            shown = ", ".join(f"{name} {metrics[name]:.3f}" for name in SHOWN)
            seconds = sum(value for name, value in metrics.items() if name.endswith("_s"))
            self.bar.update(
                self.bar.task_ids[0], completed=self.done, status=f"{shown}, {seconds:.1f} s"
            )
            if self.done % save_every == 0 and self.done < num_steps:
                self.save()

    def save(self, *, last: bool = False) -> bool:
        """Write a checkpoint, the last one until it is whole; report a failure and return False."""
        assert self.states is not None
        position, config = self.prompts.get_state(), self.start.config
        try:
            if self.critics is not None and self.states.critic is not None:
                self.critics.save(self.done, self.states.critic, config=config, force=last)
            self.checkpoints.save(self.done, self.states.actor, position, config=config, force=last)
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
            self.output.stopped(f"iteration {self.done}", "rlhf", self.path)
        return 0 if saved else 1

    def finish(self) -> int:
        saved = self.save(last=True)  # first: it is what cannot be made again
        self.folder.close()
        assert self.states is not None
        self.show("after", "Responses after")
        memory = memory_by_phase(self.loop, self.states)
        self.folder.write_text("memory.json", json.dumps(memory.to_dict(), indent=2) + "\n")
        lines = self.folder.metrics()
        name = self.options.task.reward
        if lines:
            self.folder.write_figure("curves.png", plot_run(lines, reward=name))
            self.output.outcome(lines, name, memory, self.path)
        return 0 if saved else 1

    def show(self, when: str, title: str) -> None:
        """Print responses to the first prompts of the held-out text, and write them into the
        folder. All processes take part."""
        count = self.options.output.samples
        if count == 0:
            return
        assert self.states is not None
        settings = self.settings
        starts = np.linspace(
            0, len(self.start.corpus.valid) - settings.prompt_length, settings.num_prompts
        ).astype(int)
        prompts = [self.start.corpus.valid[i : i + settings.prompt_length] for i in starts]
        rollouts = self.loop.generate(self.states, prompts, jax.random.fold_in(self.key, 2**31))
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
        self.checkpoints.close()
        if self.critics is not None:
            self.critics.close()


def _adam(learning_rate: float, clip: float) -> optax.GradientTransformation:
    adam = optax.adam(learning_rate)
    return adam if clip == 0 else optax.chain(optax.clip_by_global_norm(clip), adam)
