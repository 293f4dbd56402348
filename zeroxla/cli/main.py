"""The command `zeroxla`: it finds the command that is meant, and prints the errors.

The commands are listed here and live elsewhere, so that `zeroxla --help` need not wait for JAX.
"""

from __future__ import annotations

import difflib
import importlib
import os
import select
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from zeroxla.cli.errors import DivergedError, RunFolderError, UsageError
from zeroxla.program.extras import MissingExtraError, extra


class Command(NamedTuple):
    """A command.

    Attributes:
      module: the module whose function `run(arguments) -> status` does the work.
      help: the line of `zeroxla --help`.
    """

    module: str
    help: str


DESCRIPTION = "Train Flax models that do not fit one device (ZeRO-3 in JAX)."
COMMANDS = {
    "train": Command(
        "zeroxla.cli.train.command", "Train a language model on text, or AlexNet on images."
    ),
    "launch": Command(
        "zeroxla.cli.launch.command", "Start a program as one process for each node, and watch it."
    ),
    "island": Command(
        "zeroxla.cli.islands.island", "Start a program as one island, which joins a coordinator."
    ),
    "coordinate": Command(
        "zeroxla.cli.islands.coordinate", "Run the coordinator of islands that run elsewhere."
    ),
    "export": Command("zeroxla.cli.export", "Write the weights of a run in Hugging Face's format."),
    "generate": Command(
        "zeroxla.cli.generate.command", "Generate text with a model, or converse with it."
    ),
    "rlhf": Command(
        "zeroxla.cli.rlhf.command", "Train a language model on rewards of its own responses."
    ),
    "check": Command("zeroxla.cli.check.command", "Find what is wrong with a model of your own."),
    "plan": Command(
        "zeroxla.cli.plan.command", "Predict what a model needs and costs on a cluster."
    ),
    "explain": Command(
        "zeroxla.cli.explain.command", "Explain what a run's step waits for, and what would help."
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      arguments: the words after the program's name. None means `sys.argv[1:]`.

    Returns:
      The exit status: 0 when the work is done; 75 when it was interrupted and saved; 1 when
      something of the run could not be written, it has diverged, or what was asked for is not so (a
      plan that does not fit, a step with stalls); 2 for an option or an input that cannot work; 130
      when interrupted with nothing to save; 141, as of other programs, when what reads
      the output has ended, such as `head`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if _is_read():  # another pipe broke
            raise
        # The interpreter flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich has met it, and ends with 1
            return 141
        raise


def _run(arguments: Sequence[str]) -> int:
    """Run a command, and print its errors; return the exit status."""
    if not arguments:
        print(help_text(), file=sys.stderr)
        return 2
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(help_text())
        return 0
    if name == "--version":
        from importlib.metadata import version

        print(f"zeroxla {version('zeroxla')}")
        return 0
    try:
        command = _find(name)
        with extra("cli", f"zeroxla {name} needs"):
            module = importlib.import_module(command.module)
        return module.run(rest)
    except (UsageError, MissingExtraError, RunFolderError, DivergedError) as error:
        return _told(error)
    except (RuntimeError, AssertionError) as error:
        if (said := _no_devices(error)) is None:
            raise
        return _told(UsageError(said))
    except KeyboardInterrupt:
        print("interrupted; nothing was saved since the last checkpoint", file=sys.stderr)
        return 130


def _told(error: Exception) -> int:
    """Print an error; return the exit status."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("[bold red]error:[/] ", end="")
    console.print(str(error), markup=False)
    return 1 if isinstance(error, RunFolderError | DivergedError) else 2


def _no_devices(error: BaseException) -> str | None:
    """Return what there is to say if JAX could not start its devices; None of another error.

    JAX raises a RuntimeError that tells the reason, or a bare AssertionError where its plugin for
    the platform finds nothing.
    """
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(x.co_name == "backends" and "xla_bridge" in x.co_filename for x in codes):
        return None
    asked = os.environ.get("JAX_PLATFORMS")
    lines = str(error).strip().splitlines()
    reason = f" ({lines[0]})" if lines else ""
    if not asked:
        return f"JAX cannot start its devices{reason}; mend its parts, or set JAX_PLATFORMS=cpu"
    kind = asked.partition(",")[0]
    gpu = kind in ("cuda", "gpu")
    needed = "pip install 'zeroxla[cuda13]'" if gpu else f"JAX's part for {kind}"
    return (
        f"JAX_PLATFORMS={asked}: JAX finds no such devices here{reason}; unset it to take what "
        f"there is, set it to cpu, or install what drives them: {needed}"
    )


def _is_read() -> bool:
    """Return whether something may still take what is printed."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # a pipe without a reader is an error, which is always reported
    return not poll.poll(0)


def help_text() -> str:
    """Return the list of commands."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {c.help}" for name, c in COMMANDS.items())
    return (
        f"usage: zeroxla COMMAND [OPTIONS]\n\n{DESCRIPTION}\n\ncommands:\n{commands}\n\n"
        "zeroxla COMMAND --help lists the options of a command.\n"
        "zeroxla --version prints the version."
    )


def _find(name: str) -> Command:
    """Return a command.

    Raises:
      UsageError: there is none of this name; the nearest one is named.
    """
    if name in COMMANDS:
        return COMMANDS[name]
    if name.startswith("-"):
        raise UsageError(f"{name} before a command; write the command first: zeroxla train {name}")
    nearest = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "see zeroxla --help"
    raise UsageError(f"there is no command {name}, only {', '.join(COMMANDS)}; {hint}")
