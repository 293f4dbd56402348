"""The model that `zeroxla train` trains, and its vocabulary.

Without --init, a language model is a GPT over bytes whose shape the options give. With --init it is
the model of a Hugging Face folder. The run copies that folder's config and tokenizer into its own
folder `model`, so that resuming and exporting do not need the folder of --init any more.
"""

from __future__ import annotations

import dataclasses
import inspect
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zeroxla import models
from zeroxla.checkpoint.weights.safetensors_writer import BESIDE, DTYPES
from zeroxla.checkpoint.weights.tensor_names import abstract
from zeroxla.cli.data.chat_template import find_template
from zeroxla.cli.data.text import VOCABULARY
from zeroxla.cli.data.vocabulary import (
    TOKENIZER,
    Bytes,
    Tokens,
    Vocabulary,
)
from zeroxla.cli.option_groups import flag
from zeroxla.cli.train.options import ModelOptions, TrainOptions
from zeroxla.frontend.lora.model import LoraModel
from zeroxla.mesh.make_mesh import make_mesh
from zeroxla.models import GPT, AlexNet, Encoder
from zeroxla.models.format import read_config
from zeroxla.step.make import make_step

MODEL = "model"
"""The folder of a run with the config and the tokenizer of a model that came from elsewhere."""

_SHAPE = ("layers", "width", "heads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A model and its vocabulary.

    Attributes:
      model: a linen module, or a function of rngs that returns an nnx module.
      length: the longest sequence that the model takes; None if it takes any.
      vocabulary: the numbers that text is turned into.
      config: the config of the model's Hugging Face folder; None if it is from no folder.
      chat_template: the chat template of that folder; None if there is none.
      takes_segments: whether the model can keep the segments of packed rows apart.
    """

    model: Any
    length: int | None
    vocabulary: Vocabulary
    config: dict[str, Any] | None = None
    chat_template: str | None = None
    takes_segments: bool = False


def alexnet(options: TrainOptions) -> AlexNet:
    """Return the AlexNet of a run."""
    return AlexNet(width=options.images.width_multiplier, dropout=options.model.dropout)


def exported(options: TrainOptions, run: Path) -> tuple[Any, dict[str, Any]]:
    """Return the model of a run, and the config that it came with: an empty one for most.

    Raises:
      ImportError, ValueError: as `choose`.
    """
    if options.model.model == "alexnet":
        return alexnet(options), {}
    choice = choose(options, run)
    return with_plan(options.lora.adapted(choice.model, run)), choice.config or {}


def with_plan(model: Any) -> Any:
    """Return a language model. If it has adapters, it then knows which leaves have some, and how
    they lie: its loss has been traced."""
    if isinstance(model, LoraModel):
        step = make_step(model, make_mesh(nodes=1, devices=jax.devices()[:1]))
        step.abstract_state({"tokens": jax.ShapeDtypeStruct((1, 3), np.int32)})
    return model


def choose(options: TrainOptions, run: Path | None = None) -> ModelChoice:
    """Return the language model of a run.

    Args:
      options: the run's options.
      run: the run's folder, if there is one already.

    Raises:
      ImportError: a package that --init needs is not installed.
      ValueError: the folder of --init, or an option beside it, cannot work.
    """
    shape, length = options.model, options.text.length
    kept = run / MODEL if run is not None and (run / MODEL).is_dir() else None
    source = kept or shape.init
    if source is None:
        arguments = {name: getattr(shape, name) for name in (*_SHAPE, "dropout")}
        model = GPT(vocab=VOCABULARY, length=length, **arguments)
        return ModelChoice(
            model=model, length=length, vocabulary=Bytes(), takes_segments=takes_segments(GPT)
        )
    default = ModelOptions()
    if given := [name for name in _SHAPE if getattr(shape, name) != getattr(default, name)]:
        raise ValueError(
            f"--init says what the model is; leave out {', '.join(map(flag, given))}, or --init"
        )
    choice = from_folder(source, dropout=shape.dropout)
    if choice.length is not None and length > choice.length:
        raise ValueError(
            f"--length {length} is more than the {choice.length} positions of the model in "
            f"{source.expanduser()}; give --length {choice.length} or less"
        )
    return choice


def from_folder(source: Path, *, dropout: float = 0.0) -> ModelChoice:
    """Return the language model of a Hugging Face folder.

    Args:
      source: the folder.
      dropout: the dropout rate of a GPT-2.

    Raises:
      ImportError: a package that its tokenizer needs is not installed.
      ValueError: the folder holds no model that predicts the next token, its tokenizer is missing
        or of another model, or the model has no dropout.
    """
    source = source.expanduser()
    config = read_config(source)
    is_gpt = config.get("model_type") == GPT.hugging_face.model_type
    if dropout and not is_gpt:
        raise ValueError(f"--dropout {dropout}: the model in {source} has none; leave it out")
    model = models.from_hugging_face(config, **({"dropout": dropout} if is_gpt else {}))
    module = abstract(model)
    if isinstance(module, Encoder):
        raise ValueError(
            f"the model in {source} sees both sides of a token ({config['model_type']}), and "
            "zeroxla train and zeroxla generate need one that predicts the next token; train it "
            "with zeroxla.make_step"
        )
    shape_of_model = module if is_gpt else module.config
    size = shape_of_model.vocab
    is_bytes = size == VOCABULARY and not (source / TOKENIZER).is_file()
    vocabulary = Bytes() if is_bytes else Tokens(source, config)
    if vocabulary.size > size:
        raise ValueError(
            f"the tokenizer in {source} has tokens up to {vocabulary.size - 1}, and the model a "
            f"vocabulary of {size}; they do not belong together"
        )
    has_table = is_gpt or shape_of_model.positions == "learned"
    return ModelChoice(
        model=model,
        length=shape_of_model.length if has_table else None,
        vocabulary=vocabulary,
        config=config,
        chat_template=find_template(source),
        takes_segments=takes_segments(type(module)),
    )


def folder_dtype(config: Mapping[str, Any] | None) -> str:
    """Return the dtype of floats that a folder's config.json names; float32 if it names none."""
    config = config or {}
    parts = [config, config.get("text_config") or {}]
    named = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
    found = str(next(filter(None, named), "")).removeprefix("torch.")
    return found if found in DTYPES else "float32"


def takes_segments(kind: type[Any]) -> bool:
    """Return whether a class of models has attention that stays inside segments."""
    return "segments_BL" in inspect.signature(kind.__call__).parameters


def keep(options: TrainOptions, run: Path) -> None:
    """Copy the config, the tokenizer and what else belongs to the weights from the folder of --init
    into the run's folder.

    Raises:
      ValueError: a file cannot be copied.
    """
    source = options.model.init
    if source is None:
        return
    name = ""
    try:
        (run / MODEL).mkdir(exist_ok=True)
        for name in BESIDE:
            file = source.expanduser() / name
            if file.is_file():
                shutil.copyfile(file, run / MODEL / name)
    except OSError as error:
        raise ValueError(
            f"cannot copy the model's {name} from {source} to {run / MODEL}: {error.strerror}"
        ) from error
