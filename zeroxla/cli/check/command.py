"""The command line of `zeroxla check`."""

from __future__ import annotations

from collections.abc import Sequence

from zeroxla.cli.check.options import CheckOptions
from zeroxla.cli.config_file import with_config
from zeroxla.cli.errors import UsageError
from zeroxla.cli.inputs import check_check
from zeroxla.cli.read_options import read_options


def run(arguments: Sequence[str]) -> int:
    """Run `zeroxla check`; return the exit status.

    Raises:
      UsageError: an option or an input cannot work.
    """
    options = read_options("check", with_config(arguments, CheckOptions), CheckOptions)
    try:
        check_check(options)
        from zeroxla.cli.check.run import run_check  # here, because it takes long to import

        return run_check(options)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from error
