"""`zeroxla train --model alexnet`: AlexNet on images of ten classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.cli.data import images
from zeroxla.cli.data.text import unigram_entropy
from zeroxla.cli.run_folder import NoRunFolder, RunFolder
from zeroxla.cli.train.island import seed_of
from zeroxla.cli.train.model import alexnet
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.train.output import Output
from zeroxla.cli.train.task import Scorer
from zeroxla.models.alexnet import alexnet_layers
from zeroxla.models.losses import classification_loss
from zeroxla.pipeline.pipeline import Pipeline
from zeroxla.step.state import TrainState, full_params
from zeroxla.step.step import Step

if TYPE_CHECKING:
    import grain
    from matplotlib.figure import Figure

ROWS, COLUMNS = 4, 8
RIGHT, WRONG = "#009E73", "#D55E00"


def alexnet_pipeline(options: TrainOptions) -> Pipeline:
    """Return the AlexNet of a run, as a list of layers."""
    module = alexnet(options)
    return Pipeline(
        alexnet_layers(module.classes, width=module.width, dropout=module.dropout),
        lambda logits, batch: classification_loss(logits, batch["label"]),
        inputs=lambda batch: batch["image"],
        **options.pipeline.as_arguments,
    )


class ImageTask:
    """AlexNet on images; see `Task`. The model is a list of layers, with stages and without."""

    data = "images"
    unit = "image"
    counted = "images"
    loss: Any = None
    numbers: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    guess_name = "label entropy of the validation set"

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        self.images = images.load_images(options.text.data, holdout=options.text.holdout)
        self.model = alexnet_pipeline(options)
        self._module = alexnet(options)
        self.num_counted = options.text.batch
        self.guess = unigram_entropy(self.images.valid_labels)

    @property
    def source(self) -> str:
        found, size = self.images, self.options.images.image_size
        return (
            f"Images: {found.source}, enlarged to {size} x {size}; {len(found.train):,} to train "
            f"on, {len(found.valid):,} held out"
        )

    def record(self) -> dict[str, Any]:
        return {
            "source": self.images.source,
            "fingerprint": self.images.fingerprint(),
            "train_images": len(self.images.train),
            "valid_images": len(self.images.valid),
        }

    def training(self, index: int, count: int, slot: int = 0) -> grain.IterDataset:
        return images.image_batches(
            self.images.train,
            self.images.train_labels,
            batch=self.options.text.batch,
            size=self.options.images.image_size,
            seed=seed_of(self.options.training.seed, slot),
            flips=self.images.flips,
            shard_index=index,
            shard_count=count,
        )

    def validation(self) -> Iterator[dict[str, np.ndarray]]:
        return self._validation(self.options.text.batch, self.options.output.eval_batches)

    def _validation(self, batch: int, num_batches: int) -> Iterator[dict[str, np.ndarray]]:
        return images.validation_image_batches(
            self.images.valid,
            self.images.valid_labels,
            batch=batch,
            size=self.options.images.image_size,
            num_batches=num_batches,
        )

    def scorer(self, step: Step) -> Scorer | None:
        return None

    def keep(self, run: Path) -> None:
        """Write nothing: the options say everything."""

    def begin(self, step: Step, key: jax.Array) -> TrainState | None:
        """Return None: there are no weights to begin with."""

    def show(
        self, step: Step, state: TrainState, folder: RunFolder | NoRunFolder, output: Output
    ) -> None:
        """Classify validation images, and draw them."""
        params = full_params(state)  # all processes take part in this
        if jax.process_index() != 0:
            return
        num_shown = min(ROWS * COLUMNS, len(self.images.valid))
        (batch,) = self._validation(num_shown, 1)

        @jax.jit
        def classify(params: Any, image: jax.Array) -> jax.Array:
            logits: Any = self._module.apply({"params": params}, image)
            return jnp.argmax(logits, axis=-1)

        found = np.asarray(classify(params, batch["image"]))
        right = int((found == batch["label"]).sum())
        folder.write_figure(
            "predictions.png",
            draw_predictions(batch["image"], batch["label"], found, self.images.classes),
        )
        output.print(f"\nOf {num_shown} validation images {right} are recognized: predictions.png")


def draw_predictions(
    image_BSS3: np.ndarray, label_B: np.ndarray, found_B: np.ndarray, classes: Sequence[str]
) -> Figure:
    """Draw images, each titled with the class that the model found, and with the right one if they
    differ.

    Args:
      image_BSS3: the images, floats between -1 and 1.
      label_B: the right classes, int[B], indices into `classes`.
      found_B: the classes that the model found, likewise.
      classes: the names of the classes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.25 * COLUMNS, 1.5 * ROWS), layout="constrained")
    axes = list(figure.subplots(ROWS, COLUMNS, squeeze=False).flat)
    for one in axes:
        one.set_axis_off()
    for one, image, label, found in zip(axes, image_BSS3, label_B, found_B):
        one.imshow((image + 1) / 2)
        is_right = label == found
        name = classes[found] if is_right else f"{classes[found]}, is {classes[label]}"
        one.set_title(name, fontsize=8, color=RIGHT if is_right else WRONG)
    return figure
