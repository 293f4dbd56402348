"""The job of `zeroxla check`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from rich.console import Console

from zeroxla.cli.check.options import CheckedTraining, CheckOptions
from zeroxla.cli.check.subject import made_batch, named_batch, named_model, settings
from zeroxla.cli.named_object import named_object
from zeroxla.cli.train.setup import mesh_of
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.frontend import adapt
from zeroxla.frontend.staged import StagedModel
from zeroxla.inspect.check.check import check
from zeroxla.inspect.check.check_report import CheckReport
from zeroxla.mesh.axes import DEVICE, NODE, world_size


def run_check(options: CheckOptions) -> int:
    """Check a model, and print the report.

    Returns:
      The exit status: 0 if there is no fault, and 1 if there is one.

    Raises:
      ValueError: an object is not there or of another kind, or as `zeroxla.check`.
    """
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    console = Console(highlight=False, width=width)
    with Console(stderr=True).status("checking the model"):
        report = _report(options)
    if options.output.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        console.print(report.table())
        for note in report.notes():
            console.print(note, markup=False)
    return 0 if report.ok else 1


def _report(options: CheckOptions) -> CheckReport:
    # Before the user's code, which may start JAX.
    mesh = mesh_of(options.mesh, options.axes)
    config, subject = _config(options), options.subject
    model, batch = named_model(subject.object, settings(subject.set))
    loss = None if subject.loss is None else named_object(subject.loss, "--loss")
    if subject.batch is not None:
        batch = named_batch(subject.batch)
    names = dict.fromkeys(subject.axis_name, (NODE, DEVICE))
    arguments = {"mesh": mesh, "config": config, "loss": loss, "axis_names": names or None}
    if batch is not None:
        return check(model, batch, **arguments)
    return _on_tokens(model, loss, world_size(mesh) * config.num_micro_batches, arguments)


def _on_tokens(model: Any, loss: Any, parts: int, arguments: dict[str, Any]) -> CheckReport:
    """Check a model on random tokens.

    Raises:
      ValueError: its loss reads something else.
    """
    adapted = model.adapted if isinstance(model, StagedModel) else adapt(model, loss)
    batch = made_batch(adapted.vocabulary, adapted.context, parts)
    try:
        return check(model, batch, **arguments)
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, ValueError) and not isinstance(error.__cause__, KeyError):
            raise  # it is about something else than a key of the batch
        shape = "x".join(map(str, batch["tokens"].shape))
        raise ValueError(
            f'the loss does not take a batch of {{"tokens": int32[{shape}]}}, which is made if '
            f"none is given ({type(error).__name__}: {error}); give --batch MODULE:NAME, a pytree "
            f"of arrays with {parts} rows or a multiple, or a function that returns one"
        ) from error


def _config(options: CheckOptions) -> ZeroConfig:
    """Return the config of which the checks read some options.

    Raises:
      ValueError: the file or an option cannot work.
    """
    asked, usual = options.training, vars(CheckedTraining())
    given = {
        name: value
        for name, value in vars(asked).items()
        if name != "deepspeed" and value != usual[name]
    }
    if asked.deepspeed is None:
        return ZeroConfig(**given)
    return dataclasses.replace(ZeroConfig.from_deepspeed(asked.deepspeed), **given)
