"""Starting the processes of a run in tests."""

import os
import subprocess
import sys
from pathlib import Path

from quick import QUICK

FOLDER = Path(__file__).parent


def environment(**more):
    """This process' environment, without the 8 devices that the suite's own processes simulate, for
    quick compilation."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parents[1]), env.get("PYTHONPATH", "")])
    return {**env, **QUICK, **{name: str(value) for name, value in more.items()}}


def start(argv, **env):
    """Start Python with its output in a pipe."""
    return subprocess.Popen(
        [sys.executable, *map(str, argv)],
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, timeout=300):
    """Wait for a process; return (exit status, output)."""
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out


def zeroxla(*arguments, **env):
    """Run the command line to its end."""
    return finish(start(["-m", "zeroxla.cli", *arguments], **env))
