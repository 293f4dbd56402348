"""How fast a run starts while strangers and broken programs greet its meeting.

    python benchmarks/meeting.py [--greetings 2000] [--seed 0]

Process 0 waits for two members. Meanwhile guests come, eight at a time, and each does one of the
things of KINDS: it is idle, sends noise, copies a member without the run's token, or has the token
and sends what no process would. The last member comes among the last eight. Guests that still hold
their connections keep them to the end. A round has 100 guests; seconds are from the last
member's coming to the moment when process 0 has the list. Every one must be below 1. Writes
results/meeting.json and .md; exits with 1 if a target is missed. Takes seconds.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common import Check, report, table

from zeroxla.cli.launch.ranks import free_port
from zeroxla.mesh.processes.greeting import (
    CHALLENGE_BYTES,
    GREETING,
    Member,
    prove,
    to_line,
)
from zeroxla.mesh.processes.meeting import meet

SIZE = 3
ROUND = 100
AT_ONCE = 8
LIMIT = 1.0
TOKEN = "the token of this run"

Guest = Callable[[random.Random, bytes], bytes]


def member(number: int) -> Member:
    return Member(process_id=number, num_processes=SIZE, node="here", runs={"jax": "1"})


def greeting(**changes: Any) -> bytes:
    """Return a member's line with other values; None leaves a key out."""
    said = {"greeting": GREETING, **vars(member(1)), **changes}
    return json.dumps({k: v for k, v in said.items() if v is not None}).encode() + b"\n"


def anything(rng: random.Random, depth: int = 3) -> Any:
    """Return a random JSON value."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 6:
        return [anything(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {noise(rng, 4).hex(): anything(rng, depth - 1) for _ in range(rng.randrange(4))}
    values = (None, True, rng.randrange(-3, 9), 10 ** rng.randrange(400), rng.random(), "\ud800")
    return values[kind]


def noise(rng: random.Random, size: int) -> bytes:
    return rng.randbytes(rng.randrange(size))


def with_token(line: Callable[[random.Random], bytes]) -> Guest:
    """Return a guest that has the token, and then says a line."""
    return lambda rng, challenge: prove(TOKEN, challenge) + line(rng)


def wrong_keys(rng: random.Random) -> bytes:
    key = rng.choice(["process_id", "num_processes", "node", "runs", "greeting"])
    return greeting(**({key: None} if rng.random() < 0.5 else {key + "s": 1}))


def wrong_types(rng: random.Random) -> bytes:
    key, wrong = rng.choice(
        [
            *(("process_id", x) for x in ("1", 1.0, True, [1], {})),
            *(("num_processes", x) for x in ("3", 3.0, [3])),
            *(("node", x) for x in (1, ["n"], {})),
            *(("runs", x) for x in ("jax", [1], {"jax": 1}, {"jax": None}, 0)),
        ]
    )
    return greeting(**{key: wrong})


KINDS: dict[str, Guest] = {
    "says nothing": lambda rng, challenge: b"",
    "says half a proof": lambda rng, challenge: prove(TOKEN, challenge)[: rng.randrange(1, 32)],
    "random bytes": lambda rng, challenge: noise(rng, 5000),
    "asks for a page": lambda rng, challenge: b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(64),
    "a member's line, wrong token": lambda rng, challenge: (
        prove(noise(rng, 9).hex() + "x", challenge) + to_line(member(rng.randrange(1, SIZE)))
    ),
    "a member's line, no proof": lambda rng, challenge: to_line(member(rng.randrange(1, SIZE))),
    "another connection's proof": lambda rng, challenge: (
        prove(TOKEN, rng.randbytes(CHALLENGE_BYTES)) + to_line(member(rng.randrange(1, SIZE)))
    ),
    "nested lists": with_token(lambda rng: b"[" * rng.randrange(1000, 60000) + b"\n"),
    "nested lists, 900 kB": with_token(lambda rng: b"[" * 900_000 + b"\n"),
    "no end of line": with_token(lambda rng: b"x" * rng.randrange(3_000_000)),
    "half a line": with_token(lambda rng: to_line(member(2))[: rng.randrange(1, 80)]),
    "no JSON": with_token(lambda rng: noise(rng, 500) + b"\n"),
    "other JSON": with_token(lambda rng: json.dumps(anything(rng)).encode() + b"\n"),
    "wrong keys": with_token(wrong_keys),
    "wrong types": with_token(wrong_types),
    "a rank out of range": with_token(
        lambda rng: greeting(process_id=rng.choice([0, -1, SIZE, 10**9, 10**400]))
    ),
    "another number of processes": with_token(
        lambda rng: greeting(num_processes=rng.choice([0, -1, 2, SIZE + 1, 10**9]))
    ),
    "another version": with_token(lambda rng: greeting(greeting="zeroxla meeting 1")),
}


def visit(port: int, kind: str, rng: random.Random, held: list[socket.socket]) -> None:
    """Come to the meeting as a guest of one kind. Leave in order, abruptly, or not at all."""
    with contextlib.suppress(OSError):  # dropped, as it should be
        connection = socket.create_connection(("127.0.0.1", port), timeout=5)
        held.append(connection)
        challenge = connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        connection.sendall(KINDS[kind](rng, challenge))
        leaves = rng.random()
        if leaves < 0.3:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if leaves < 0.6:
            connection.close()


def hold(num_guests: int, rng: random.Random) -> tuple[float, int, collections.Counter[str]]:
    """Hold a meeting with hostile guests.

    Returns:
      The seconds from the last member's coming until process 0 has the list; the number of guests
      that were let in; all guests by kind.

    Raises:
      AssertionError: a process did not get the list of the members.
    """
    port = free_port()
    held: list[socket.socket] = []
    lists: dict[int, Any] = {}
    ended = 0.0

    def attend(number: int) -> None:
        nonlocal ended
        try:
            lists[number] = meet(member(number), f"127.0.0.1:{port}", timeout=60, token=TOKEN)
        except Exception as error:
            lists[number] = error
        if number == 0:
            ended = time.monotonic()

    threads = [threading.Thread(target=attend, args=(i,)) for i in range(SIZE)]
    for thread in threads[:-1]:
        thread.start()
    while not is_open(port):
        time.sleep(0.01)
    kinds = [rng.choice(list(KINDS)) for _ in range(num_guests)]
    gone = threading.Semaphore(0)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for kind in kinds:
            own = random.Random(rng.random())
            pool.submit(visit, port, kind, own, held).add_done_callback(lambda _: gone.release())
        for _ in range(num_guests - AT_ONCE):
            gone.acquire()
        began = time.monotonic()
        threads[-1].start()
        for thread in threads:
            thread.join()
    for connection in held:
        connection.close()
    members = [member(i) for i in range(SIZE)]
    assert lists == dict.fromkeys(range(SIZE), members), lists
    return ended - began, len(held), collections.Counter(kinds)


def is_open(port: int) -> bool:
    """Return whether somebody listens."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Hostile greetings to the meeting of a run.")
    parser.add_argument("--greetings", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable()  # a line for each
    rng = random.Random(options.seed)
    seconds, heard, counted = [], 0, collections.Counter[str]()
    began = time.monotonic()
    for _ in range(-(-options.greetings // ROUND)):
        took, let_in, kinds = hold(ROUND, rng)
        heard += let_in
        seconds.append(took)
        counted += kinds
    in_all = time.monotonic() - began
    late = sum(took >= LIMIT for took in seconds)
    body = (
        f"{counted.total()} random and hostile greetings (seed {options.seed}) in {len(seconds)} "
        f"meetings of {SIZE} processes, {ROUND} in each, {AT_ONCE} at a time; the last member "
        f"comes among the last {AT_ONCE}. {heard} guests were connected. All processes got the "
        "list of the members each time, and nothing else. "
        f"From the last member's coming, process 0 had the list after {max(seconds):.3f} s at "
        f"most, {sorted(seconds)[len(seconds) // 2]:.3f} s in the median; {in_all:.0f} s in all."
        f"\n\n{table(['a guest', 'times'], [[k, str(counted[k])] for k in KINDS])}"
    )
    checks = [
        Check(name="seconds from the last member to the start, at most", value=max(seconds),
              limit=LIMIT, unit=" s"),
        Check(name="meetings that started later", value=late, limit=0),
    ]  # fmt: skip
    figures = {"seconds": seconds, "kinds": counted}
    return report("meeting", "Hostile greetings to a meeting", body, figures, checks)


if __name__ == "__main__":
    sys.exit(main())
