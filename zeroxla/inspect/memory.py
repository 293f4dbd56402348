"""Memory per device: what the compiler will use, and what live arrays hold now."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal, overload

import jax

from zeroxla.offload.memory_kinds import Place, place_of

from zeroxla.program.report import Report

if TYPE_CHECKING:
    from rich.table import Table

    from zeroxla.hybrid.engine import HybridEngine
    from zeroxla.hybrid.phase_memory import PhaseReport


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes with a decimal unit (1 MB = 10^6 bytes).

    >>> format_bytes(8020000)
    '8.02 MB'
    """
    if num_bytes < 1000:
        return f"{num_bytes:g} B" if num_bytes == int(num_bytes) else f"{num_bytes:.1f} B"
    for power, unit in enumerate(("kB", "MB", "GB"), start=1):
        if num_bytes < 999.5 * 1000**power:
            return f"{num_bytes / 1000**power:.3g} {unit}"
    return f"{num_bytes / 1000**4:.4g} TB"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport(Report):
    """Bytes on one device while a compiled program runs, as planned by the compiler.

    Attributes:
      argument_bytes: the inputs: for a train step the state's shards and the batch.
      output_bytes: the outputs, those that reuse an argument's memory included.
      alias_bytes: outputs that reuse an argument's memory (donated state).
      temp_bytes: everything in between: activations, gathered leaves, gradients.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def total_bytes(self) -> int:
        """Arguments, temporaries and the outputs that need memory of their own."""
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes

    def parts(self) -> dict[str, int]:
        """Return the bytes by name; they add up to the total."""
        return {
            "arguments": self.argument_bytes,
            "temporaries": self.temp_bytes,
            "outputs": self.output_bytes - self.alias_bytes,
        }

    def table(self) -> Table:
        """Return the report as a rich table."""
        from rich.table import Table

        table = Table(title="Memory of one device", title_justify="left")
        table.add_column("part")
        table.add_column("bytes", justify="right")
        table.add_column("", justify="right")
        rows = (
            ("arguments", self.argument_bytes),
            ("temporaries", self.temp_bytes),
            ("outputs", self.output_bytes),
            ("outputs kept in arguments", -self.alias_bytes),
        )
        for name, num_bytes in rows:
            sign = "-" if num_bytes < 0 else ""
            table.add_row(name, f"{num_bytes:,}", sign + format_bytes(abs(num_bytes)))
        table.add_section()
        table.add_row("total", f"{self.total_bytes:,}", format_bytes(self.total_bytes))
        return table

    def to_dict(self) -> dict[str, int]:
        """Return the figures as a plain dict, for JSON."""
        return dataclasses.asdict(self) | {"total_bytes": self.total_bytes}


@overload
def memory(program: jax.stages.Compiled) -> MemoryReport: ...


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
) -> MemoryReport | PhaseReport:
    """Report the memory of one device: of a compiled program, or of a model that trains and
    generates in turns.

    Args:
      program: a compiled program, such as `step.lower(state, batch).compile()`; with `phases` a
        `zeroxla.HybridEngine`, whose step need not have a state, only have seen the shape of a
        batch (`step.abstract_state`).
      phases: report what the state, gradients, the tensor-parallel copy and its cache take while
        training and while generating, computed from shapes: nothing is compiled or allocated.
      num_prompts, length: with `phases`: of the cache, how many prompts, and how many tokens each
        with its continuation; none if None.

    Returns:
      The report of the compiler's own plan; or, with `phases`, a `PhaseReport`. The plan has more
      fields; its peak and its `host_*` fields mean nothing on the CPU and are left out (sum live
      arrays there: `array_bytes_per_device`).

    Raises:
      ValueError: neither a compiled program nor, with `phases`, an engine; or a backend that
        reports no memory.

    On the CPU, XLA schedules for concurrency rather than memory: figures meant for comparison need
    `--xla_cpu_enable_concurrency_optimized_scheduler=false` in XLA_FLAGS, and JAX 0.11 or later.
    """
    if phases:
        if not hasattr(program, "phases"):
            raise ValueError(
                f"memory(..., phases=True) reads a zeroxla.HybridEngine, not "
                f"{type(program).__name__}; make one from the step"
            )
        return program.phases(num_prompts, length)
    if not isinstance(program, jax.stages.Compiled):
        raise ValueError(
            f"memory() reads a compiled program, not {type(program).__name__}; "
            "call .compile() on a lowered one, or pass phases=True with an engine"
        )
    stats = program.memory_analysis()
    if stats is None:
        raise ValueError("this backend reports no memory figures for compiled programs")
    return MemoryReport(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
    )


def shard_bytes(shapes: Any, *, place: Place = "device") -> int:
    """Sum the bytes of one device's shards of arrays, of their shapes and shardings alone.

    Args:
      shapes: a pytree of arrays or ShapeDtypeStructs with shardings; PRNG keys count nothing.
      place: count what is there.
    """
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(shapes)
        if place_of(x) == place and not jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    )


def array_bytes_per_device(tree: Any, *, place: Place = "device") -> dict[jax.Device, int]:
    """Sum the bytes that the live arrays of a pytree hold on each device of this process.

    Args:
      tree: a pytree, such as a `TrainState`. Leaves that are no `jax.Array` count nothing; an array
        that appears twice (tied leaves) counts once.
      place: "device", or "host": count what is offloaded there instead.

    Returns:
      Bytes by device, for the devices that hold anything.

    Raises:
      RuntimeError: from JAX, if an array was donated or deleted.
    """
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)}
    held: dict[jax.Device, int] = {}
    for array in arrays.values():
        if place_of(array) != place:
            continue
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return held
