"""What goes wrong with a write: one error in words, in every process."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator

from zeroxla.hosts.exchange import exchange

_saves = itertools.count()


class SaveError(RuntimeError):
    """A checkpoint could not be written; those before it are untouched."""


class Together:
    """Steps of one save that all processes take, or none: who fails alone would leave the others
    waiting. Make it in the main thread, in the same order in every process; call it anywhere.
    """

    def __init__(self) -> None:
        self._name = f"save {next(_saves)}"

    def __call__(self, topic: str, action: Callable[[], None], *, timeout: float) -> None:
        """Do something, and wait until all processes have.

        Args:
          topic: what is done, once for each save.
          action: this process's part.
          timeout: seconds to wait for the others.

        Raises:
          Exception: what the action raised.
          SaveError: it failed in another process.
          TimeoutError: another process has not come.
        """
        failure = None
        try:
            action()
        except Exception as error:  # raised again below, once the others know of it
            failure = error
        says = json.dumps(root_cause(failure) if failure else None)
        name = f"{self._name}: {topic}"
        said = [json.loads(text) for text in exchange(topic, says, timeout=timeout, name=name)]
        if failure is not None:
            raise failure
        for process, text in enumerate(said):
            if text is not None:
                raise SaveError(f"process {process} failed: {text}")


def root_cause(error: BaseException) -> str:
    """Return the first error of a chain, in words."""
    while error.__cause__ is not None:
        error = error.__cause__
    # tensorstore appends a dump of its whole specification.
    return str(error).split(" [tensorstore_spec")[0].split(" [os_error_code")[0]


@contextlib.contextmanager
def quiet_absl() -> Iterator[None]:
    """Keep Orbax from logging a failed write's traceback once for each thread that it passes
    through: the one error that is raised says it all."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
