"""Functions that run `zeroxla train` and read the files that a run left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from tools.quick import QUICK
from zeroxla.cli.main import main
from zeroxla.cli.run_folder import RunFolder


def train(*arguments: Any) -> int:
    """Run `zeroxla train` in this process, on its devices; return the exit status."""
    jax.devices()  # starts JAX: or the command would simulate only what it asks for
    return main(["train", *map(str, arguments)])


def train_as_a_user(*arguments: Any) -> str:
    """Run `zeroxla train` in a process of its own; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "zeroxla", "train", *map(str, arguments)],
        env={**os.environ, **QUICK},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def values(run: Path, name: str) -> dict[int, Any]:
    """Return {step: value} of one metric of a run."""
    return {line["step"]: line[name] for line in RunFolder(run).metrics() if name in line}


def copy_at(run: Path, folder: Path, step: int) -> Path:
    """Copy a run as a crash would have left it, with checkpoints up to `step` and later metrics."""
    copy = folder / "run"
    shutil.copytree(run, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    return copy


def check_refused(arguments: list[Any], message: str, capsys: Any) -> None:
    """Check that a run ends before it begins: with one clear error and status 2."""
    assert train(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not Path("runs").exists()


def check_no_option(arguments: list[Any], message: str, capsys: Any) -> None:
    """Check that the command line is refused: by tyro, which ends the program, or by a check."""
    try:
        status: Any = train(*arguments)
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    assert message in capsys.readouterr().err
