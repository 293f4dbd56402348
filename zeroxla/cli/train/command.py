"""The command line of `zeroxla train`."""

from __future__ import annotations

from collections.abc import Sequence

from zeroxla.cli.config_file import with_config
from zeroxla.cli.continued_run import continued
from zeroxla.cli.errors import UsageError
from zeroxla.cli.inputs import check_train
from zeroxla.cli.islands.here import check_islands, slot_here
from zeroxla.cli.launch.command import launch_again
from zeroxla.cli.read_options import read_options
from zeroxla.cli.train.checks import FREE, check_given
from zeroxla.cli.train.options import ALEXNET, TrainOptions


def run(arguments: Sequence[str]) -> int:
    """Run `zeroxla train`; return the exit status.

    Raises:
      UsageError: an option or an input cannot work.
      RunFolderError: a file of the run could not be written.
    """
    arguments = with_config(arguments, TrainOptions)
    options = read_options("train", arguments, TrainOptions)
    if options.model.model == "alexnet":
        options = read_options("train", arguments, TrainOptions, ALEXNET)
    slot = slot_here()
    options = continued("train", arguments, options, FREE, slot)
    try:
        check_given(arguments, options)
        check_train(options, slot)
    except ValueError as error:
        raise UsageError(str(error)) from error
    outer = options.outer
    check_islands(outer.outer, outer.islands)
    status = launch_again(
        "train",
        arguments,
        nodes=options.mesh.nodes,
        devices_per_node=options.mesh.devices_per_node,
        stages=options.pipeline.pipe,
        islands=outer.islands if slot is None else None,
    )
    if status is not None:
        return status
    if slot is None:  # A process that another launcher has started.
        check_islands(outer.outer, None)
    # Here, because it takes a second to import and neither --help nor a launch needs it.
    from zeroxla.cli.train.job import train

    return train(options, slot)
