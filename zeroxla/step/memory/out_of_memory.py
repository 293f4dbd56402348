"""`DeviceMemoryError`: a device ran out of memory, with what held it and what would help."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.program.report import format_bytes
from zeroxla.step.memory.device_facts import device_bytes
from zeroxla.step.memory.larger_meshes import in_words, larger_meshes
from zeroxla.step.memory.live_fit import least_bytes
from zeroxla.step.memory.step_memory import StepMemory, largest_in_words
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState

_WORDS = ("RESOURCE_EXHAUSTED", "out of memory")


class DeviceMemoryError(MemoryError):
    """A device has less memory than a step takes.

    Attributes:
      memory: what the device holds over the step, by the live ranges of the step's trace.
      least_bytes: the least `ZeroConfig(memory=)` at which the step would fit, by the same; None
        for a pipeline.
    """

    memory: StepMemory
    least_bytes: int | None

    def __init__(self, message: str, memory: StepMemory, least_bytes: int | None) -> None:
        super().__init__(message)
        self.memory, self.least_bytes = memory, least_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.memory, self.least_bytes)


class BudgetError(DeviceMemoryError, ValueError):
    """No choice meets `ZeroConfig(memory=)`. `least_bytes` is by the compiler's figures here."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a backend's error says that a device ran out of memory."""
    text = str(error)
    return any(word in text or word in text.lower() for word in _WORDS)


@contextlib.contextmanager
def explained(
    name: str, programs: Callable[[], Programs], state: TrainState, batch: Any
) -> Iterator[None]:
    """Return a context in which a backend's error of too little memory becomes a
    `DeviceMemoryError`, chained from it.

    Args:
      name: what runs, in words.
      programs: returns the functions that ran.
      state, batch: their arguments.

    Cost: nothing without an error; with one, three or four traces of the step.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise memory_error(name, programs(), state, batch) from error


def memory_error(name: str, programs: Programs, state: TrainState, batch: Any) -> DeviceMemoryError:
    """Return the error for a step that took more than a device has; see `explained`."""
    mesh, config = programs.mesh, programs.config
    memory = StepMemory.of(programs, state, batch)
    keeps_all = dataclasses.replace(programs, activations=None)
    least = least_bytes(keeps_all, state, batch)
    room = _room(mesh)
    rows = jax.tree.leaves(batch)[0].shape[0]
    words = [
        f"{name} ran out of memory on a device"
        + ("" if room is None else f", which has {format_bytes(room)}")
        + f". By the live ranges of its trace it takes {format_bytes(memory.total_bytes)} at the "
        f"peak, {format_bytes(memory.state_bytes)} of them for state and batch. The largest: "
        f"{largest_in_words(memory)}."
    ]
    words += _remedies(config, memory, least, room)
    meshes = larger_meshes(memory, mesh, batch, config.num_micro_batches, room)
    if meshes:
        words.append(f"By division a device would hold {in_words(meshes, rows)}.")
    words.append("zeroxla.inspect.memory(step) says more.")
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state)):
        words.append(
            "The state was donated to the step and is lost: restore it from the last checkpoint."
        )
    return DeviceMemoryError(" ".join(words), memory, least)


def _remedies(
    config: ZeroConfig, memory: StepMemory, least: int | None, room: int | None
) -> list[str]:
    """Return a sentence on the option `memory`; none if it cannot help."""
    if least is None or least >= memory.total_bytes:
        return ["It keeps no activations that could be computed again."] if least else []
    holds = "" if room is None or least <= room else ", which is more than the device has"
    given = "" if config.memory is None else f" instead of {config.memory!r}"
    return [
        f"The least that it can take is about {format_bytes(least)}{holds}: "
        f"ZeroConfig(memory={_amount(least)!r}){given}, or more, computes activations again."
    ]


def _amount(num_bytes: int) -> str:
    """Return bytes as the option takes them, rounded up to a thousandth."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{-(-num_bytes * 1000 // size) / 1000:g}{unit}"
    return f"{num_bytes}B"


def _room(mesh: Any) -> int | None:
    """Return what a device of the mesh has; None if that is not known."""
    try:
        return device_bytes(mesh)
    except ValueError:
        return None
