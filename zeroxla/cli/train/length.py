"""Decides the length of a run's sequences, where `--length` does not say it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import jax

from zeroxla.cli.train.model import ModelChoice
from zeroxla.cli.train.options import TrainOptions
from zeroxla.mesh.processes.exchange import exchange, on_first

MULTIPLE = 64
"""Lengths are multiples of it, so that they divide over mesh axes and fill the tiles of kernels."""
SIMULATED_BYTES = 2 << 30
"""The memory of a device that does not say how much it has, as simulated ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Length:
    """A length, and where it is from, in words."""

    tokens: int
    source: str


def given(options: TrainOptions, choice: ModelChoice) -> Length | None:
    """Return the length of `--length`; None if the options have none."""
    length = options.text.length
    if length is None:
        return None
    source = "--length"
    if choice.context is not None and length > choice.context:
        source += f"; the model was trained for {choice.context:,}"
    return Length(length, source)


def bounded(wanted: int, source: str, choice: ModelChoice, options: TrainOptions) -> Length:
    """Return a length that the model and the devices' memory allow.

    Args:
      wanted: the length, without these.
      source: where it is from, in words.
      choice: the model.
      options: the run's options, with the batch.
    """
    length, said = -(-wanted // MULTIPLE) * MULTIPLE, source
    context = choice.length if options.model.init is not None else None
    context = context or choice.context
    if context is not None and length > context:
        length, said = context, f"the model's context; {source} is {wanted:,}"
    memory = _device_bytes()
    rows = _rows_at_once(options)
    fits = memory // max(1, rows * choice.token_bytes) // MULTIPLE * MULTIPLE
    if length > max(fits, MULTIPLE):
        length = max(fits, MULTIPLE)
        said = (
            f"what fits in a device's {memory / 2**30:.1f} GiB with {rows} rows at once, by an "
            f"estimate of {choice.token_bytes:,} bytes a token; {source} is {wanted:,}, for which "
            "--accumulate or a smaller --batch makes room"
        )
    return Length(length, said)


def agreed(decide: Callable[[], tuple[Length, str]]) -> tuple[Length, str]:
    """Return the length that the first process decides, and its report on the data.

    Args:
      decide: returns both. Other processes do not call it.

    Raises:
      ValueError: as `decide`, in all processes.
    """
    topic = "length of sequences"
    found = on_first(topic, decide)
    mine = None if found is None else [found[0].tokens, found[0].source, found[1]]
    tokens, source, report = json.loads(exchange(topic, json.dumps(mine))[0])
    return Length(tokens, source), report


def with_length(options: TrainOptions, length: int) -> TrainOptions:
    """Return options with a length."""
    return dataclasses.replace(options, text=dataclasses.replace(options.text, length=length))


def _rows_at_once(options: TrainOptions) -> int:
    """Return the rows of a device's micro-batch. Axes that split the work on a row count as if they
    split the rows."""
    accumulate = options.zero.accumulate
    parts = jax.device_count() * (accumulate if isinstance(accumulate, int) else 1)
    return max(1, options.text.batch // parts)


def _device_bytes() -> int:
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit") or SIMULATED_BYTES)
