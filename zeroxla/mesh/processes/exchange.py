"""Exchanges short texts between processes, through the coordinator's key-value store.

No device is involved. So this works before devices are known, and even if processes could not agree
on a collective.
"""

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
    """Give a text to every process, and return the texts of all, by process.

    Every process must call this, in the same order relative to other calls, or with a name.

    Args:
      topic: subject of the text, for messages.
      text: up to some kilobytes.
      timeout: seconds to wait for the other processes.
      name: a name that no other call has. Calls outside the main thread need one, as they have no
        order.

    Raises:
      TimeoutError: a process did not give its text in time.

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
        # The client raises its own error, whose class jaxlib does not export.
        except Exception as error:
            raise TimeoutError(
                f"process {process} has not said its {topic} within {timeout:.0f} s; it is slow, "
                "has ended, or runs another program"
            ) from error
    return texts


def agree(topic: str, says: Mapping[str, str], remedy: str) -> None:
    """Check that all processes give the same texts.

    Args:
      topic: as in `exchange`.
      says: short texts by name.
      remedy: advice to the user, for the message.

    Raises:
      ValueError: the texts differ.
      TimeoutError: a process did not give its texts in time.
    """
    said = [json.loads(text) for text in exchange(topic, json.dumps(dict(says)))]
    if lines := differences(said):
        raise ValueError(f"processes differ in their {topic}; {remedy}\n{lines}")


def on_first(topic: str, action: Callable[[], _T]) -> _T | None:
    """Run an action in process 0 alone. Return its result there, and None in the others.

    Args:
      topic: as in `exchange`.
      action: the function to call.

    Raises:
      ValueError: the action raised one; every process raises it.
      RuntimeError: the action raised another error; process 0 raises that one, the others raise
        this.
    """
    result, failure = None, None
    if jax.process_index() == 0:
        try:
            result = action()
        except Exception as error:  # raised again below, once the others know about it
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
    """Return a line for each name whose text differs between a process and process 0; "" if there
    is none."""
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
    """Check that all processes are about to run the same program. In different programs they would
    wait for each other for ever.

    Args:
      name: the program's name.
      lowered: the program, lowered for the arguments that it is about to be called with.
      options: the configuration's options, each as a text.

    Raises:
      ValueError: as in `agree`.
      TimeoutError: as in `agree`.
    """
    digest = hashlib.blake2b(lowered.as_text().encode(), digest_size=8).hexdigest()
    says = {**options, "program": digest}
    agree(f"{name} program", says, "build the same model, optimizer and options everywhere")
