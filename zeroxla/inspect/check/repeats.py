"""Check: the model is the same each time, when it is traced and when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from zeroxla.inspect.check.check_report import CheckResult
from zeroxla.inspect.check.checked_model import CheckedModel
from zeroxla.inspect.check.two_runs import TwoRuns
from zeroxla.program.compat import model_line
from zeroxla.program.primitives import CALLBACKS
from zeroxla.program.trace import Constant, Equation, Operand, Program, Value
from zeroxla.program.walk import Visit, walk

NAME = "repeats"

_NAMED = 3


def check_repeats(checked: CheckedModel, runs: TwoRuns | None) -> CheckResult:
    """Trace the loss a second time, and compare two runs of the step from one state bit by bit.

    Args:
      checked: the model.
      runs: the two runs; None if the step must not run.

    Cost: one trace; the runs are those that `run_twice` has made.
    """
    calls = list(dict.fromkeys(_callbacks(checked.programs[True])))
    different = first_difference(checked.programs[True], checked.trace_loss(train=True))
    if different is not None:
        return _fault(
            f"the model is another program each time it is traced: {different}",
            "draw random numbers with jax.random from the key or rngs that the model is given, and "
            "take nothing from np.random, `random`, the time or a counter of your own: such values "
            "become constants of the program, other ones in every process",
        )
    if runs is None:
        return CheckResult(
            name=NAME,
            verdict="notice",
            found="two traces give the same program; the step did not run, as it would not end "
            "(see `collectives`)",
            remedy="mend that first",
        )
    if runs.different:
        names = ", ".join(runs.different[:_NAMED])
        called = f"; while it runs it calls Python code at {', '.join(calls)}" if calls else ""
        return _fault(
            f"two runs of the step from one state differ, in {len(runs.different)} results: "
            f"{names}{called}",
            "let a callback's results follow from its arguments alone"
            if calls
            else "see whether a kernel or a compiler flag adds in an order that changes "
            "(on GPUs: XLA_FLAGS=--xla_gpu_deterministic_ops=true)",
        )
    if calls:
        return CheckResult(
            name=NAME,
            verdict="notice",
            found="two runs give the same bits; but each device calls Python code on its host, at "
            f"{', '.join(calls)}",
            remedy="let the results follow from the arguments alone, on all hosts; and expect each "
            "call to wait for the device",
        )
    return CheckResult(
        name=NAME,
        verdict="ok",
        found="two traces give the same program, and two runs of the step the same bits",
    )


def first_difference(first: Program, second: Program) -> str | None:
    """Return where two traces of one function differ, in words; None if they do not.

    Names, shapes, operands and constants of equations are compared, in bodies and branches too.
    """
    mine, its = list(walk(first, "cpu")), list(walk(second, "cpu"))
    numbers, others = (
        {id(value): i for i, value in enumerate([*program.inputs, *_made(visits)])}
        for program, visits in ((first, mine), (second, its))
    )

    def same(a: Operand, b: Operand) -> bool:
        if isinstance(a, Constant) and isinstance(b, Constant):
            return _same_constant(a.value, b.value)
        # The inputs of bodies have no number.
        return type(a) is type(b) and numbers.get(id(a)) == others.get(id(b))

    for a, b in zip(mine, its, strict=False):
        one, other = a.equation, b.equation
        where = f"{one.name} at {model_line(one.source) or 'an unknown line'}"
        if _kind(one) != _kind(other):
            return f"{where} became {other.name} {_shapes(other)} from {_shapes(one)}"
        for x, y in zip(one.inputs, other.inputs, strict=True):
            if not same(x, y):
                if isinstance(x, Constant) and isinstance(y, Constant):
                    return f"{where} reads the constant {_short(x)}, and then {_short(y)}"
                return f"{where} reads other values than before"
    if len(mine) != len(its):
        return f"it has {len(mine)} equations, and then {len(its)}"
    return None


def _made(visits: list[Visit]) -> Iterator[Value]:
    """Yield the values that equations make, in order."""
    for visit in visits:
        yield from visit.equation.outputs


def _kind(eq: Equation) -> Any:
    return eq.name, len(eq.inputs), _shapes(eq)


def _shapes(eq: Equation) -> str:
    return ", ".join(v.aval.str_short() for v in eq.outputs)


def _same_constant(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        x, y = np.asarray(a), np.asarray(b)
    except TypeError:  # a key of jax.random, which NumPy does not hold
        return True
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def _short(constant: Constant) -> str:
    flat = np.asarray(constant.value).ravel()
    words = ", ".join(f"{x:.6g}" for x in flat[:3])
    return f"{words}{', ...' if flat.size > 3 else ''}"


def _callbacks(program: Program) -> list[str]:
    """Return the lines at which a program calls Python code for a result; printing is none."""
    return [
        model_line(visit.equation.source) or "an unknown line"
        for visit in walk(program, "cpu")
        if visit.equation.name in CALLBACKS and visit.equation.outputs
    ]


def _fault(found: str, remedy: str) -> CheckResult:
    return CheckResult(name=NAME, verdict="fault", found=found, remedy=remedy)
