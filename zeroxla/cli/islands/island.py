"""`zeroxla island`: the processes of one island, which join a coordinator elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zeroxla.cli.errors import UsageError
from zeroxla.cli.islands.secret import check_address, needed_token
from zeroxla.cli.launch.options import ProcessOptions
from zeroxla.cli.launch.ranks import Share
from zeroxla.cli.launch.run import launch
from zeroxla.cli.read_options import read_options
from zeroxla.mesh.processes.environment import ISLANDS, ISLANDS_TOKEN, SLOT, island_of

LARGEST_SLOT = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandOptions(ProcessOptions):
    """Start a program as the processes of one island, which joins a coordinator: see zeroxla
    coordinate. The program follows `--`, as in: zeroxla island --join 10.0.0.1:29500 --slot 0 --
    zeroxla train --outer streaming

    The processes run on this machine, or on those of --hostfile. When one fails all are stopped;
    --max-restarts starts them again, and the island joins again.

    The secret that all islands share is read from ZEROXLA_ISLANDS_TOKEN, or from the file that
    ZEROXLA_ISLANDS_TOKEN_FILE names.
    """

    join: str
    """Address of the coordinator, HOST:PORT."""
    slot: int | None = None
    """Number of this island, from 0, and of its part of the data; another one for each island.
    zeroxla train needs it. Default: ZEROXLA_SLOT, or the first one that is free."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address("--join", self.join)
        if self.slot is not None and not 0 <= self.slot <= LARGEST_SLOT:
            raise ValueError(f"--slot {self.slot}: at least 0, and at most {LARGEST_SLOT}")


def run(arguments: Sequence[str]) -> int:
    """Run `zeroxla island`: its options, then `--`, then the program; return the exit status.

    Raises:
      UsageError: there is no secret, or an option or the program cannot be used.
    """
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = read_options("island", arguments[:at], IslandOptions)
    token = needed_token()
    try:
        _, _, slot = island_of(options.join, token, options.slot)
        env = {ISLANDS: options.join, ISLANDS_TOKEN: token}
        if slot is not None:
            env[SLOT] = str(slot)
        return launch(options, arguments[at + 1 :], name="island", share=Share(env=env))
    except ValueError as error:
        raise UsageError(str(error)) from error
