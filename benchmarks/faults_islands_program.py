"""An island of faults_islands.py, as a process that can be killed in a phase of its life.

    python benchmarks/faults_islands_program.py TASK SLOT LIFE

It trains until it is told to stop, and prints what it does: see `say`. If it is told so before it
has joined it ends. Each time that its outer
parameters of a fragment change it appends their hash to FOLDER/hashes-SLOT-LIFE.jsonl. Orders come
in lines on its standard input: "stop", or "kill" and a phase, in which it kills itself with SIGKILL
at a random moment. It ends when its standard input does.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from faults_islands_task import (
    TOKEN,
    Task,
    batch_of,
    keep_compiled,
    make_island_step,
    say,
)

_POLL_S = 0.001
_LONGEST = {"computing": 0.2, "exchanging": 0.03, "joining": 0.5}
"""By phase, a bound of the random seconds from its begin to the kill."""
_PATIENCE_S = 15.0
"""After so many seconds without the phase any moment will do."""


class Life:
    """Knows what this process is doing, and kills it in a phase that was ordered.

    Attributes:
      phase: "starting", "joining", "computing" or "resting".
      island: the island, as soon as it has joined.
      stopped: whether it was told to stop.
    """

    def __init__(self) -> None:
        self.phase, self.island, self.stopped = "starting", None, False
        threading.Thread(target=self._obey, daemon=True).start()

    def _obey(self) -> None:
        for line in sys.stdin:
            order, _, phase = line.strip().partition(" ")
            if order == "stop" and self.phase in ("starting", "joining"):
                say("settled")
                os._exit(0)
            elif order == "stop":
                self.stopped = True
            else:
                threading.Thread(target=self._end_in, args=(phase,), daemon=True).start()
        os._exit(0)  # The supervisor is gone.

    def _end_in(self, phase: str) -> None:
        """Wait for a phase, and end in it."""
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until or phase == "joining":
            if (seen := self._mark(phase)) is not None:
                time.sleep(random.uniform(0, _LONGEST[phase]))
                if self._mark(phase) == seen:
                    break
            elif phase == "joining" and self.phase in ("computing", "resting"):
                break  # It was too quick.
            time.sleep(_POLL_S)
        # Resting stands for computing on a slower device.
        there = {"starting": "joining", "resting": "computing"}.get(self.phase, self.phase)
        say("killed", phase=there if self._mark(phase) is None else phase, wanted=phase)
        os.kill(os.getpid(), signal.SIGKILL)

    def _mark(self, phase: str) -> str | None:
        """Return what tells one time of a phase from the next; None outside of it."""
        if phase != "exchanging":
            return phase if self.phase == phase else None
        return None if self.island is None else self.island.exchange


class Log:
    """Appends the hash of each fragment's outer parameters when they have changed.

    Args:
      task: the run.
      slot: the number of the island.
      life: how many processes this slot had before.
    """

    def __init__(self, task: Task, slot: int, life: int) -> None:
        self._folder, self._about = Path(task.folder), {"slot": slot, "life": life}
        self._file = (self._folder / f"hashes-{slot}-{life}.jsonl").open("a")
        self._seen: list[Any] = []

    def look(self, state: Any) -> None:
        """Compare a state with the one before; keep a snapshot when a turn of all fragments is
        complete."""
        import numpy as np

        before, self._seen = self._seen, [fragment.copy for fragment in state.outer]
        changed = [
            p for p, copy in enumerate(self._seen) if p >= len(before) or copy is not before[p]
        ]
        if not changed:
            return
        copies = [np.asarray(copy) for copy in self._seen]
        for p in changed:
            momentum = hashlib.sha256()
            for x in _arrays(state.outer[p].opt_state):
                momentum.update(np.asarray(x).tobytes())
            line = {
                **self._about,
                "at": time.monotonic(),
                "round": state.round,
                "fragment": p,
                "version": state.versions[p],
                "copy": hashlib.sha256(copies[p].tobytes()).hexdigest()[:32],
                "optimizer": momentum.hexdigest()[:32],
            }
            self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        # After a turn of all fragments their versions are consecutive numbers of rounds.
        newest, num = state.versions[-1], len(state.versions)
        turn = tuple(range(newest - num + 1, newest + 1))
        path = self._folder / f"outer-{newest:06}.npy"
        if (not newest or state.versions == turn) and not path.exists():
            draft = path.with_suffix(f".{os.getpid()}")
            with open(draft, "wb") as file:
                np.save(file, np.concatenate([copy[0] for copy in copies]))
            os.replace(draft, path)
            say("snapshot", version=newest)


def _arrays(tree: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(tree)


def main() -> None:
    task, slot, number = Task.load(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    life = Life()
    import jax
    import numpy as np

    from zeroxla import Island

    keep_compiled(task.compiled)
    corpus = np.load(task.corpus, mmap_mode="r")
    step, log = make_island_step(), Log(task, slot, number)
    say("imported")
    life.phase = "joining"
    with Island(step, task.coordinator, TOKEN, slot=slot) as island:
        life.island = island
        at = island.position.batches
        say("joined", batches=at)
        state = island.init(jax.random.key(task.seed), batch_of(corpus, task.seed, slot, at))
        log.look(state)
        say("caught_up", versions=state.versions)
        due = time.monotonic()
        while not life.stopped:
            batch = batch_of(corpus, task.seed, slot, at)
            began, life.phase = time.monotonic(), "computing"
            state, metrics = island(state, batch)
            loss = float(metrics["loss"])
            seconds, life.phase = time.monotonic() - began, "resting"
            at += 1
            log.look(state)
            say("step", s=round(seconds, 4), loss=round(loss, 4), round=state.round)
            due = max(due + task.step_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
        say("stopping")
        state = island.settle(state)
        log.look(state)
        say("settled", versions=state.versions)


if __name__ == "__main__":
    main()
