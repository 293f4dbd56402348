"""The command `zeroxla`: its subcommands, and how errors reach the user."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from rich.console import Console

from zeroxla.export_run import ExportOptions, export
from zeroxla.hosts.environment import PROCESS_ID, RESTART, STARTED, find_cluster
from zeroxla.launch.options import LaunchOptions
from zeroxla.launch.run import launch
from zeroxla.run_folder import RunFolderError, has_checkpoint, read_config
from zeroxla.train import UsageError, train
from zeroxla.train_checks import check_given, check_resumable
from zeroxla.train_options import ALEXNET, TrainOptions

_T = TypeVar("_T")

DESCRIPTION = "Train Flax models that do not fit one device (ZeRO-3 in JAX)."
TRAIN = "Train a language model on text, or AlexNet on images, the state split over all devices."
LAUNCH = "Start a program as one process for each node: zeroxla launch --nodes 2 -- python train.py"
EXPORT = "Write the weights of a run in Hugging Face's format."
RUNS = Path("runs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      arguments: What follows the program's name; `sys.argv[1:]` when None.

    Returns:
      The exit status: 0 when the work is done, or was interrupted and saved; 1 when something of
      the run could not be written; 2 for an option or an input that cannot work; 130 when
      interrupted with nothing to save.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["launch"]:
            return _launch(arguments)
        if arguments[:1] == ["export"]:
            return _export(arguments)
        return _train(arguments)
    except (UsageError, RunFolderError) as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print("[bold red]error:[/] ", end="")
        console.print(str(error), markup=False)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("interrupted; nothing was saved since the last checkpoint", file=sys.stderr)
        return 130


def _launch(arguments: list[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = _read(arguments[:at], LaunchOptions)
    try:
        return launch(options, arguments[at + 1 :])
    except ValueError as error:
        raise UsageError(str(error)) from error


def _export(arguments: list[str]) -> int:
    try:
        return export(_read(arguments, ExportOptions))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _train(arguments: list[str]) -> int:
    options = _read(arguments, TrainOptions)
    if options.model.model == "alexnet":
        options = _read(arguments, TrainOptions, ALEXNET)
    restarted = os.environ.get(RESTART, "0") != "0"
    run = options.output.run or (RUNS / f"train-{os.environ[STARTED]}" if restarted else None)
    if options.output.resume or (restarted and run is not None and has_checkpoint(run)):
        options = _resumed(arguments, run or newest_run(RUNS))
    try:
        check_given(arguments, options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    nodes = options.mesh.nodes or 1
    if nodes == 1 or os.environ.get(PROCESS_ID) or find_cluster() is not None:
        return train(options)
    # Several nodes, and nothing has started their processes yet: those of every stage.
    nodes *= options.pipeline.pipe
    told = LaunchOptions(nodes=nodes, devices_per_node=options.mesh.devices_per_node)
    return launch(told, [sys.executable, "-m", "zeroxla.cli", *arguments])


def newest_run(runs: Path) -> Path:
    """Return the run folder with a checkpoint that was last changed.

    Raises:
      UsageError: There is none.
    """
    found = [path for path in runs.glob("*") if has_checkpoint(path)]
    if not found:
        raise UsageError(
            f"--resume found no run with a checkpoint under {runs}/; name its folder with --run"
        )
    return max(found, key=lambda path: (path / "checkpoints").stat().st_mtime)


def _resumed(arguments: list[str], run: Path) -> TrainOptions:
    # The run's own options are the defaults: what the command line leaves out stays as it was, and
    # what it names must be free to change.
    try:
        stored = TrainOptions.from_dict(read_config(run)["options"])
        given = _read(arguments, TrainOptions, stored)
        check_resumable(stored, given)
    except ValueError as error:
        raise UsageError(str(error)) from error
    output = dataclasses.replace(given.output, run=run, resume=True)
    return dataclasses.replace(given, output=output)


def _read(arguments: list[str], kind: type[_T], default: _T | None = None) -> _T:
    """Return the options of a command line.

    Args:
      kind: of the command that it begins with.
      default: what the command line leaves out; None: as the kind has it.
    """

    def command(name: str, mine: type, description: str) -> Any:
        given: dict[str, Any] = {"default": default} if mine is kind and default is not None else {}
        return Annotated[mine, tyro.conf.subcommand(name, description=description, **given)]

    # The options' groups order the help; as prefixes of every flag they would be noise.
    commands = (
        command("train", TrainOptions, TRAIN)
        | command("launch", LaunchOptions, LAUNCH)
        | command("export", ExportOptions, EXPORT)
    )
    return tyro.cli(
        commands,
        args=arguments,
        prog="zeroxla",
        description=DESCRIPTION,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


if __name__ == "__main__":
    sys.exit(main())
