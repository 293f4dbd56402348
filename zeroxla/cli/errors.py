"""Errors that end a command with a sentence instead of a traceback."""

from __future__ import annotations


class UsageError(ValueError):
    """An option or an input cannot work; the text says why and what to do."""


class RunFolderError(RuntimeError):
    """A file of the run folder could not be written."""
