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

from zeroxla.cli.export import ExportOptions, export
from zeroxla.cli.launch.options import LaunchOptions
from zeroxla.cli.launch.run import launch
from zeroxla.cli.plan.options import PlanOptions
from zeroxla.cli.plan.run import run_plan
from zeroxla.cli.rlhf.checks import FREE as RLHF_FREE
from zeroxla.cli.rlhf.checks import check_given as check_rlhf
from zeroxla.cli.rlhf.job import rlhf
from zeroxla.cli.rlhf.options import RlhfOptions
from zeroxla.cli.run_folder import RunFolderError, check_command, has_checkpoint, read_config
from zeroxla.cli.train.checks import FREE, check_given, check_resumable
from zeroxla.cli.train.job import UsageError, train
from zeroxla.cli.train.options import ALEXNET, MeshOptions, TrainOptions
from zeroxla.mesh.processes.environment import PROCESS_ID, RESTART, STARTED, find_cluster

_T = TypeVar("_T")
_Job = TypeVar("_Job", TrainOptions, RlhfOptions)

DESCRIPTION = "Train Flax models that do not fit one device (ZeRO-3 in JAX)."
TRAIN = "Train a language model on text, or AlexNet on images, the state split over all devices."
LAUNCH = "Start a program as one process for each node: zeroxla launch --nodes 2 -- python train.py"
RLHF = "Train a language model on a reward of its own responses, with PPO or GRPO."
EXPORT = "Write the weights of a run in Hugging Face's format."
PLAN = "Say what a model needs and costs on a cluster, before having it."
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
        if arguments[:1] == ["rlhf"]:
            return _rlhf(arguments)
        if arguments[:1] == ["plan"]:
            return _plan(arguments)
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
    options = _begun(arguments, "train", options, FREE)
    try:
        check_given(arguments, options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if (launched := _to_launch(options.mesh, options.pipeline.pipe)) is not None:
        return launch(launched, _again(arguments))
    return train(options)


def _rlhf(arguments: list[str]) -> int:
    options = _begun(arguments, "rlhf", _read(arguments, RlhfOptions), RLHF_FREE)
    try:
        check_rlhf(arguments, options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if (launched := _to_launch(options.mesh, 1)) is not None:
        return launch(launched, _again(arguments))
    return rlhf(options)


def _plan(arguments: list[str]) -> int:
    try:
        return run_plan(_read(arguments, PlanOptions))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _to_launch(mesh: MeshOptions, pipe: int) -> LaunchOptions | None:
    """Return how to start the processes of several nodes, if nothing has started them yet."""
    nodes = mesh.nodes or 1
    if nodes == 1 or os.environ.get(PROCESS_ID) or find_cluster() is not None:
        return None
    return LaunchOptions(nodes=nodes * pipe, devices_per_node=mesh.devices_per_node)


def _again(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "zeroxla", *arguments]


def newest_run(runs: Path, command: str = "train") -> Path:
    """Return the run folder of a command, with a checkpoint, that was last changed.

    Raises:
      UsageError: There is none.
    """
    found = [path for path in runs.glob("*") if has_checkpoint(path) and _is_of(path, command)]
    if not found:
        raise UsageError(
            f"--resume found no run with a checkpoint under {runs}/; name its folder with --run"
        )
    return max(found, key=lambda path: (path / "checkpoints").stat().st_mtime)


def _is_of(run: Path, command: str) -> bool:
    try:
        config = read_config(run)
    except ValueError:
        return True  # what is wrong with it is said when it is opened
    return config.get("command", "train") == command


def _begun(arguments: list[str], command: str, options: _Job, free: frozenset[str]) -> _Job:
    """Return the options of a job: those of the run that it continues, if it continues one."""
    restarted = os.environ.get(RESTART, "0") != "0"
    named = RUNS / f"{command}-{os.environ[STARTED]}" if restarted else None
    run = options.output.run or named
    if not options.output.resume and not (restarted and run is not None and has_checkpoint(run)):
        return options
    run = run or newest_run(RUNS, command)
    # The run's own options are the defaults: what the command line leaves out stays as it was, and
    # what it names must be free to change.
    try:
        config = read_config(run)
        check_command(run, config, command)
        stored = type(options).from_dict(config["options"])
        given = _read(arguments, type(options), stored)
        check_resumable(stored, given, free)
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
        | command("rlhf", RlhfOptions, RLHF)
        | command("plan", PlanOptions, PLAN)
    )
    return tyro.cli(
        commands,
        args=arguments,
        prog="zeroxla",
        description=DESCRIPTION,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
