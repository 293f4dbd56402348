"""Short texts between processes, through the coordinator's key-value store: no device is involved,
so it works before the devices are known, and when they could not agree on a collective."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax

from zeroxla.program.compat import coordination_client

_T = TypeVar("_T")
_calls = itertools.count()


def exchange(topic: str, text: str, *, timeout: float = 600, name: str | None = None) -> list[str]:
    """Give a text to every process and return those of all, by process.

    Every process must call it, in the same order relative to other calls, or with a name.

    Args:
      topic: what it is about, for messages.
      text: up to some kilobytes.
      timeout: seconds to wait for the others.
      name: which no other call has, for calls outside the main thread: these have no order.

    Raises:
      TimeoutError: a process did not come.

    Cost: one round trip to the coordinator for each process.
    """
    if jax.process_count() == 1:
        return [text]
    client = coordination_client()
    call = f"call {next(_calls)}" if name is None else name
    assert client is not None
    client.key_value_set(f"zeroxla/{call}/{topic}/{jax.process_index()}", text)
    texts = []
    for process in range(jax.process_count()):
        key = f"zeroxla/{call}/{topic}/{process}"
        try:
            texts.append(client.blocking_key_value_get(key, round(timeout * 1000)))
        # The client's own error, of a class that jaxlib does not name in public.
        except Exception as error:
            raise TimeoutError(
                f"process {process} has not said its {topic} within {timeout:.0f} s; it is slow, "
                "has ended, or runs another program"
            ) from error
    return texts


def agree(topic: str, says: Mapping[str, str], remedy: str) -> None:
    """Check that all processes say the same.

    Args:
      topic: as in `exchange`.
      says: short texts by name.
      remedy: what the user can do, for the message.

    Raises:
      ValueError: they do not.
      TimeoutError: a process did not come.
    """
    said = [json.loads(text) for text in exchange(topic, json.dumps(dict(says)))]
    if lines := differences(said):
        raise ValueError(f"processes differ in their {topic}; {remedy}\n{lines}")


def on_first(topic: str, action: Callable[[], _T]) -> _T | None:
    """Do something in process 0 alone; return its result there and None elsewhere.

    Args:
      topic: as in `exchange`.
      action: what to do.

    Raises:
      ValueError: in every process, if the action raised one.
      RuntimeError: in the others, if the action raised anything else in process 0.
    """
    result, failure = None, None
    if jax.process_index() == 0:
        try:
            result = action()
        except Exception as error:  # raised again below, once the others know of it
            failure = error
    known = [type(failure).__name__, str(failure)] if failure else None
    said = json.loads(exchange(topic, json.dumps(known))[0])
    if failure is not None:
        raise failure
    if said is not None:
        kind, text = said
        if kind == ValueError.__name__:
            raise ValueError(text)
        raise RuntimeError(f"process 0 failed at its {topic}: {kind}: {text}")
    return result


def differences(said: Sequence[Mapping[str, str]]) -> str:
    """Return a line for each name of which a process says otherwise than process 0; "" for none."""
    lines = []
    for name in dict.fromkeys(name for s in said for name in s):
        expected = said[0].get(name)
        others = [
            f"{s.get(name)} in process {i}" for i, s in enumerate(said) if s.get(name) != expected
        ]
        if others:
            lines.append(f"  {name}: {expected} in process 0, {', '.join(others)}")
    return "\n".join(lines)


def agree_on_program(name: str, lowered: jax.stages.Lowered, options: Mapping[str, str]) -> None:
    """Check that all processes are about to run the same program: they would wait for each other
    for ever in different ones.

    Args:
      name: of the program.
      lowered: for the mesh, from the arguments that it is about to be called with.
      options: of the configuration, each in words.

    Raises:
      ValueError: as in `agree`.
      TimeoutError: as in `agree`.
    """
    digest = hashlib.blake2b(lowered.as_text().encode(), digest_size=8).hexdigest()
    says = {**options, "program": digest}
    agree(f"{name} program", says, "build the same model, optimizer and options everywhere")
