"""Runs one process of a launch, on its own host, on behalf of `zeroxla launch`.

    python child.py < orders

The first line of its input is a JSON object with `argv`, `env`, `cwd` and `progress`. `progress` is
the name of an environment variable, which tells the program the pipe for its steps, as
"descriptor:inode". Each later line is the name of a signal for the program. The input ends when the
launcher has ended or the connection is lost; then the program is ended too, with all processes that
it started. The program's output is passed on. Standard error also has JSON objects, each after the
character MARK, that report on the program:

    {"pid": 1234}      it has started
    {"said": ".."}     it has written these letters to the pipe; see progress.py in zeroxla
    {"stopped": true}  a signal (SIGSTOP) stopped it; false: it goes on
    {"exit": 1}        it has ended with this status; negative: a signal ended it
    {"error": "..."}   it could not be started

This file stands alone: it runs on the other hosts by its path, and imports nothing of zeroxla.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

MARK = "\x1e"


def main() -> int:
    """Run the program; return the status that a shell would return."""
    order = json.loads(sys.stdin.readline())
    progress, writer = os.pipe()
    os.set_blocking(writer, False)
    pipe = f"{writer}:{os.fstat(writer).st_ino}"
    try:
        program = subprocess.Popen(
            order["argv"],
            env={**os.environ, **order["env"], order["progress"]: pipe},
            cwd=order["cwd"],
            stdin=subprocess.DEVNULL,
            pass_fds=(writer,),
            start_new_session=True,
        )
    except OSError as error:
        say({"error": f"cannot start {error.filename or order['argv'][0]}: {error.strerror}"})
        return 127
    os.close(writer)
    say({"pid": program.pid})
    threading.Thread(target=obey, args=(program.pid,), daemon=True).start()
    relayed = threading.Thread(target=relay, args=(progress,), daemon=True)
    relayed.start()
    code = wait(program.pid)
    end(program.pid)  # what it started and left behind
    relayed.join(timeout=1)  # its last letters come before its end
    say({"exit": code})
    return code if code >= 0 else 128 - code


def wait(pid: int) -> int:
    """Wait for the program to end, and report when a signal stops or continues it."""
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED | os.WCONTINUED)
        if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
            say({"stopped": os.WIFSTOPPED(status)})
        else:
            return os.waitstatus_to_exitcode(status)


def obey(pid: int) -> None:
    """Send the program the signals that the launcher asks for. End it when the launcher is gone."""
    for line in sys.stdin:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.Signals[line.strip()])
    end(pid)


def end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def relay(progress: int) -> None:
    """Report the letters of the program, ten times a second at most."""
    while said := os.read(progress, 4096):
        say({"said": said.decode("ascii", "replace")})
        time.sleep(0.1)


def say(value: dict[str, Any]) -> None:
    # One write, so that it is not torn apart by the program's own lines.
    with contextlib.suppress(OSError):
        os.write(2, f"{MARK}{json.dumps(value)}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
