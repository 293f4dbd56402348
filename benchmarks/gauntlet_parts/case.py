"""What the gauntlet knows of a model: how to build it, how to call it, and what it is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

KINDS = ("language model", "encoder", "encoder-decoder", "images and sound", "other", "layer")

OF_MODELS = (
    "generation",
    "tensor",
    "pipeline",
    "pipeline of 4",
    "tensor axis",
    "context axis",
)
"""The names of the checks of whole models, which single layers do not take."""

CHECKS = (
    "gradients",
    "zeropp",
    "lora",
    *OF_MODELS,
    "plan",
    "checkpoint",
)
"""The names of all checks, in the order in which they run."""

ROWS = 12
"""Rows of each batch: they divide over 2 x 2 and 1 x 3 devices, and 2 x 2 micro-batches."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A model with what a training step needs.

    Attributes:
      model: the model as `zeroxla.make_step` takes it.
      loss: the argument `loss` of `make_step`; None if the model brings its loss.
      batch: NumPy arrays of ROWS rows.
      logits: `(module, tokens) -> logits`, as a user of a language model calls it; for a pair of
        functions, `(params, tokens) -> logits`. None for any other model.
      context: the most tokens of a sequence, for language models.
      targets: the leaves that get adapters, as a regular expression.
      reference_model: the model for one device, if it is another one there: a BatchNorm without
        the name of a mesh axis.
      slices: the slices of the batch of which the reference's loss is the mean. None means one for
        each device (or micro-batch), whose batch statistics are its own.
      rate: the learning rate of the checks.
      reads_state: whether a training loss depends on state that the step before has changed. The
        reference has no such state, and the loss after a step is not compared.
      options: other arguments of `make_step`.
    """

    model: Any
    loss: Callable[..., Any] | None = None
    batch: Mapping[str, Any]
    logits: Callable[[Any, Any], Any] | None = None
    context: int | None = None
    targets: str = r"(kernel|weight\w*|w|embedding)$"
    reference_model: Any = None
    slices: int | None = None
    rate: float = 1e-2
    reads_state: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model of the gauntlet.

    Attributes:
      name: of the model in tables and files.
      kind: one of KINDS.
      package: the distribution that the model comes from.
      build: makes it; it imports the package.
    """

    name: str
    kind: str
    package: str
    build: Callable[[], Built]


def file_of(folder: Path, name: str) -> Path:
    """Return the file of a case's results."""
    return folder / f"{re.sub(r'[^A-Za-z0-9.]+', '_', name).strip('_')}.json"
