"""The memory of a device while the hybrid engine generates, from a trace alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from zeroxla.hybrid.engine import HybridEngine
from zeroxla.hybrid.sampling import Sampling
from zeroxla.mesh.axes import platform_of
from zeroxla.program.live.liveness import Scope
from zeroxla.program.live.peak import peak_bytes
from zeroxla.program.report import Report, format_bytes
from zeroxla.program.walk import body_of, local_of
from zeroxla.step.step import Step

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generating:
    """A call of `HybridEngine.generate` that is planned.

    Attributes:
      num_prompts: the number of prompts, over all devices.
      prompt_length: the tokens of the longest prompt.
      new_tokens: the most tokens that are generated for each prompt.
      tensor: the number of devices that share a copy of the model.
    """

    num_prompts: int
    prompt_length: int
    new_tokens: int
    tensor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerationPlan(Report):
    """Bytes of one device while `HybridEngine.generate` runs.

    Attributes:
      generating: the planned call.
      state_bytes: the training state, which stays.
      copy_bytes: the device's part of the model in its compute dtype, 1 / tensor of it.
      cache_bytes: the cached keys and values.
      activation_bytes: the activations at the peak, prompts and logits among them.
    """

    generating: Generating
    state_bytes: int
    copy_bytes: int
    cache_bytes: int
    activation_bytes: int

    @staticmethod
    def of(step: Step, generating: Generating) -> GenerationPlan:
        """Plan a call.

        Args:
          step: a step that has seen a batch.
          generating: the call.

        Raises:
          ValueError: as `HybridEngine` and its `generate`.

        Cost: seconds, to prove the tensor-parallel layout on a small instance of the model.
        """
        engine = HybridEngine(step, tensor=generating.tensor)
        prompts, longest = generating.num_prompts, generating.prompt_length
        traced = engine.trace(prompts, longest, generating.new_tokens, Sampling())
        inside = local_of(body_of(traced.jaxpr))
        peak = peak_bytes(Scope.of(inside, platform_of(step.mesh))).total()
        phases = engine.phases(prompts, longest + generating.new_tokens)
        return GenerationPlan(
            generating=generating,
            state_bytes=phases.resting_bytes,
            copy_bytes=phases.layout_bytes,
            cache_bytes=phases.cache_bytes,
            activation_bytes=max(peak - phases.cache_bytes, 0),
        )

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.copy_bytes + self.cache_bytes + self.activation_bytes

    def parts(self) -> dict[str, int]:
        """Return the bytes by name; they add up to the total."""
        what = self.generating
        prompts = f"{what.num_prompts} prompts of {what.prompt_length} + {what.new_tokens} tokens"
        return {
            "training state": self.state_bytes,
            "tensor-parallel copy": self.copy_bytes,
            f"cache, {prompts}": self.cache_bytes,
            "activations": self.activation_bytes,
        }

    def table(self) -> Table:
        """Return the table for a rich console."""
        from rich.table import Table

        table = Table(
            title=f"Memory of one device that generates, tensor={self.generating.tensor}",
            title_justify="left",
        )
        table.add_column("part")
        table.add_column("", justify="right")
        for name, num_bytes in self.parts().items():
            table.add_row(name, format_bytes(num_bytes))
        table.add_section()
        table.add_row("in all", format_bytes(self.total_bytes))
        return table
