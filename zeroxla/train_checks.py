"""Which options of `zeroxla train` go together, and which of them a resumed run may change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeroxla.train_options import TrainOptions, flag

# A resumed run takes these from the command line; a change of any other is another run.
# Checkpoints open on any mesh, whatever the way it communicates.
# With another number of steps the learning rate follows the new schedule from the checkpoint on.
FREE = frozenset(
    {"run", "resume", "steps", "eval_every", "eval_batches", "save_every", "keep"}
    | {"prompt", "sample_bytes", "temperature"}
    | {"nodes", "devices_per_node", "zero", "accumulate", "persistence_threshold"}
    | {"pipe", "schedule", "partition"}
)

_OF_ONE_MODEL = {
    "gpt": ("init", "layers", "width", "heads", "length", "prompt", "sample_bytes", "temperature"),
    "alexnet": ("image_size", "width_multiplier"),
}
_OF_STAGES = ("schedule", "partition")


def check_resumable(stored: TrainOptions, given: TrainOptions) -> None:
    """Check that `given` differs from the stored options of a run only where it may.

    Raises:
      ValueError: With each option that differs, both values, and the remedy.
    """
    old, new = stored.to_dict(), given.to_dict()
    differing = [
        f"{flag(name)} is {value!r} there and {new[group][name]!r} here"
        for group, values in old.items()
        for name, value in values.items()
        if name not in FREE and _plain(value) != _plain(new[group][name])
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
    given = {x.partition("=")[0].replace("_", "-") for x in arguments if x.startswith("--")}

    def told(names: Sequence[str]) -> str:
        return ", ".join(flag(name) for name in names if flag(name) in given)

    mine = options.model.model
    for model, names in _OF_ONE_MODEL.items():
        if model != mine and (found := told(names)):
            raise ValueError(
                f"{found}: without effect on --model {mine}; leave out, or train --model {model}"
            )
    if options.pipeline.pipe == 1 and (found := told(_OF_STAGES)):
        raise ValueError(f"{found}: without effect on one stage; leave out, or give --pipe 2")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
