"""The options of `zeroxla rlhf` that go together, and those that a resumed run may change."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from zeroxla.cli.errors import UsageError
from zeroxla.cli.islands.here import in_island
from zeroxla.cli.outer_options import IslandsOptions
from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.train.checks import WORKING, check_of_stages, named
from zeroxla.mesh.processes.environment import ISLANDS

FREE = frozenset(
    {"run", "resume", "steps", "save_every", "keep", "samples", "tensor", "max_skipped"}
    | {"zero", "accumulate", "track", "profile"}
    | {f.name for group in WORKING for f in dataclasses.fields(group)}
)
"""A resumed run takes these from the command line; a change of any other option is another run."""

_OF_THE_START = ("pretrain_steps", "length", "layers", "width", "heads")


def check_alone(arguments: Sequence[str]) -> None:
    """Check that a command line asks for no islands, and that this process is part of none.

    Raises:
      UsageError: with the reason.
    """
    given = named(arguments, [field.name for field in dataclasses.fields(IslandsOptions)])
    if in_island():
        given = given or f"{ISLANDS}={os.environ[ISLANDS]}"
    if given:
        raise UsageError(
            f"{given}: zeroxla rlhf trains no islands; they exchange one model while it trains, "
            "and an iteration trains an actor and a critic in turns, and generates in between; "
            "leave it out, or use zeroxla train"
        )


def check_given(arguments: Sequence[str], options: RlhfOptions) -> None:
    """Check that a command line names no option that has no effect beside the others.

    Args:
      arguments: the words of the command line.
      options: the values that they give; for the rest, those of the resumed run or the defaults.

    Raises:
      ValueError: with the options, and the remedy.
    """
    check_of_stages(arguments, options.pipeline.pipe)
    start = options.start
    if start.init is not None and start.init_run is not None:
        raise ValueError(
            f"--init {start.init} and --init-run {start.init_run}: a run begins from one of them; "
            "leave the other out"
        )
    source = "--init-run" if start.init is None else "--init"
    begun = start.init is not None or start.init_run is not None
    if begun and (found := named(arguments, _OF_THE_START)):
        raise ValueError(f"{found}: without effect, {source} says what the model is; leave out")
    of_adapters = ("lora_alpha", "lora_rank_stabilized", "lora_dora")
    if options.storage.lora_rank is None and (found := named(arguments, of_adapters)):
        raise ValueError(f"{found}: without effect, there are no adapters; give --lora-rank 8")
    if options.task.algorithm == "grpo" and (found := named(arguments, ("critic_learning_rate",))):
        raise ValueError(
            f"{found}: without effect, grpo has no critic; leave out, or give --algorithm ppo"
        )
