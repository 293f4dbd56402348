"""Which options of `zeroxla train` go together, and which of them a resumed run may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from zeroxla.cli.offload_options import OffloadOptions
from zeroxla.cli.option_groups import flag
from zeroxla.cli.train.options import TrainOptions

# A resumed run takes these from the command line; a change of any other is another run.
# Checkpoints open on any mesh, whatever the way it communicates.
# With another number of steps the learning rate follows the new schedule from the checkpoint on.
FREE = frozenset(
    {"run", "resume", "steps", "eval_every", "eval_batches", "save_every", "keep"}
    | {"prompt", "sample_bytes", "temperature"}
    | {"nodes", "devices_per_node", "zero", "accumulate", "persistence_threshold"}
    | {f.name for f in dataclasses.fields(OffloadOptions)}
    | {"pipe", "schedule", "partition"}
)

_OF_ONE_MODEL = {
    "gpt": ("init", "layers", "width", "heads", "length", "prompt", "sample_bytes", "temperature"),
    "alexnet": ("image_size", "width_multiplier"),
}
_OF_STAGES = ("schedule", "partition")


class Options(Protocol):
    """The options of a command that has runs."""

    def to_dict(self) -> dict[str, Any]:
        """Return groups of plain values."""
        ...


def check_resumable(stored: Options, given: Options, free: Collection[str] = FREE) -> None:
    """Check that `given` differs from the stored options of a run only where it may.

    Args:
      stored: of the run.
      given: those to go on with.
      free: names of those that may differ.

    Raises:
      ValueError: With each option that differs, both values, and the remedy.
    """
    old, new = stored.to_dict(), given.to_dict()
    differing = [
        f"{flag(name)} is {value!r} there and {new[group][name]!r} here"
        for group, values in old.items()
        for name, value in values.items()
        if name not in free and _plain(value) != _plain(new[group][name])
    ]
    if differing:
        raise ValueError(
            f"cannot resume with another configuration: {'; '.join(differing)}; leave these "
            "options out, or start a new run without --resume"
        )


def check_given(arguments: Sequence[str], options: TrainOptions) -> None:
    """Check that a command line names no option that has no effect beside the others.

    Args:
      arguments: the command line.
      options: what it says, and for the rest the run that it resumes or the defaults.

    Raises:
      ValueError: With the options, and the remedy.
    """
    mine = options.model.model
    for model, names in _OF_ONE_MODEL.items():
        if model != mine and (found := told(arguments, names)):
            raise ValueError(
                f"{found}: without effect on --model {mine}; leave out, or train --model {model}"
            )
    if options.pipeline.pipe == 1 and (found := told(arguments, _OF_STAGES)):
        raise ValueError(f"{found}: without effect on one stage; leave out, or give --pipe 2")


def told(arguments: Sequence[str], names: Sequence[str]) -> str:
    """Return which of some options a command line names, as a list with commas."""
    given = {x.partition("=")[0].replace("_", "-") for x in arguments if x.startswith("--")}
    return ", ".join(flag(name) for name in names if flag(name) in given)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
