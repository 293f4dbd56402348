"""`zeroxla generate`, run as a user runs it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeroxla.cli.main import main

LIKELIEST = ("--temperature", 0, "--max-new-tokens", 12)


def generate(*arguments: Any) -> int:
    """Run the command on the devices of the tests; return the exit status."""
    return main(["generate", *map(str, arguments), "--devices-per-node=8"])


def copied(folder_of: Callable[[str], Path], name: str, tmp_path: Path, **keys: Any) -> Path:
    """Return a copy of a family's folder, with other keys in its config."""
    folder = shutil.copytree(folder_of(name), tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return folder
