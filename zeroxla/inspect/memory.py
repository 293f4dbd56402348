"""`memory`: what one device holds while a program runs, or while a model trains and generates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import jax

from zeroxla.program.compiled_memory import MemoryReport
from zeroxla.step.step import Step

if TYPE_CHECKING:
    from zeroxla.hybrid.engine import HybridEngine
    from zeroxla.hybrid.phase_memory import PhaseReport
    from zeroxla.step.memory.step_memory import StepMemory


@overload
def memory(program: jax.stages.Compiled) -> MemoryReport: ...


@overload
def memory(program: Step) -> StepMemory: ...


@overload
def memory(
    program: HybridEngine,
    *,
    phases: Literal[True],
    num_prompts: int | None = None,
    length: int | None = None,
) -> PhaseReport: ...


def memory(
    program: Any,
    *,
    phases: bool = False,
    num_prompts: int | None = None,
    length: int | None = None,
) -> MemoryReport | PhaseReport | StepMemory:
    """Report the memory of one device, for a step, for a compiled program, or for a model that
    trains and generates in turns.

    Args:
      program: a `zeroxla.Step` that has seen the shapes of a batch (`step.abstract_state`), or a
        compiled program, such as `step.lower(state, batch).compile()`. With `phases`, a
        `zeroxla.HybridEngine`; its step needs no state, but must have seen such shapes too.
      phases: report the bytes of the state, the gradients, the tensor-parallel copy and its cache,
        while training and while generating. They follow from shapes: nothing is compiled or
        allocated.
      num_prompts, length: with `phases`, the cache's number of prompts, and the tokens of each with
        its continuation. None means no cache.

    Returns:
      Of a step, a `StepMemory`: what a device holds at the peak, by what it consists of, the
      largest residents with the model's lines, and the curve over the step, all from the live
      ranges of its trace. Of a compiled program, a `MemoryReport` of the compiler's own figures;
      with `phases`, a `PhaseReport`. The compiler
      has more figures, but on the CPU its peak and its `host_*` figures mean nothing, so they are
      left out. There, sum live arrays with `array_bytes_per_device`.

    Raises:
      ValueError: `program` is neither a step, nor a compiled program, nor, with `phases`, an
        engine; the step has seen no batch; or the backend reports no memory.

    On the CPU, XLA schedules for concurrency rather than memory. Figures meant for comparison need
    `--xla_cpu_enable_concurrency_optimized_scheduler=false` in XLA_FLAGS, and JAX 0.11 or later.
    """
    if phases:
        if not hasattr(program, "phases"):
            raise ValueError(
                f"memory(..., phases=True) reads a zeroxla.HybridEngine, not "
                f"{type(program).__name__}; make one from the step"
            )
        return program.phases(num_prompts, length)
    if isinstance(program, Step):
        return program.memory()
    if not isinstance(program, jax.stages.Compiled):
        raise ValueError(
            f"memory() reads a step or a compiled program, not {type(program).__name__}; "
            "call .compile() on a lowered one, or pass phases=True with an engine"
        )
    return MemoryReport.of(program)
