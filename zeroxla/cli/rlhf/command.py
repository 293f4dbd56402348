"""The command line of `zeroxla rlhf`."""

from __future__ import annotations

from collections.abc import Sequence

from zeroxla.cli.config_file import with_config
from zeroxla.cli.continued_run import continued
from zeroxla.cli.errors import UsageError
from zeroxla.cli.inputs import check_rlhf
from zeroxla.cli.launch.command import launch_again
from zeroxla.cli.read_options import read_options
from zeroxla.cli.rlhf.checks import FREE, check_alone, check_given
from zeroxla.cli.rlhf.options import RlhfOptions


def run(arguments: Sequence[str]) -> int:
    """Run `zeroxla rlhf`; return the exit status.

    Raises:
      UsageError: an option or an input cannot work.
      RunFolderError: a file of the run could not be written.
    """
    arguments = with_config(arguments, RlhfOptions)
    check_alone(arguments)
    options = read_options("rlhf", arguments, RlhfOptions)
    options = continued("rlhf", arguments, options, FREE)
    try:
        check_given(arguments, options)
        check_rlhf(options)
        options.as_storage().with_adapters(None)  # values that it refuses are refused here, too
    except ValueError as error:
        raise UsageError(str(error)) from error
    status = launch_again(
        "rlhf",
        arguments,
        nodes=options.mesh.nodes,
        devices_per_node=options.mesh.devices_per_node,
    )
    if status is not None:
        return status
    from zeroxla.cli.rlhf.job import rlhf  # here, because it takes a second to import

    return rlhf(options)
