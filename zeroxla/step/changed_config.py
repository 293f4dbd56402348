"""Options that meet other arguments of `make_step`, or the options of another step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from zeroxla.config.splits import Splits
from zeroxla.config.zero_config import ZeroConfig


def with_microbatches(config: ZeroConfig, microbatches: int | None) -> ZeroConfig:
    """Return the options with the number of micro-batches that `make_step` was given.

    Raises:
      ValueError: `config.accumulate` is another number, or this one is out of range.
    """
    if microbatches is None:
        return config
    if config.accumulate not in (1, microbatches):
        raise ValueError(
            f"microbatches={microbatches} and config.accumulate={config.accumulate!r} contradict "
            "each other; give one of them"
        )
    return dataclasses.replace(config, accumulate=microbatches)


def kept(config: ZeroConfig, old: ZeroConfig) -> ZeroConfig:
    """Return new options with the frozen leaves, and the pinned ones, that the states of a step
    have.

    Args:
      config: the new options.
      old: the step's own.

    Raises:
      ValueError: the new options freeze other leaves, or pin others.
    """
    if not set(config.frozen) <= set(old.frozen):
        raise ValueError(
            f"with_config(frozen={list(config.frozen)}) of a step with frozen={list(old.frozen)}: "
            "its states have no optimizer state for frozen leaves, and one for all others; make a "
            "step with make_step, and its state with init_from(state.params, key)"
        )
    own = {} if old.splits is None else old.splits.leaves
    if config.splits is not None and config.splits.leaves not in ({}, own):
        raise ValueError(
            f"with_config(splits=Splits(leaves={config.splits.leaves})) of a step with leaves="
            f"{own}: its states know which leaves are split; make a step with make_step, and move "
            "the state with step.reshape(state, other)"
        )
    splits = config.splits
    if own:
        splits = dataclasses.replace(Splits() if splits is None else splits, leaves=own)
    return dataclasses.replace(config, frozen=old.frozen, splits=splits)


def useless_optimizer(config: ZeroConfig, old: ZeroConfig) -> Iterator[str]:
    """Yield a sentence if new options name an optimizer that the step's states do not fit."""
    if config.optimizer is not None and config.optimizer is not old.optimizer:
        yield (
            "with_config keeps the optimizer of the step, whose moments the state holds: "
            "config.optimizer has no effect; for another one make a step with make_step, and its "
            "state with init_from(state.params, key)"
        )
