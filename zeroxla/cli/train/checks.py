"""The options of `zeroxla train` that go together, and those that a resumed run may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zeroxla.cli.mesh_options import AxesOptions, MeshOptions, PipelineOptions
from zeroxla.cli.offload_options import OffloadOptions
from zeroxla.cli.option_groups import flag
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.zero_options import FetchOptions, HopOptions, WireOptions

WORKING = (
    MeshOptions,
    AxesOptions,
    PipelineOptions,
    WireOptions,
    HopOptions,
    FetchOptions,
    OffloadOptions,
)
"""The groups of options that say how the mesh works, and not what is computed."""

# A resumed run takes these from the command line; a change of any other option is another run.
# Checkpoints open on any mesh, whatever way it communicates. With another number of steps the
# learning rate follows the new schedule from the checkpoint on.
FREE = frozenset(
    {"run", "resume", "steps", "eval_every", "eval_batches", "save_every", "keep", "max_bad_rows"}
    | {"prompt", "sample_bytes", "temperature", "max_skipped", "metric", "log_every"}
    | {"zero", "accumulate", "islands", "track", "profile", "dpo_tensor"}
    | {f.name for group in WORKING for f in dataclasses.fields(group)}
)

# Options that have an effect on one model only.
_OF_ONE_MODEL = {
    "gpt": (
        *("init", "layers", "width", "heads", "length", "prompt", "sample_bytes", "temperature"),
        *("lora_rank", "lora_alpha", "lora_rank_stabilized", "lora_dora"),
        *("lora_targets", "lora_base", "lora_init"),
        *("packing", "too_long", "max_bad_rows", "chat_template"),
        *("dpo_beta", "dpo_label_smoothing", "dpo_length_normalized", "dpo_tensor"),
    ),
    "alexnet": ("image_size", "width_multiplier"),
}
_OF_STAGES = ("schedule", "chunks", "stash", "partition", "weights", "memory")


def check_given(arguments: Sequence[str], options: TrainOptions) -> None:
    """Check that a command line names no option that has no effect beside the others.

    Args:
      arguments: the words of the command line.
      options: the values that they give; for the rest, those of the resumed run or the defaults.

    Raises:
      ValueError: with the options, and the remedy.
    """
    mine = options.model.model
    for model, names in _OF_ONE_MODEL.items():
        if model != mine and (found := named(arguments, names)):
            raise ValueError(
                f"{found}: without effect on --model {mine}; leave out, or train --model {model}"
            )
    check_of_stages(arguments, options.pipeline.pipe)


def check_of_stages(arguments: Sequence[str], pipe: int) -> None:
    """Check that a command line names no option of stages if there is one stage.

    Raises:
      ValueError: with the options, and the remedy.
    """
    if pipe == 1 and (found := named(arguments, _OF_STAGES)):
        raise ValueError(f"{found}: without effect on one stage; leave out, or give --pipe 2")


def named(arguments: Sequence[str], names: Sequence[str]) -> str:
    """Return the flags of those options that a command line names, with commas between them."""
    given = {x.partition("=")[0].replace("_", "-") for x in arguments if x.startswith("--")}
    return ", ".join(flag(name) for name in names if flag(name) in given)
