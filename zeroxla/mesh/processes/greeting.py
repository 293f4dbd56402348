"""The greeting with which a process comes to a meeting: who it is, and proof that it belongs there.

Process 0 speaks first, with random bytes. The other answers with their digest under the run's
token, then with a line of JSON. So the token itself never travels, and nothing of a stranger's line
is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import secrets
from typing import Any

GREETING = "zeroxla meeting 3"
CHALLENGE_BYTES = 32
PROOF_BYTES = 32
MAX_LINE_BYTES = 1 << 16
"""Bytes of a greeting's line at most; a real one has some 400."""


class GreetingError(ValueError):
    """A greeting that cannot be taken.

    Attributes:
      belongs: whether it came from a process of this program, which should be told.
    """

    def __init__(self, text: str, *, belongs: bool = False) -> None:
        super().__init__(text)
        self.belongs = belongs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A process of a run, as it describes itself.

    Attributes:
      process_id: its number, from 0.
      num_processes: the number of processes that it was told.
      node: its host's name. Processes with the same name share a node.
      runs: its `fingerprint`: versions and hashes of code, which must be the same everywhere.
      gpus: the names or numbers of the GPUs that it sees.
      allocated: the number of GPUs that the run has on its host; 0 if no variable says it.
    """

    process_id: int
    num_processes: int
    node: str
    runs: dict[str, str]
    gpus: list[str] = dataclasses.field(default_factory=list)
    allocated: int = 0


def new_challenge() -> bytes:
    """Return the random bytes with which process 0 begins a connection."""
    return secrets.token_bytes(CHALLENGE_BYTES)


def prove(token: str, challenge: bytes) -> bytes:
    """Return what a process with the token answers to a challenge."""
    return hmac.digest(token.encode(), challenge, hashlib.sha256)


def is_proof(token: str, challenge: bytes, answer: bytes) -> bool:
    """Return whether an answer shows the token; takes as long for every wrong answer."""
    return hmac.compare_digest(prove(token, challenge), answer)


def to_line(member: Member) -> bytes:
    """Return the line of a greeting."""
    return json.dumps({"greeting": GREETING, **vars(member)}).encode() + b"\n"


def from_line(line: bytes, num_processes: int) -> Member:
    """Read the line of a greeting to process 0.

    Args:
      line: anything.
      num_processes: the number of processes of the run.

    Raises:
      GreetingError: the line is not the greeting of another process of the run.
    """
    said = read_json(line)
    if not isinstance(said, dict) or said.pop("greeting", None) != GREETING:
        raise GreetingError(f"{line[:40]!r} is no greeting")
    member = to_member(said)
    number = member.process_id
    if member.num_processes != num_processes:
        raise GreetingError(
            f"process {number} was told of {member.num_processes} processes and process 0 of "
            f"{num_processes}; give all the same number",
            belongs=True,
        )
    if not 0 < number < num_processes:
        raise GreetingError(
            f"there is no place for a process {number} beside process 0 of {num_processes}; they "
            f"are 1 to {num_processes - 1}",
            belongs=True,
        )
    return member


def to_member(said: Any) -> Member:
    """Return the member that a JSON object describes.

    Raises:
      GreetingError: it has other keys or types.
    """
    names = [field.name for field in dataclasses.fields(Member)]
    if not isinstance(said, dict) or said.keys() != set(names):
        raise GreetingError(f"a process says {', '.join(names)}, and nothing else")
    runs, gpus = said["runs"], said["gpus"]
    if not (
        # Not bool.
        all(type(said[name]) is int for name in ("process_id", "num_processes", "allocated"))
        and isinstance(said["node"], str)
        and isinstance(runs, dict)
        and isinstance(gpus, list)
        and all(isinstance(text, str) for text in (*runs.values(), *gpus))
    ):
        raise GreetingError("the numbers, the node, the code or the GPUs are of another type")
    return Member(**said)


def read_json(line: bytes) -> Any:
    """Return the value of a line of JSON; None if it is not JSON, or too deeply nested."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
