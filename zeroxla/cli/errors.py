"""Errors that end a command with a sentence, and the exit status of one that is interrupted."""

from __future__ import annotations

import os

INTERRUPTED = os.EX_TEMPFAIL
"""The exit status (75) of a run that was interrupted and has saved. It is not 0, so that a cluster
does not take the run for done, and not that of a failure, so that a script can start it again."""


class UsageError(ValueError):
    """An option or an input cannot work; the text says why and what to do."""


class DivergedError(RuntimeError):
    """A run learns no more: its loss is not finite. The checkpoints before that are kept."""


class RunFolderError(RuntimeError):
    """A file of the run folder could not be written."""


class LostRunError(RunFolderError):
    """Another run has taken over the run folder."""
