"""The command line of `zeroxla plan`."""

from __future__ import annotations

from collections.abc import Sequence

from zeroxla.cli.config_file import with_config
from zeroxla.cli.errors import UsageError
from zeroxla.cli.plan.options import PlanOptions
from zeroxla.cli.read_options import read_options


def run(arguments: Sequence[str]) -> int:
    """Run `zeroxla plan`; return the exit status.

    Raises:
      UsageError: an option or an input cannot work.
    """
    options = read_options("plan", with_config(arguments, PlanOptions), PlanOptions)
    from zeroxla.cli.plan.run import run_plan  # here, because it takes a second to import

    try:
        return run_plan(options)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from error
