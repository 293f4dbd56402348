"""The run folders of islands: one for each slot, in the folder that --run names."""

from __future__ import annotations

import re
from pathlib import Path

from zeroxla.cli.run_folder import CHECKPOINTS, CONFIG, has_checkpoint

_NAME = re.compile(r"island-(\d+)")


def folder_of(run: Path, slot: int | None) -> Path:
    """Return the folder of an island; `run` itself if there are no islands."""
    return run if slot is None else run / f"island-{slot}"


def island_folders(run: Path) -> list[Path]:
    """Return the folders of islands that a run has, in the order of their slots."""
    found = {
        int(name[1]): path
        for path in run.glob("island-*")
        if (name := _NAME.fullmatch(path.name)) and (path / CONFIG).is_file()
    }
    return [found[slot] for slot in sorted(found)]


def folder_of_options(run: Path, slot: int | None) -> Path:
    """Return the folder whose options a run has: an island's own, or another island's."""
    own = folder_of(run, slot)
    if (own / CONFIG).is_file():
        return own
    return next(iter(island_folders(run)), own)


def saved_at(run: Path) -> float | None:
    """Return when a checkpoint of a run, or of one of its islands, was written last; None if there
    is none."""
    there = [path for path in (run, *island_folders(run)) if has_checkpoint(path)]
    return max(((path / CHECKPOINTS).stat().st_mtime for path in there), default=None)
