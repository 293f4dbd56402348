"""Options of low-rank adapters, which several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from zeroxla.cli.option_groups import flag


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

    def check(self) -> None:
        """Check these options.

        Raises:
          ValueError: they have no effect.
        """
        if self.useless:
            raise ValueError(
                f"{', '.join(self.useless)}: without effect, there are no adapters; give "
                "--lora-rank 8"
            )

    def adapted(self, model: Any) -> Any:
        """Return a model with adapters, or the model itself if none are asked for.

        Raises:
          ValueError: as `zeroxla.lora`.
        """
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
            frozen=None if self.lora_base == "float32" else self.lora_base,
        )
