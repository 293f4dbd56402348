"""Errors that end a command with a sentence instead of a traceback."""

from __future__ import annotations


class UsageError(ValueError):
    """An option or an input cannot work; the text says why and what to do."""


class DivergedError(RuntimeError):
    """A run learns no more: its loss is not finite. The checkpoints before that are kept."""


class RunFolderError(RuntimeError):
    """A file of the run folder could not be written."""


class LostRunError(RunFolderError):
    """Another run has taken over the run folder."""
