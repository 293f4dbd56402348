"""Starting the processes of a run in tests, and what these share."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tools.quick import QUICK

FOLDER = Path(__file__).parent


def environment(**more):
    """This process' environment, without the 8 devices that the suite's own processes simulate, for
    quick compilation; what is in the folder of tests can be imported."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env["PYTHONPATH"] = os.pathsep.join(
        [str(FOLDER.parents[1]), str(FOLDER.parent), env.get("PYTHONPATH", "")]
    )
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
    return finish(start(["-m", "zeroxla", *arguments], **env))


def launch(script, *arguments, **options):
    """Run a script of this folder in two processes.

    Args:
      script: its name.
      arguments: of the script.
      options: of `zeroxla launch`, such as `devices_per_node=4`.

    Returns:
      The exit status; of each process what it printed as "name: text", by name; all output.
    """
    told = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    program = [sys.executable, FOLDER / script, *arguments]
    status, out = zeroxla("launch", "--nodes=2", *told, "--", *program)
    said = [dict(re.findall(rf"^\[{i}\] (.+?): (.*)$", out, re.MULTILINE)) for i in (0, 1)]
    return status, said, out


def working_on(run, variable):
    """Return the number of the program that works on a run folder, with a variable such as
    "ZEROXLA_PROCESS_ID=1" in its environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            told = (folder / "environ").read_bytes().split(b"\0")
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is not ours
            continue
        if variable.encode() in told and str(run).encode() in arguments:
            return int(folder.name)
    raise AssertionError(f"no process of {run} has {variable}")
