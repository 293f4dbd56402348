"""The command line of `zeroxla explain`."""

from __future__ import annotations

from collections.abc import Sequence

from zeroxla.cli.errors import UsageError
from zeroxla.cli.explain.options import ExplainOptions
from zeroxla.cli.inputs import check_machines, check_run
from zeroxla.cli.read_options import read_options


def run(arguments: Sequence[str]) -> int:
    """Run `zeroxla explain`; return the exit status.

    Raises:
      UsageError: an option or the run cannot work.
    """
    options = read_options("explain", arguments, ExplainOptions)
    try:
        check_run(options.run.expanduser(), "explain", "zeroxla train")
        check_machines(options.machines)
        from zeroxla.cli.explain.run import run_explain  # here, because it takes long to import

        return run_explain(options)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from error
