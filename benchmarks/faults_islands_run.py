"""A run of islands that are processes of their own, seen and disturbed from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from faults_islands_figures import Disturbance
from faults_islands_network import Network
from faults_islands_task import Task

PROGRAM = Path(__file__).with_name("faults_islands_program.py")
COORDINATOR = Path(__file__).with_name("faults_islands_coordinator.py")
_LAST_LINES = 40
_STARTING_S = 300.0
_ENDING_S = 90.0


class RunError(RuntimeError):
    """A run that could not begin or end; the text has the last lines of its processes."""


class Run:
    """Islands and their coordinator, each on a host of its own; who is killed is started again.

    Args:
      network: the hosts; the last one is the coordinator's.
      task: the settings of the run: model, data, folders.

    Attributes:
      events: all that was said and done, with "at" in seconds of `time.monotonic()`, and "slot" and
        "life" where an island's process said it.
    """

    def __init__(self, network: Network, task: Task) -> None:
        self.events: list[dict[str, Any]] = []
        self._network, self._task, self._file = network, task, task.save()
        self._ending, self._lock = False, threading.Lock()
        self._lives = [0] * task.islands
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._last: dict[str, deque[str]] = {}
        self._threads: list[threading.Thread] = []
        self._ordered: dict[int, str] = {}

    def train(
        self,
        seconds: float,
        disturbances: Sequence[Disturbance],
        advance: Callable[[float], None],
        *,
        patient: bool = False,
    ) -> tuple[float, float]:
        """Train for some time, which begins when all islands have taken a step.

        Args:
          seconds: the time.
          disturbances: what happens in it.
          advance: called with the seconds that have gone.
          patient: wait at the end until who was killed has taken a step.

        Returns:
          When it began and when it ended.

        Raises:
          RunError: the islands did not begin, or did not end when they were told to.
        """
        try:
            self._start_coordinator()
            for slot in range(self._task.islands):
                self._start_island(slot)
            self._wait(lambda: self._having("step") == self._task.islands, _STARTING_S, "begin")
            began = time.monotonic()
            for each in sorted(disturbances, key=lambda each: each.at):
                self._pass_until(began + each.at, began, advance)
                self._note("disturbance", kind=each.kind, slot=each.slot, seconds=each.seconds)
                self._disturb(each)
            self._pass_until(began + seconds, began, advance)
            ended = time.monotonic()
            if patient:
                self._wait(self._all_step, _STARTING_S, "come back")
            self._ending = True
            for name in self._names():
                self._order(name, "stop")
            islands = [name for name in self._names() if name != "coordinator"]
            self._wait(lambda: all(self._has_ended(n) for n in islands), _ENDING_S, "end")
            return began, ended
        finally:
            self._end()

    def _disturb(self, each: Disturbance) -> None:
        """Bring one disturbance about; what mends it happens in a thread."""
        match each.kind:
            case "kill" if each.phase == "joining":  # Of the process that comes after this one.
                with self._lock:
                    self._ordered[each.slot] = "kill joining"
                self._order(f"island{each.slot}", "kill computing")
            case "kill":
                self._order(f"island{each.slot}", f"kill {each.phase}")
            case "cut":
                self._network.set_cable(each.slot, up=False)
                self._later(each.seconds, lambda: self._mend(each.slot))
            case "coordinator":
                self._processes["coordinator"].kill()
                self._later(each.seconds, self._start_coordinator)

    def _mend(self, slot: int) -> None:
        self._network.set_cable(slot, up=True)
        self._note("mended", slot=slot)

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, do)
        timer.daemon = True
        timer.start()
        self._threads.append(timer)

    def _start_coordinator(self) -> None:
        self._note("coordinator", slot=-1)
        self._start("coordinator", self._task.islands, [str(COORDINATOR), str(self._file)], {})

    def _start_island(self, slot: int) -> None:
        life = self._lives[slot]
        about = {"slot": slot, "life": life}
        self._note("spawned", **about)
        argv = [str(PROGRAM), str(self._file), str(slot), str(life)]
        self._start(f"island{slot}", slot, argv, about)
        with self._lock:
            order = self._ordered.pop(slot, None)
        if order is not None:
            self._order(f"island{slot}", order)
        if self._ending:
            self._order(f"island{slot}", "stop")

    def _start(self, name: str, host: int, argv: list[str], about: dict[str, int]) -> None:
        process = self._network.popen(
            host,
            [sys.executable, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with self._lock:
            self._processes[name] = process
            self._last.setdefault(name, deque(maxlen=_LAST_LINES))
        thread = threading.Thread(target=self._read, args=(name, process, about), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _read(self, name: str, process: subprocess.Popen[str], about: dict[str, int]) -> None:
        """Keep what a process says until its end; start an island again that was killed."""
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("@"):
                self.events.append({**json.loads(line[1:]), **about})
            else:
                self._last[name].append(line)
                self._note("printed", line=line.rstrip(), **about)
        status = process.wait()
        self._note("ended", status=status, name=name, **about)
        if about and not self._ending:
            self._lives[about["slot"]] += 1
            self._start_island(about["slot"])

    def _order(self, name: str, order: str) -> None:
        process = self._processes[name]
        assert process.stdin is not None
        try:
            process.stdin.write(order + "\n")
            process.stdin.flush()
        except OSError:
            pass  # It has ended.

    def _note(self, what: str, **facts: Any) -> None:
        self.events.append({"what": what, "at": time.monotonic(), **facts})

    def _names(self) -> list[str]:
        with self._lock:
            return list(self._processes)

    def _having(self, what: str) -> int:
        """Return how many islands have said something."""
        return len({event["slot"] for event in list(self.events) if event["what"] == what})

    def _all_step(self) -> bool:
        """Return whether the newest process of each island has taken a step."""
        steps = {(e["slot"], e["life"]) for e in list(self.events) if e["what"] == "step"}
        return set(enumerate(self._lives)) <= steps

    def _has_ended(self, name: str) -> bool:
        return self._processes[name].poll() is not None

    def _pass_until(self, at: float, began: float, advance: Callable[[float], None]) -> None:
        while (now := time.monotonic()) < at:
            advance(now - began)
            time.sleep(min(0.5, at - now))

    def _wait(self, happened: Callable[[], bool], seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > until:
                lines = "".join(f"{n}:\n{''.join(x)}" for n, x in self._last.items() if x)
                raise RunError(f"the islands did not {what} within {seconds:.0f} s; {lines}")
            time.sleep(0.05)

    def _end(self) -> None:
        self._ending = True
        for name in self._names():
            process = self._processes[name]
            if process.poll() is None:
                process.kill()
            process.wait()
        for thread in self._threads:
            if isinstance(thread, threading.Timer):
                thread.cancel()
            else:
                thread.join(10)
