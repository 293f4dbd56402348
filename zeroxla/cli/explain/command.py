"""The command line of `zeroxla explain`."""

from __future__ import annotations

from collections.abc import Sequence

from zeroxla.cli.errors import UsageError
from zeroxla.cli.explain.options import ExplainOptions
from zeroxla.cli.read_options import read_options


def run(arguments: Sequence[str]) -> int:
    """Run `zeroxla explain`; return the exit status.

    Raises:
      UsageError: an option or the run cannot work.
    """
    options = read_options("explain", arguments, ExplainOptions)
    from zeroxla.cli.explain.run import run_explain  # here, because it takes a second to import

    try:
        return run_explain(options)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from error
