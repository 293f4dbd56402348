"""`zeroxla coordinate`: the coordinator of islands that run elsewhere."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from zeroxla.cli.errors import UsageError
from zeroxla.cli.islands.events import in_words
from zeroxla.cli.islands.secret import check_address, needed_token
from zeroxla.cli.launch.stop_signals import StopSignals
from zeroxla.cli.read_options import read_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinateOptions:
    """Run the coordinator of islands, until Ctrl-C: it knows which islands are there, and decides
    who takes part in which exchange. It sees no parameters, and needs no accelerator. An island
    joins it with zeroxla island.

    The secret that all islands share with it is read from ZEROXLA_ISLANDS_TOKEN, or from the file
    that ZEROXLA_ISLANDS_TOKEN_FILE names.
    """

    islands: int
    """Number of islands that the first exchange waits for. Later ones take those that are there."""
    listen: str = "0.0.0.0:29500"
    """Address to listen at, HOST:PORT; port 0 takes a free one."""
    state: Path | None = None
    """File to go on from, which is written after each exchange. Default: none, and a coordinator
    that is started again learns from the islands what it can."""
    deadline: float = 60.0
    """Seconds that an exchange waits for an island that is late, or silent."""

    def __post_init__(self) -> None:
        if self.islands < 1:
            raise ValueError(f"--islands {self.islands}: at least 1")
        if not self.deadline > 0:
            raise ValueError(f"--deadline {self.deadline}: above 0")
        check_address("--listen", self.listen, least=0)


def run(arguments: Sequence[str]) -> int:
    """Run `zeroxla coordinate`; return the exit status.

    Raises:
      UsageError: there is no secret, or an option cannot work.
    """
    options = read_options("coordinate", arguments, CoordinateOptions)
    token = needed_token()
    # Here, because --help need not wait for it.
    from zeroxla.step.islands.membership.coordinator import Coordinator

    console = Console(highlight=False, soft_wrap=True)

    def say(event: dict[str, Any]) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {in_words(event)}", markup=False)

    stopped: queue.SimpleQueue[None] = queue.SimpleQueue()
    with StopSignals() as signals:
        signals.wake(stopped)
        try:
            coordinator = Coordinator(
                options.listen,
                token,
                num_islands=options.islands,
                state=options.state,
                deadline=options.deadline,
                say=say,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
        with coordinator:
            port = coordinator.address.rpartition(":")[2]
            console.print(
                f"Listening at {coordinator.address} for {options.islands} islands. Start each "
                f"with: zeroxla island --join HOST:{port} --slot K -- PROGRAM",
                markup=False,
            )
            stopped.get()
    console.print("Stopped; islands train on by themselves.")
    return 0
