"""`make_task`: the model that the options of `zeroxla train` name, with its data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from zeroxla.cli.data.bad_rows import BadRows
from zeroxla.cli.data.mixture import Source
from zeroxla.cli.data.row_files import are_rows
from zeroxla.cli.data.row_readers import FORMS
from zeroxla.cli.data.sources import load_sources, with_weight
from zeroxla.cli.option_groups import flag
from zeroxla.cli.train.images import ImageTask
from zeroxla.cli.train.model import choose
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.train.preferences import PreferencesTask, check_preferences
from zeroxla.cli.train.rows import RowsTask
from zeroxla.cli.train.task import Task
from zeroxla.cli.train.text import TextTask

_PREFERENCES = ("Preference", "ChatPreference")


def make_task(options: TrainOptions, run: Path | None, warn: Callable[[str], None]) -> Task:
    """Return the model that a run trains, with its data.

    Args:
      options: the run's options.
      run: the run's folder, if there is one already.
      warn: prints a warning.

    Raises:
      ImportError: a package that the options need is not installed.
      ValueError: an option or an input cannot work.
    """
    if options.model.model == "alexnet":
        return ImageTask(options)
    if are_rows(with_weight(name)[0] for name in options.text.data):
        return _of_rows(options, run, warn)
    _check_useless(options, ("rows", "dpo"), "text", f"files of rows ({', '.join(FORMS)})")
    return TextTask(options, run)


def _of_rows(options: TrainOptions, run: Path | None, warn: Callable[[str], None]) -> Task:
    """Return a task on rows; its kind follows from the kinds of the rows."""
    choice = choose(options, run)
    if options.rows.packing and not choice.takes_segments:
        raise ValueError(
            "--packing: this model takes no segments, so tokens of one row would see those of "
            "another; leave it out"
        )
    bad = BadRows(options.rows.max_bad_rows, warn if jax.process_index() == 0 else _complain)
    sources = load_sources(options.text.data, bad=bad, holdout=options.text.holdout)
    if _are_preferences(sources):
        check_preferences(options)
        return PreferencesTask(options, run, choice, sources, bad)
    _check_useless(options, ("dpo",), "rows without preferences", "rows of preferences")
    return RowsTask(options, run, choice, sources, bad)


def _are_preferences(sources: Sequence[Source]) -> bool:
    """Return whether all rows are preferences.

    Raises:
      ValueError: some are and some are not.
    """
    firsts: dict[bool, str] = {}
    for source in sources:
        for kind, place in source.rows.firsts.items():
            firsts.setdefault(kind in _PREFERENCES, place)
    if len(firsts) > 1:
        raise ValueError(
            f"{firsts[True]} is a preference and {firsts[False]} is none, and a run learns from "
            "preferences alone or from other rows alone; train on files without preferences "
            "first, and then, from what that run exported, on the preferences"
        )
    return True in firsts


def _check_useless(options: TrainOptions, groups: Sequence[str], data: str, needed: str) -> None:
    """Check that no option of these groups is given to a run whose data they are not for.

    Raises:
      ValueError: one is.
    """
    given = [
        flag(name)
        for group in (getattr(options, name) for name in groups)
        for name, value in vars(group).items()
        if value != getattr(type(group)(), name)
    ]
    if given:
        raise ValueError(
            f"{', '.join(given)}: without effect on {data}; leave out, or give --data {needed}"
        )


def _complain(text: str) -> None:
    """Name a bad row that another process than the first has met in its own part of a batch."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
