"""The options of `zeroxla rlhf` that go together, and those that a resumed run may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.train.checks import WORKING, named

FREE = frozenset(
    {"run", "resume", "steps", "save_every", "keep", "samples", "tensor", "max_skipped"}
    | {"zero", "accumulate"}
    | {f.name for group in WORKING for f in dataclasses.fields(group)}
)
"""A resumed run takes these from the command line; a change of any other option is another run."""

_OF_THE_START = ("pretrain_steps", "length", "layers", "width", "heads")


def check_given(arguments: Sequence[str], options: RlhfOptions) -> None:
    """Check that a command line names no option that has no effect beside the others.

    Args:
      arguments: the words of the command line.
      options: the values that they give; for the rest, those of the resumed run or the defaults.

    Raises:
      ValueError: with the options, and the remedy.
    """
    if options.start.init_run is not None and (found := named(arguments, _OF_THE_START)):
        raise ValueError(f"{found}: without effect, --init-run says what the model is; leave out")
    if options.storage.lora_rank is None and (found := named(arguments, ("lora_alpha",))):
        raise ValueError(f"{found}: without effect, there are no adapters; give --lora-rank 8")
    if options.task.algorithm == "grpo" and (found := named(arguments, ("critic_learning_rate",))):
        raise ValueError(
            f"{found}: without effect, grpo has no critic; leave out, or give --algorithm ppo"
        )
