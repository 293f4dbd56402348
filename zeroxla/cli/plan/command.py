"""The command line of `zeroxla plan`."""

from __future__ import annotations

from collections.abc import Sequence

from zeroxla.cli.config_file import with_config
from zeroxla.cli.errors import UsageError
from zeroxla.cli.inputs import check_plan
from zeroxla.cli.plan.options import PlanOptions
from zeroxla.cli.read_options import read_options


def run(arguments: Sequence[str]) -> int:
    """Run `zeroxla plan`; return the exit status.

    Raises:
      UsageError: an option or an input cannot work.
    """
    options = read_options("plan", with_config(arguments, PlanOptions), PlanOptions)
    try:
        check_plan(options)
        from zeroxla.cli.plan.run import run_plan  # here, because it takes long to import

        return run_plan(options)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from error
