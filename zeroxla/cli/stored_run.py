"""`StoredRun`: a run that has checkpoints, and the model whose state they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroxla.checkpoint.checkpointer import Checkpointer
from zeroxla.cli.deepspeed_file import kept_deepspeed
from zeroxla.cli.islands.folders import island_folders
from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.rlhf.start import actor_of
from zeroxla.cli.run_folder import CHECKPOINTS, CONFIG, has_checkpoint, read_config
from zeroxla.cli.run_sections import stored_options
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.zero_options import zero_config


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """A run of `zeroxla train` or `zeroxla rlhf`.

    Attributes:
      folder: the run's folder.
      options: the options that made the model; of a run of rlhf, those of the training before it.
      config: the contents of the run's config.json.
    """

    folder: Path
    options: TrainOptions
    config: dict[str, Any]

    @staticmethod
    def of(folder: Path, use: str) -> StoredRun:
        """Return the run in a folder.

        Args:
          folder: the folder.
          use: what the run is for, as in "a run to export".

        Raises:
          ValueError: the folder holds no run, or a run without a checkpoint.
        """
        if not (folder / CONFIG).is_file():
            islands = ", ".join(path.name for path in island_folders(folder))
            raise ValueError(
                f"{folder} holds no run to {use} (it has no config.json); name the folder of "
                + (
                    f"one of its islands: {islands}"
                    if islands
                    else "a run of zeroxla train or rlhf"
                )
            )
        config = read_config(folder)
        # A run of rlhf also holds the options of the training before it, which describe the model.
        section = "before" if config.get("command") == "rlhf" else "options"
        options = stored_options(TrainOptions, folder, section)
        if not has_checkpoint(folder):
            raise ValueError(
                f"{folder} holds no checkpoint yet; let it train until it has saved one"
            )
        return StoredRun(folder=folder, options=options, config=config)

    @property
    def is_rewarded(self) -> bool:
        """Whether it is a run of `zeroxla rlhf`."""
        return self.config.get("command") == "rlhf"

    @property
    def base(self) -> Path | None:
        """The Hugging Face folder whose weights the run began with; None if it had none. A run of
        rlhf that goes on from another run has that one's."""
        if self.is_rewarded and stored_options(RlhfOptions, self.folder).start.init_run is not None:
            return None
        return self.options.model.init

    @property
    def compute_dtype(self) -> str:
        """The dtype in which the run computes.

        Raises:
          ValueError: its options cannot be read.
        """
        own: Any = stored_options(RlhfOptions if self.is_rewarded else TrainOptions, self.folder)
        deepspeed = kept_deepspeed(own.zero, self.folder)
        return zero_config(own, {}, deepspeed=deepspeed).compute_dtype

    @property
    def eos(self) -> int | None:
        """The token that ended the responses of a run of rlhf; None without one."""
        return stored_options(RlhfOptions, self.folder).task.eos if self.is_rewarded else None

    def as_stored(self, model: Any) -> Any:
        """Return the model whose state the checkpoints hold.

        Args:
          model: the model of the options, with the adapters that `zeroxla train` gave it, if any.
        """
        return actor_of(self.folder, model) if self.is_rewarded else model

    def number(self, step: int | None, report: Callable[[str], None]) -> int:
        """Return the number of the checkpoint to read: `step`, or the newest that is not damaged.

        Args:
          step: the step that is asked for, if one is.
          report: called with a sentence for each damaged checkpoint that is passed over.

        Raises:
          ValueError: all checkpoints are damaged.
        """
        if step is not None:
            return step
        with Checkpointer(self.folder / CHECKPOINTS, keep=None, report=report) as checkpointer:
            number = checkpointer.latest()
        if number is None:
            raise ValueError(f"every checkpoint of {self.folder} is damaged")
        return number
