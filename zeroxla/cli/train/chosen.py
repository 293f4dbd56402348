"""The settings that `zeroxla train` chooses where the user gives none, by the kind of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from zeroxla.cli.deepspeed_file import (
    contents,
    kept_deepspeed,
    said_dtype,
    says_optimizer,
    takes,
)
from zeroxla.cli.option_groups import flag
from zeroxla.cli.train.model import folder_dtype
from zeroxla.cli.train.options import ALEXNET, TrainOptions
from zeroxla.config.deepspeed.sections import number_of

if TYPE_CHECKING:
    from zeroxla.cli.rlhf.options import RlhfOptions


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table of settings that a run prints: a name, a value in words, and why."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UsualRates:
    """What is usual for a kind of training, which `kind` says in words. The other attributes are
    options of `TrainingOptions`."""

    kind: str
    learning_rate: float
    warmup: float = 0.1
    min_rate: float = 0.0
    weight_decay: float = 0.0
    clip: float = 1.0


NEW = UsualRates(learning_rate=2e-3, min_rate=0.05, weight_decay=0.1, kind="a new model")
IMAGES = dataclasses.replace(NEW, learning_rate=3e-4, kind="AlexNet")
# As the recipes of Zephyr 7B in Hugging Face's alignment handbook; QLoRA (arXiv 2305.14314) has the
# same 2e-4. The rate of a new model would undo what the folder's model has learned.
ALL_WEIGHTS = UsualRates(learning_rate=2e-5, kind="all weights of a trained model")
ADAPTERS = UsualRates(learning_rate=2e-4, kind="adapters")
ALL_WEIGHTS_DPO = UsualRates(learning_rate=5e-7, kind="preferences on all weights")
ADAPTERS_DPO = UsualRates(learning_rate=5e-6, kind="preferences on adapters")


def rates_for(options: TrainOptions, *, preferences: bool = False) -> UsualRates:
    """Return what is usual for a run.

    Args:
      options: the run's options.
      preferences: whether it learns from preferences (DPO).
    """
    if options.model.model == "alexnet":
        return IMAGES
    if options.lora.lora_rank is not None or options.lora.lora_init is not None:
        return ADAPTERS_DPO if preferences else ADAPTERS
    if options.model.init is None:
        return NEW
    return ALL_WEIGHTS_DPO if preferences else ALL_WEIGHTS


def with_rates(options: TrainOptions, rates: UsualRates | None = None, **file: Any) -> TrainOptions:
    """Return options in which the rates that are not given are the usual ones.

    Args:
      options: the options.
      rates: the usual rates. None takes those of `rates_for`.
      **file: rates that a file says, which stand before the usual ones.
    """
    training = options.training
    usual = {**dataclasses.asdict(rates or rates_for(options)), **file}
    del usual["kind"]
    missing = {name: x for name, x in usual.items() if getattr(training, name) is None}
    return dataclasses.replace(options, training=dataclasses.replace(training, **missing))


def settled(
    options: TrainOptions,
    *,
    preferences: bool = False,
    folder: Mapping[str, Any] | None = None,
    run: Path | None = None,
) -> tuple[TrainOptions, list[Setting]]:
    """Return options in which everything is chosen that was left open, and the table of settings.

    A file of --deepspeed wins over what is chosen, and the user over both. A resumed run has the
    settings that its folder holds; one of an earlier version has that version's.

    Args:
      options: the options; None stands for what is open.
      preferences: whether the run learns from preferences (DPO).
      folder: the config.json of the model's folder; None if the model comes from none.
      run: the run's folder if it is resumed.

    Raises:
      ValueError: an option has no effect beside the optimizer of the file.
    """
    values = contents(kept_deepspeed(options.zero, run))
    of_file = f"--deepspeed {options.zero.deepspeed}"
    in_file = says_optimizer(values)
    rates = NEW if run is not None else rates_for(options, preferences=preferences)
    clip = number_of(values.get("gradient_clipping"))
    clips = {} if in_file or not isinstance(clip, int | float) else {"clip": float(clip)}
    training, usual = options.training, ALEXNET.training
    if options.model.model != "alexnet":
        usual = type(training)()

    def why(name: str) -> str:
        if run is not None:
            return "as the run began"
        if getattr(training, name) not in (None, getattr(usual, name)):
            return f"given: {flag(name)}"
        return of_file if name in clips else f"usual for {rates.kind}"

    options = with_rates(options, rates, **clips)
    chosen = options.training
    if in_file and training.optimizer is None:
        if run is None:
            training.check_own(usual, takes(values))
        rows = [Setting("optimizer and rates", "the file's", of_file)]
        if {"learning_rate", "weight_decay"} & takes(values):
            auto = f"{chosen.learning_rate:g} and {chosen.weight_decay:g} where the file says auto"
            rows.append(Setting("rate and decay", auto, why("learning_rate")))
    else:
        warm = round((chosen.warmup or 0) * chosen.steps)
        cosine = f"then a cosine to {chosen.min_rate:g} of the rate"
        rows = [
            Setting("optimizer", chosen.optimizer or "adamw", why("optimizer")),
            Setting("learning rate", f"{chosen.learning_rate:g}", why("learning_rate")),
            Setting("schedule", f"{warm} of {chosen.steps} steps up, {cosine}", why("warmup")),
            Setting("weight decay", f"{chosen.weight_decay:g}", why("weight_decay")),
            Setting("clipping", f"{chosen.clip:g}", why("clip")),
        ]
    return _with_dtype(options, rows, said_dtype(values), of_file, folder, run)


def settled_rlhf(
    options: RlhfOptions,
    before: TrainOptions,
    folder: Mapping[str, Any] | None,
    run: Path | None = None,
) -> tuple[RlhfOptions, list[Setting]]:
    """Return options of `zeroxla rlhf` in which everything is chosen that was left open, and the
    table of settings; see `settled`.

    Args:
      options: the options.
      before: those that made the model at the start.
      folder, run: as for `settled`.
    """
    learning = options.learning
    new = before.model.init is None or run is not None
    adapters = options.storage.lora_rank is not None
    # DeepSeekMath (arXiv 2402.03300) trains with 1e-6 by GRPO; adapters take ten times as much.
    actor, critic = (1e-3, 3e-3) if new else (1e-5 if adapters else 1e-6, 1e-5)
    usual = {"learning_rate": actor, "critic_learning_rate": critic}
    kind = "a small new model" if new else "a trained model's adapters" * adapters or "all weights"
    missing = {name: x for name, x in usual.items() if getattr(learning, name) is None}
    why = {
        name: f"usual for {kind}" if name in missing else f"given: {flag(name)}" for name in usual
    }
    if run is not None:
        why = dict.fromkeys(usual, "as the run began")
    values = contents(kept_deepspeed(options.zero, run))
    of_file = f"--deepspeed {options.zero.deepspeed}"
    chosen = dataclasses.replace(learning, **missing)
    if says_optimizer(values) and learning.optimizer is None:
        if run is None:
            learning.check_own(type(learning)())
        rows = [Setting("optimizer and rates", "the file's", of_file)]
    else:
        rate, of_critic = chosen.learning_rate, chosen.critic_learning_rate
        rows = [Setting("learning rate", f"{rate:g}, constant", why["learning_rate"])]
        if options.task.algorithm == "ppo":
            rows.append(Setting("critic", f"{of_critic:g}", why["critic_learning_rate"]))
    options = dataclasses.replace(options, learning=chosen)
    return _with_dtype(options, rows, said_dtype(values), of_file, folder, run)


_Options = TypeVar("_Options", "TrainOptions", "RlhfOptions")


def _with_dtype(
    options: _Options,
    rows: list[Setting],
    in_file: str | None,
    of_file: str,
    folder: Mapping[str, Any] | None,
    run: Path | None,
) -> tuple[_Options, list[Setting]]:
    """Choose the dtype of the computation, and add its row."""
    zero = options.zero
    if zero.compute_dtype is not None:
        dtype = zero.compute_dtype
        why = "given: --compute-dtype" if run is None else "as the run began"
    elif in_file is not None:
        return options, [*rows, Setting("compute dtype", in_file, of_file)]
    elif folder is not None and run is None:
        dtype, why = folder_dtype(folder), "the dtype in the model's config.json"
    else:
        dtype, why = "float32", "usual for a new model" if run is None else "as the run began"
    options = dataclasses.replace(options, zero=dataclasses.replace(zero, compute_dtype=dtype))
    return options, [*rows, Setting("compute dtype", dtype, why)]
