"""Check: all devices run the same collectives in the same order."""

from __future__ import annotations

from collections import Counter

from jax.sharding import PartitionSpec

from zeroxla.inspect.check.check_report import CheckResult
from zeroxla.inspect.check.checked_model import CheckedModel
from zeroxla.inspect.check.varying_values import Axes, Parting, collectives_of, find_partings
from zeroxla.mesh.axes import platform_of
from zeroxla.program.compat import model_line
from zeroxla.program.walk import body_of

NAME = "collectives"


def check_collectives(checked: CheckedModel) -> CheckResult:
    """Look in the step's per-device program for branches and loops at which devices part.

    A `cond` is a fault if its decision differs between devices that a collective in one of its
    branches joins, and its branches have different collectives. So is a `while` with a collective,
    if the number of its turns differs. Nothing runs.
    """
    platform = platform_of(checked.mesh)
    mapped = next(eq for eq in checked.step_program.equations if eq.name == "shard_map")
    program = body_of(mapped.params["jaxpr"])
    inputs = [_axes(spec) for spec in mapped.params["in_specs"]]
    several = {axis for axis, length in checked.mesh.shape.items() if length > 1}
    found = [p for p in find_partings(program, inputs, platform) if p.axes & several]
    faults = [parting for parting in found if parting.differs]
    if faults:
        return CheckResult(
            name=NAME,
            verdict="fault",
            found="; ".join(map(_words, faults)),
            remedy="take the collective out of the branch or loop and choose between its results "
            "(jnp.where); or let all devices decide alike: decide by a value that all have, such "
            "as jax.lax.pmax(condition, axis), or loop a fixed number of turns",
        )
    count = Counter(text.split()[0] for text, _ in collectives_of(program, platform))
    kinds = ", ".join(f"{n} {name}" for name, n in sorted(count.items()))
    words = f"{count.total()} places with collectives ({kinds}), in one order on all devices"
    if found:
        return CheckResult(
            name=NAME,
            verdict="notice",
            found=f"devices may take different branches at {', '.join(map(_line, found))}, which "
            "have the same collectives; on some backends only those of one branch meet",
            remedy="take the collective out of the branch",
        )
    return CheckResult(name=NAME, verdict="ok", found=words)


def _axes(spec: PartitionSpec) -> Axes:
    """Return the axes along which an array that is split so differs between devices."""
    names: set[str] = set()
    for entry in spec:
        if entry is not None:
            names.update(entry if isinstance(entry, tuple) else (entry,))
    return frozenset(names)


def _line(parting: Parting) -> str:
    return model_line(parting.equation.source) or "an unknown line"


def _words(parting: Parting) -> str:
    axes = "+".join(sorted(parting.axes))
    if parting.equation.name == "while":
        of = next(filter(None, parting.collectives))
        return (
            f"the loop at {_line(parting)} runs {of[0]} in each turn, and how many turns it takes "
            f"depends on data that differs between devices along {axes}: a device that stops "
            "sooner leaves the others waiting"
        )
    branches = "; ".join(
        f"branch {i}: {', '.join(texts) or 'none'}" for i, texts in enumerate(parting.collectives)
    )
    return (
        f"the conditional at {_line(parting)} decides by data that differs between devices along "
        f"{axes}, and its branches have different collectives ({branches}): devices would wait for "
        "others that never come"
    )
