"""Check: the step computes the loss and the gradients that the unsharded model has."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from zeroxla.inspect.check.check_report import CheckResult
from zeroxla.inspect.check.checked_model import CheckedModel
from zeroxla.inspect.check.reference import Gradients, has_collectives, unsharded
from zeroxla.inspect.check.two_runs import TwoRuns
from zeroxla.inspect.check.wide_equations import is_narrow
from zeroxla.mesh.axes import platform_of
from zeroxla.program.walk import walk

NAME = "equality"

TOLERANCE = 1e-4
"""The largest relative error that counts as rounding in float32."""

_ROUNDINGS = 8  # of a narrow dtype in which the model computes itself

_NAMED = 3  # leaves that a result names


def check_equality(checked: CheckedModel, runs: TwoRuns | None) -> CheckResult:
    """Compare the step's gradients with those of the whole batch on one device, in float32.

    A model that draws random numbers does so under another key on each device. So its training is
    compared with the mean over the devices' rows, and the whole batch with that mean in evaluation.

    Args:
      checked: the model.
      runs: the step's results; None if it must not run.

    Cost: one compilation; two if the gradients differ, and two more for evaluation if the model is
    random or has a state.
    """
    if runs is None:
        return CheckResult(
            name=NAME,
            verdict="notice",
            found="not compared: the step would not end (see `collectives`)",
            remedy="mend that first",
        )
    exchanges = has_collectives(checked.programs[True])
    is_random = checked.is_random(train=True)
    if exchanges and is_random:
        return CheckResult(
            name=NAME,
            verdict="notice",
            found="not compared: in training the model draws random numbers and exchanges values "
            "between devices, so no run on one device computes the same",
            remedy="check an instance without dropout",
        )
    step = runs.gradients
    of_rows = "the devices' rows on one device, each under its own key"
    first = unsharded(checked, train=True, slices=is_random)
    if not first.is_finite:
        return _fault(
            f"the loss of the unsharded model is {first.loss:g}, and not all of its gradients are "
            "finite: there is nothing to compare",
            "give a batch and first weights for which the loss is finite",
        )
    if not is_random:
        if _equal(checked, step, first):
            return _same(checked, step, first, "the whole batch on one device")
        if exchanges:
            return _fault(
                "the step differs from the whole batch on one device: "
                f"{_worst(checked, step, first)}",
                "the model exchanges values between devices itself: take means over them (pmean, "
                "not psum), and let nothing depend on the number of devices or on axis_index",
            )
    rows = first if is_random else unsharded(checked, train=True, slices=True)
    if not _equal(checked, step, rows):
        return _fault(
            "the step differs from the mean over its devices' rows on one device: "
            f"{_worst(checked, step, rows)}",
            "see the check `repeats`: a model that is another one each time it is traced, or that "
            "calls Python code with a memory, differs here too. If that check is ok, please report "
            "the model as an error of zeroxla",
        )
    if not is_random:
        return _explained(checked, first, rows, train=True)
    if checked.is_random(train=False):
        words = f"{of_rows} (the whole batch was not compared: evaluation is random, too)"
        return _same(checked, step, rows, words)
    whole, evaluated = (unsharded(checked, train=False, slices=x) for x in (False, True))
    if _equal(checked, evaluated, whole):
        words = f"{of_rows}, and in evaluation the whole batch equals them"
        return _same(checked, step, rows, words)
    return _explained(checked, whole, evaluated, train=False)


def _evaluates_alike(checked: CheckedModel) -> bool:
    """Return whether the whole batch and the mean over the devices' rows are equal in
    evaluation."""
    whole, rows = (unsharded(checked, train=False, slices=x) for x in (False, True))
    return _equal(checked, rows, whole)


def _explained(
    checked: CheckedModel, whole: Gradients, rows: Gradients, *, train: bool
) -> CheckResult:
    """Return why the mean over the devices' rows differs from the whole batch.

    Args:
      checked: the model.
      whole: the gradients of the whole batch.
      rows: the mean over the devices' rows.
      train: whether both are of training; otherwise of evaluation.
    """
    count = checked.num_slices
    worst = _worst(checked, rows, whole)
    summed = dataclasses.replace(
        rows, loss=rows.loss * count, leaves=[x * count for x in rows.leaves]
    )
    if _equal(checked, summed, whole):
        return _fault(
            f"the loss sums over rows: on the whole batch it is {whole.loss:.4g}, {count} times "
            f"its mean over the {count} devices' rows ({rows.loss:.4g}), and so are its gradients",
            "return the mean over rows; or a mean over the items that count, and their number as "
            'metrics["weight"]',
        )
    if train and checked.model_state and _evaluates_alike(checked):
        return CheckResult(
            name=NAME,
            verdict="notice",
            found="each device normalises by the statistics of its own rows, so training differs "
            f"from the whole batch on one device (in evaluation it does not): {worst}",
            remedy="nothing, if that is meant, as in most data-parallel training; otherwise name "
            'the devices in the norm: BatchNorm(axis_name="batch") and '
            'axis_names={"batch": ("node", "device")}',
        )
    return _fault(
        f"the mean over {count} devices' rows differs from the whole batch on one device: {worst}. "
        "Rows see each other (a contrastive loss, a norm over the batch, a branch that reads all "
        "rows, experts with a capacity), or weigh differently (a mask)",
        'of a masked mean, return the number of items as metrics["weight"]; for rows that see each '
        "other, exchange values by axis name (all_gather, pmean) with axis_names=, or accept that "
        "each device sees its own rows alone",
    )


def tolerance_of(checked: CheckedModel) -> float:
    """Return the largest relative error that counts as rounding.

    A model may cast to a narrow dtype itself, as with `dtype=jnp.bfloat16`, and sums in another
    order then differ by some roundings of that dtype.
    """
    visits = walk(checked.programs[True], platform_of(checked.mesh))
    dtypes = {v.aval.dtype for visit in visits for v in visit.equation.outputs}
    coarsest = max((float(jnp.finfo(d).eps) for d in dtypes if is_narrow(d)), default=0.0)
    return max(TOLERANCE, _ROUNDINGS * coarsest)


def _equal(checked: CheckedModel, found: Gradients, expected: Gradients) -> bool:
    tolerance = tolerance_of(checked)
    errors = [found.loss_error(expected), *found.errors(expected)]
    return all(error <= tolerance for error in errors)


def _worst(checked: CheckedModel, found: Gradients, expected: Gradients) -> str:
    """Return the loss and the leaves with the largest errors, in words."""
    names = [leaf.path for leaf in checked.layout if not leaf.frozen]
    errors = dict(zip(names, found.errors(expected), strict=True))
    largest = sorted(errors, key=lambda name: -errors[name])[:_NAMED]
    wrong = sum(error > tolerance_of(checked) for error in errors.values())
    words = ", ".join(f"{name} {_percent(errors[name])}" for name in largest)
    return (
        f"the loss is {found.loss:.6g} instead of {expected.loss:.6g}, and {wrong} of "
        f"{len(errors)} gradients differ, most of all {words}"
    )


def _percent(error: float) -> str:
    return f"by {error:.2%}" if math.isfinite(error) else "is not finite"


def _same(checked: CheckedModel, found: Gradients, expected: Gradients, what: str) -> CheckResult:
    names = [leaf.path for leaf in checked.layout if not leaf.frozen]
    errors = found.errors(expected)
    worst = max(range(len(errors)), key=errors.__getitem__)
    tolerance = tolerance_of(checked)
    narrow = f"; {tolerance:.1e} is allowed, as the model itself computes in a narrow dtype"
    return CheckResult(
        name=NAME,
        verdict="ok",
        found=f"loss and {len(errors)} gradients equal those of {what}; largest relative error "
        f"{errors[worst]:.1e} ({names[worst]}){narrow if tolerance > TOLERANCE else ''}",
    )


def _fault(found: str, remedy: str) -> CheckResult:
    return CheckResult(name=NAME, verdict="fault", found=found, remedy=remedy)
