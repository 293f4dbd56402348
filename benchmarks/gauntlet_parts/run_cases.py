"""The child process: runs cases by name and writes a file for each.

    python -m gauntlet_parts.run_cases FOLDER [--checks a,b] NAME ...

The file of a case is written again after every check, so that a crash loses one check.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import zeroxla

zeroxla.simulate(4)
jax.config.update("jax_traceback_filtering", "off")  # The last frame says who raised an error.

from gauntlet_parts import check_generation, checks  # noqa: E402
from gauntlet_parts.case import CHECKS, OF_MODELS, Case, file_of  # noqa: E402
from gauntlet_parts.model_run import Run  # noqa: E402
from gauntlet_parts.outcome import FAILED, NOT_APPLICABLE, OK, Outcome, outcome_of  # noqa: E402

FUNCTIONS: dict[str, Callable[[Run], str]] = {
    "gradients": checks.zero3,
    "zeropp": checks.zeropp,
    "lora": checks.lora,
    "generation": check_generation.generation,
    "tensor": check_generation.tensor,
    "pipeline": checks.pipeline,
    "pipeline of 4": functools.partial(checks.pipeline, stages=4),
    "tensor axis": functools.partial(checks.axis, name="tensor"),
    "context axis": functools.partial(checks.axis, name="context"),
    "plan": checks.plan,
    "checkpoint": checks.checkpoint,
}


def run_case(case: Case, write: Callable[[dict[str, Any]], None], names: tuple[str, ...]) -> None:
    """Run a case's checks, and write what is known after each of them."""
    about: dict[str, Any] = {"name": case.name, "kind": case.kind, "package": case.package}
    about["checks"] = found = {}
    runs: list[Run] = []

    def build() -> str:
        runs.append(Run(case))
        return ""

    built = outcome_of(build)
    for name in names:
        if built.status != OK:
            found[name] = Outcome(FAILED, f"the model cannot be built: {built.detail}", built.where)
        elif case.kind == "layer" and name in OF_MODELS:
            found[name] = Outcome(NOT_APPLICABLE, "a layer")
        else:
            about["running"] = name
            write(as_json(about))
            found[name] = outcome_of(lambda name=name: FUNCTIONS[name](runs[0]))
    about.pop("running", None)
    write(as_json(about))


assert tuple(FUNCTIONS) == CHECKS


def as_json(about: dict[str, Any]) -> dict[str, Any]:
    outcomes = {name: dataclasses.asdict(x) for name, x in about["checks"].items()}
    return {**about, "checks": outcomes}


def main(arguments: list[str]) -> None:
    from gauntlet_parts.registry import case_named

    folder, names = Path(arguments[0]), CHECKS
    arguments = arguments[1:]
    if arguments[0] == "--checks":
        names, arguments = tuple(arguments[1].split(",")), arguments[2:]
    warnings.simplefilter("ignore")
    for name in arguments:
        path = file_of(folder, name)
        run_case(case_named(name), lambda found, path=path: _write(path, found), names)
        print(name, flush=True)


def _write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
