"""What quantize_accuracy.py quantizes: random numbers, and weights and gradients of the main job.

N   elements, a whole number of the largest blocks
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import zeroxla
from zeroxla.cli.data.text import load_corpus, training_batches
from zeroxla.cli.run_folder import CHECKPOINTS, read_config
from zeroxla.cli.train.job import train
from zeroxla.cli.train.model import choose
from zeroxla.cli.train.options import RunOptions, TrainingOptions, TrainOptions
from zeroxla.cli.train.setup import mesh_for, optimizer_for, schedule_for
from zeroxla.frontend import adapt

LARGEST_BLOCK = 2048
OUTLIER = 20.0


def _one_outlier(generator: np.random.Generator, size: int, block: int) -> np.ndarray:
    x_TB = generator.standard_normal((size // block, block))
    place_T = generator.integers(0, block, (size // block, 1))
    sign_T = generator.choice([-OUTLIER, OUTLIER], (size // block, 1))
    np.put_along_axis(x_TB, place_T, sign_T, axis=1)
    return x_TB


def _constant(generator: np.random.Generator, size: int, block: int) -> np.ndarray:
    return np.repeat(np.abs(generator.standard_normal(size // block)), block)


# What (generator, size, block) gives. The last two have a shape for each block.
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "normal": lambda g, size, _: g.standard_normal(size),
    "laplace": lambda g, size, _: g.laplace(size=size),
    "student-t(3)": lambda g, size, _: g.standard_t(3, size),
    "uniform": lambda g, size, _: g.uniform(-1, 1, size),
    "one outlier": _one_outlier,
    "constant": _constant,
}


def random_numbers(name: str, *, size: int, block: int) -> np.ndarray:
    """Return float32[size], the same ones each time, of one of DISTRIBUTIONS."""
    generator = np.random.default_rng(sorted(DISTRIBUTIONS).index(name))
    return DISTRIBUTIONS[name](generator, size, block).astype(np.float32).reshape(-1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a run of `zeroxla train` has left.

    Attributes:
      weights_N, gradients_N: float32[N]: the leaves of at least LARGEST_BLOCK elements, flat, each
        cut to a whole number of such blocks, one after the other. No block holds two leaves.
      steps: that the run took.
      loss: of the batch whose gradients these are.
      share: of all parameters that are in N.
    """

    weights_N: np.ndarray
    gradients_N: np.ndarray
    steps: int
    loss: float
    share: float


def train_run(folder: Path, *, steps: int) -> None:
    """Run the main job with its default options into a folder; it prints its progress."""
    options = TrainOptions(
        training=TrainingOptions(steps=steps), output=RunOptions(run=folder, sample_bytes=0)
    )
    train(options)


def read_run(folder: Path) -> Trained:
    """Return weights of a run's newest checkpoint, and gradients of the batch that follows it.

    Args:
      folder: of a run of `zeroxla train`, on devices of which there are as many here.

    Raises:
      ValueError: the folder holds no checkpoint.
    """
    options = TrainOptions.from_dict(read_config(folder)["options"])
    text = options.text
    corpus = load_corpus(text.data, holdout=text.holdout)
    batches = iter(
        training_batches(
            corpus.train, batch=text.batch, length=text.length, seed=options.training.seed
        )
    )
    model = choose(options).model
    mesh = mesh_for(options)
    step = zeroxla.make_step(
        model,
        mesh,
        optimizer_for(options, schedule_for(options)),
        config=zeroxla.ZeroConfig(compute_dtype=options.zero.compute_dtype or "float32"),
    )
    shapes = step.abstract_state(next(batches))
    with zeroxla.Checkpointer(folder / CHECKPOINTS) as checkpointer:
        restored = checkpointer.restore(shapes)
    batches.set_state(restored.position)
    batch = next(batches)
    params = zeroxla.full_params(restored.state)
    adapted = adapt(model)

    @jax.jit
    def loss_and_gradients(params: Any) -> tuple[jax.Array, Any]:
        def loss(params: Any) -> jax.Array:
            return adapted.loss(params, {}, batch, jax.random.key(0), train=True)[0]

        return jax.value_and_grad(loss)(params)

    loss, gradients = loss_and_gradients(params)
    weights_N, gradients_N = _whole_blocks(params), _whole_blocks(gradients)
    num_params = sum(x.size for x in jax.tree.leaves(params))
    return Trained(
        weights_N=weights_N,
        gradients_N=gradients_N,
        steps=restored.number,
        loss=float(loss),
        share=weights_N.size / num_params,
    )


def _whole_blocks(leaves: Any) -> np.ndarray:
    flat = [np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(leaves)]
    return np.concatenate([x[: x.size // LARGEST_BLOCK * LARGEST_BLOCK] for x in flat])
