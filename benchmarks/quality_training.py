"""Training one variant of benchmarks/quality.py, so that it can stop at any time and go on."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from quality_variants import Variant
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zeroxla import Checkpointer, ZeroConfig, make_mesh, make_step
from zeroxla.cli.data.text import VOCABULARY, Corpus, training_batches, validation_batches
from zeroxla.cli.train.options import ModelOptions, TextOptions, TrainingOptions, TrainOptions
from zeroxla.cli.train.setup import optimizer_for, schedule_for
from zeroxla.models import GPT

BATCH, LENGTH = 16, 64
MODEL = {"vocab": VOCABULARY, "length": LENGTH, "layers": 4, "width": 128, "heads": 4}
EVALUATE_EVERY = 100
SAVE_EVERY = 250
EVAL_BATCH = 256
NUM_CURVE_BATCHES = 4  # of a point of the curve
NUM_FINAL_BATCHES = 31  # 507 904 tokens


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all variants share.

    Attributes:
      corpus: the text.
      steps: of a training.
      folder: where results and checkpoints lie.
      model: the options of `GPT`.
      batch: the rows of a batch.
    """

    corpus: Corpus
    steps: int
    folder: Path
    model: Mapping[str, int] = dataclasses.field(default_factory=lambda: MODEL)
    batch: int = BATCH

    @functools.cached_property
    def options(self) -> TrainOptions:
        """The optimizer and its schedule are those of `zeroxla train`."""
        return TrainOptions(
            text=TextOptions(batch=self.batch, length=LENGTH),
            model=ModelOptions(**{name: self.model[name] for name in ("layers", "width", "heads")}),
            training=TrainingOptions(steps=self.steps),
        )

    def batches(self, seed: int) -> Any:
        """Return the training batches of a seed, the same for every variant."""
        stream = training_batches(self.corpus.train, batch=BATCH, length=LENGTH, seed=seed)
        return iter(stream)

    def valid(self, num_batches: int) -> list[dict[str, np.ndarray]]:
        """Return held-out batches."""
        return list(
            validation_batches(
                self.corpus.valid, batch=EVAL_BATCH, length=LENGTH, num_batches=num_batches
            )
        )


class Trainer:
    """Trains one variant, from any seed."""

    def __init__(self, setup: Setup, variant: Variant) -> None:
        nodes, devices = variant.mesh
        mesh = make_mesh(nodes=nodes, devices_per_node=devices)
        optimizer = optimizer_for(setup.options, schedule_for(setup.options))
        self.setup, self.variant = setup, variant
        self.step = make_step(GPT(**setup.model), mesh, optimizer, config=variant.config)
        # Losses are those of the trained weights, whatever format they would travel in.
        self.exact = self.step.with_config(ZeroConfig(persistence_threshold=0))

    def result_file(self, seed: int) -> Path:
        return self.setup.folder / f"{_slug(self.variant.name)}-{self.setup.steps}-{seed}.json"

    def train(self, seed: int, advance: Callable[[int], None]) -> dict[str, Any]:
        """Train to the end, from the newest checkpoint if there is one; return the result.

        Args:
          seed: of the parameters and the data.
          advance: called with the number of steps that were taken, or were there already.
        """
        file = self.result_file(seed)
        if file.exists():
            advance(self.setup.steps)
            return json.loads(file.read_text())
        checkpoints = Checkpointer(file.with_suffix(".checkpoints"), keep=1)
        batches = self.setup.batches(seed)
        curve_batches = self.setup.valid(NUM_CURVE_BATCHES)
        first = next(batches)
        if checkpoints.latest() is None:
            batches = self.setup.batches(seed)
            state, done, curve = self.step.init(jax.random.key(seed), first), 0, []
        else:
            restored = checkpoints.restore(self.step.abstract_state(first))
            done, state, curve = restored.number, restored.state, restored.position["curve"]
            batches.set_state(restored.position["batches"])
        advance(done)
        for number in range(done + 1, self.setup.steps + 1):
            state, _ = self.step(state, next(batches))
            if number % EVALUATE_EVERY == 0:
                curve.append((number, self.loss(state, curve_batches)))
            if number % SAVE_EVERY == 0 and number < self.setup.steps:
                position = {"batches": batches.get_state(), "curve": curve}
                checkpoints.save(number, state, position)
            advance(1)
        result = {
            "variant": self.variant.name,
            "seed": seed,
            "loss": self.loss(state, self.setup.valid(NUM_FINAL_BATCHES)),
            "curve": curve,
            "gradient": self.gradient_error(state, next(batches)),
        }
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(result))
        temporary.rename(file)
        checkpoints.close()
        return result

    def loss(self, state: Any, batches: list[dict[str, np.ndarray]]) -> float:
        """Return the mean loss of held-out text."""
        return float(np.mean([float(self.exact.eval(state, b)["loss"]) for b in batches]))

    def gradient_error(self, state: Any, batch: Any) -> dict[str, float]:
        """Return how far the gradient of one batch is from that of exact wires.

        The state is where the variant's own training ended, kept copies and errors included.
        """
        found, exact = (
            np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(grads))])
            for _, grads in (self.step.grad(state, batch), self.exact.grad(state, batch))
        )
        found, exact = found.astype(np.float64), exact.astype(np.float64)
        norms = np.linalg.norm(found), np.linalg.norm(exact)
        return {
            "cosine": float(found @ exact / (norms[0] * norms[1])),
            "relative_l2": float(np.linalg.norm(found - exact) / norms[1]),
        }


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def train_all(
    jobs: Sequence[tuple[Any, int]],
    trainers: Mapping[str, Any],
    num_steps: int,
    *,
    loss_of: Callable[[dict[str, Any]], float],
) -> dict[str, list[dict[str, Any]]]:
    """Train variants from seeds, one after another, and show the progress.

    Args:
      jobs: the variants, which have a `name`, with their seeds.
      trainers: the trainer of each variant, by name. Its `train(seed, advance)` returns a result.
      num_steps: the steps of a training.
      loss_of: returns the loss of a result, to be printed.

    Returns:
      The results of each variant, by name.
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in trainers}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn()) as bar:
        every = bar.add_task("all", total=len(jobs) * num_steps)
        for variant, seed in jobs:
            bar.update(every, description=f"{variant.name}, seed {seed}")
            result = trainers[variant.name].train(seed, lambda n: bar.advance(every, n))
            results[variant.name].append(result)
            bar.console.print(f"{variant.name}, seed {seed}: {loss_of(result):.5f}")
    return results
