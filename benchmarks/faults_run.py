"""A training that `zeroxla launch` runs over two hosts, seen from outside.

    python benchmarks/faults_run.py PID0 PID1 HOST PROGRAM

is its stand-in for ssh: it runs a program on the host that waits as process PID0 or PID1.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from network import Host

PROGRAM = Path(__file__).with_name("faults_program.py")
HEARTBEAT = 10
STEPS = 40
TRAIN = (
    *("train", "--nodes", "2", "--devices-per-node", "2", "--layers", "2", "--width", "64"),
    *("--heads", "2", "--batch", "8", "--length", "64", "--eval-batches", "1", "--sample-bytes"),
    *("8", "--persistence-threshold", "0", "--save-every", "5", "--eval-every", "1000"),
    *("--steps", str(STEPS)),
)


class Run:
    """A launched training, seen from outside.

    Attributes:
      folder: its run folder.
      flag: the file that plants a fault in the program, see faults_program.py.
      hosts: where it runs.
    """

    def __init__(
        self, folder: Path, hosts: Sequence[Host], restarts: int, more: Sequence[str] = ()
    ) -> None:
        self.folder, self.hosts, self.flag = folder, hosts, folder.with_suffix(".flag")
        machines = folder.with_suffix(".hosts")
        machines.write_text("".join(f"{host.name} slots=2\n" for host in hosts))
        launch = [sys.executable, "-m", "zeroxla", "launch", "--hostfile", str(machines)]
        launch += [
            "--ssh",
            shlex.join([sys.executable, __file__, *(str(h.pid) for h in hosts)]),
        ]
        launch += ["--heartbeat", str(HEARTBEAT), "--max-restarts", str(restarts), "--"]
        program = [sys.executable, str(PROGRAM), str(self.flag), *TRAIN, "--run", str(folder)]
        self._launcher = subprocess.Popen(
            [*launch, *program, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self, timeout: float = 300) -> int:
        """Wait for the launcher's end; return its status."""
        try:
            status = self._launcher.wait(timeout)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            raise
        self._reader.join()
        return status

    def wait_until(self, happened: Callable[[], bool], timeout: float = 120) -> None:
        """Wait for something; raise if it does not come or the launcher ends first."""
        until = time.monotonic() + timeout
        while not happened():
            if self._launcher.poll() is not None or time.monotonic() > until:
                self._launcher.kill()
                raise RuntimeError("what was waited for did not come:\n" + self.output())
            time.sleep(0.002)

    def plant(self, fault: str) -> float:
        """Plant a fault of faults_program.py, and return when it happens (`time.monotonic()`)."""
        written = self.flag.with_suffix(".written")
        written.write_text(fault)
        written.rename(self.flag)
        self.wait_until(lambda: not self.flag.exists())
        return time.monotonic()

    def losses(self) -> dict[int, float]:
        """Return the recorded losses by step."""
        with contextlib.suppress(FileNotFoundError):
            lines = [
                json.loads(x) for x in (self.folder / "metrics.jsonl").read_text().splitlines()
            ]
            return {line["step"]: line["loss"] for line in lines if "loss" in line}
        return {}

    def has_step(self, number: int) -> Callable[[], bool]:
        """Return what says whether a step is recorded."""
        return lambda: number in self.losses()

    def pid(self, rank: int) -> int:
        """Return the number of a rank's program on this machine."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                told = (folder / "environ").read_bytes().split(b"\0")
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if (
                    f"ZEROXLA_PROCESS_ID={rank}".encode() in told
                    and str(self.folder).encode() in words
                ):
                    return int(folder.name)
        raise RuntimeError(f"rank {rank} does not run")

    def said_at(self, pattern: str, after: float) -> tuple[float, str]:
        """Return when a line of the launcher's that matches came, and the line; inf if none did."""
        for when, line in self._lines:
            if when >= after and re.search(pattern, line):
                return when, line
        return float("inf"), ""

    def output(self) -> str:
        return "".join(line for _, line in self._lines)

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        for line in self._launcher.stdout:
            self._lines.append((time.monotonic(), line))


def main() -> None:
    *pids, name, program = sys.argv[1:]
    spaces = ("--net", "--uts", "--mount", "--pid")
    target = pids[int(name.removeprefix("host"))]
    os.execvp("nsenter", ["nsenter", "--target", target, *spaces, "--", "sh", "-c", program])


if __name__ == "__main__":
    main()
