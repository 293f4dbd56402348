"""Options of low-rank adapters, which several commands share."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zeroxla.cli.option_groups import flag

BEGUN_FROM = "begun_from"
"""The folder of a run with the adapter that it began from."""


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Low-rank adapters."""

    lora_rank: int | None = None
    """Rank of adapters; only they are trained. Default: no adapters, the whole model is trained."""
    lora_alpha: float = 16.0
    """Strength of the adapters: their output is multiplied by alpha / rank."""
    lora_rank_stabilized: bool = False
    """Multiply the adapters' output by alpha / sqrt(rank) instead (rsLoRA)."""
    lora_dora: bool = False
    """Train the norms of the adapted kernels' columns beside the adapters (DoRA)."""
    lora_targets: str | None = None
    """Regular expression that finds the paths of the leaves with adapters. Default: the kernels of
    attention and perceptrons, (attn|mlp)/(.*/)?kernel$."""

    @property
    def useless(self) -> list[str]:
        """The flags of options that have no effect, because there are no adapters."""
        if self.lora_rank is not None:
            return []
        usual = type(self)()
        names = [name for name in vars(self) if name.startswith("lora_")]
        return [flag(name) for name in names if getattr(self, name) != getattr(usual, name)]


@dataclass(frozen=True, kw_only=True)
class LoraOptions(AdapterOptions):
    """Low-rank adapters on a frozen base."""

    lora_base: Literal["float32", "int8", "int4"] = "float32"
    """Format in which the base's dense leaves are stored and gathered."""
    lora_init: Path | None = None
    """Folder of an adapter in PEFT's format to begin from, on the base that --init names. It says
    the rank and everything else of --lora-*, but for --lora-base."""

    @property
    def useless(self) -> list[str]:
        """The flags of options that have no effect: there are no adapters, or they are a file's."""
        usual = type(self)()
        if self.lora_init is None:
            return super().useless
        of_file = [name for name in vars(self) if name not in ("lora_base", "lora_init")]
        return [flag(name) for name in of_file if getattr(self, name) != getattr(usual, name)]

    def check(self) -> None:
        """Check these options.

        Raises:
          ValueError: they have no effect.
        """
        if self.useless and self.lora_init is not None:
            raise ValueError(
                f"{', '.join(self.useless)}: --lora-init {self.lora_init} says what the adapters "
                "are; leave these options out"
            )
        if self.useless:
            raise ValueError(
                f"{', '.join(self.useless)}: without effect, there are no adapters; give "
                "--lora-rank 8"
            )

    def adapter_of(self, run: Path | None) -> Path | None:
        """Return the folder of the adapter to begin from: the copy in the run's folder, if there is
        one. None if adapters are new, or there are none."""
        kept = run / BEGUN_FROM if run is not None else None
        return kept if kept is not None and kept.is_dir() else self.lora_init

    def keep(self, run: Path) -> None:
        """Copy the adapter to begin from into the run's folder, for resuming and exporting.

        Raises:
          ValueError: a file cannot be copied.
        """
        if self.lora_init is None:
            return
        try:
            (run / BEGUN_FROM).mkdir(exist_ok=True)
            for file in sorted(self.lora_init.expanduser().glob("adapter_*")):
                shutil.copyfile(file, run / BEGUN_FROM / file.name)
        except OSError as error:
            raise ValueError(
                f"cannot copy the adapter from {self.lora_init} to {run / BEGUN_FROM}: "
                f"{error.strerror}"
            ) from error

    def adapted(self, model: Any, run: Path | None = None) -> Any:
        """Return a model with adapters, or the model itself if none are asked for.

        Args:
          model: the model.
          run: the run's folder, if there is one already.

        Raises:
          ValueError: as `zeroxla.lora`, or `zeroxla.lora_from_adapter`.
        """
        frozen = None if self.lora_base == "float32" else self.lora_base
        if (folder := self.adapter_of(run)) is not None:
            from zeroxla.checkpoint.weights.adapter_import import lora_from_adapter

            return lora_from_adapter(model, folder, frozen=frozen)
        if self.lora_rank is None:
            return model
        from zeroxla.frontend.lora.model import lora  # here, because --help need not wait for JAX
        from zeroxla.rlhf.make import TARGETS

        return lora(
            model,
            targets=self.lora_targets or TARGETS,
            rank=self.lora_rank,
            alpha=self.lora_alpha,
            rank_stabilized=self.lora_rank_stabilized,
            dora=self.lora_dora,
            frozen=frozen,
        )
