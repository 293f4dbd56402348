"""One part in a process of its own, which writes a line of JSON for each finding at once."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gpu_parts.findings import Finding, NotHereError, Program
from gpu_parts.place import Place
from zeroxla.inspect import memory
from zeroxla.program.compat import backends_started

GPU = Path(__file__).resolve().parents[1] / "gpu.py"


def alone(module: str, function: str, place: Place, *arguments: Any) -> list[dict[str, Any]]:
    """Run `function(place, *arguments)` of a module in another process, and return what it yields.

    A part calls this before JAX has devices in its own process: two processes do not share the
    memory of a GPU.

    Raises:
      RuntimeError: the process failed; its output is in this process's output.
    """
    assert not backends_started(), "JAX has taken the GPU's memory in this process"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.jsonl"
        done = subprocess.run(command(module, function, place, out, arguments))
        if done.returncode:
            raise RuntimeError(f"{function}{arguments} of {module} ended with {done.returncode}")
        return [json.loads(line) for line in out.read_text().splitlines()]


def command(
    module: str, function: str, place: Place, out: Path, arguments: Iterable[Any] = ()
) -> list[str]:
    """Return the command line of a process that runs `function(place, *arguments)`."""
    spec = {
        "module": module,
        "function": function,
        "place": dataclasses.asdict(place),
        "arguments": list(arguments),
        "out": str(out),
    }
    return [sys.executable, str(GPU), "--child", json.dumps(spec)]


def tried(programs: Iterable[Program], place: Place) -> Iterator[Finding]:
    """Lower every program, and compile it where there is a compiler for the target."""
    for program in programs:
        begin = time.perf_counter()
        try:
            lowered = program.lower()
            if place.kind == "platform":
                text = f"lowered for cuda in {time.perf_counter() - begin:.1f} s"
            else:
                compiled = lowered.compile()
                seconds = time.perf_counter() - begin
                temp_bytes = memory(compiled).temp_bytes
                text = f"compiled for an H200 in {seconds:.1f} s, {temp_bytes / 1e6:,.1f} MB of "
                text += "temporaries"
        except NotHereError as reason:
            yield Finding(name=program.name, text=f"not made: {reason}")
        except Exception as error:  # whatever a compiler says: the other programs go on
            first = str(error).strip().partition("\n")[0][:300]
            text = f"failed: {type(error).__name__}: {first}"
            yield Finding(name=program.name, text=text, failed=True)
        else:
            yield Finding(name=program.name, text=text)


def run(text: str) -> int:
    """Run what the JSON of a `command` says; return the exit status."""
    spec = json.loads(text)
    place = Place(**spec["place"])
    place.start()
    function = getattr(importlib.import_module(spec["module"]), spec["function"])
    found = function(place, *spec["arguments"])
    if spec["function"] == "programs":
        found = tried(found, place)
    with Path(spec["out"]).open("w") as out:
        for item in found:
            row = dataclasses.asdict(item) if isinstance(item, Finding) else item
            out.write(json.dumps(row) + "\n")
            out.flush()
    return 0
