"""The command line of `zeroxla generate`."""

from __future__ import annotations

from collections.abc import Sequence

from zeroxla.cli.config_file import with_config
from zeroxla.cli.errors import UsageError
from zeroxla.cli.generate.options import GenerateOptions
from zeroxla.cli.inputs import check_generate
from zeroxla.cli.launch.command import launch_again
from zeroxla.cli.read_options import read_options


def run(arguments: Sequence[str]) -> int:
    """Run `zeroxla generate`; return the exit status.

    Raises:
      UsageError: an option or an input cannot work.
      RunFolderError: the answers could not be written.
    """
    arguments = with_config(arguments, GenerateOptions)
    options = read_options("generate", arguments, GenerateOptions)
    layout = options.layout
    try:
        check_generate(options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if options.prompts.chat and (layout.nodes or 1) > 1:
        raise UsageError(
            f"--chat with --nodes {layout.nodes}: one process reads what you write; leave --nodes "
            "out, or use --prompt or --file"
        )
    status = launch_again(
        "generate", arguments, nodes=layout.nodes, devices_per_node=layout.devices_per_node
    )
    if status is not None:
        return status
    from zeroxla.cli.generate.job import generate  # here, because it takes a second to import

    try:
        return generate(options)
    except ValueError as error:
        raise UsageError(str(error)) from error
