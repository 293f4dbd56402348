"""Check: no value of forward or backward is too large for its dtype, no gradient too small."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.inspect.check.check_report import CheckResult
from zeroxla.inspect.check.checked_model import CheckedModel
from zeroxla.inspect.check.wide_equations import is_narrow
from zeroxla.inspect.check.wide_run import WideRun, run_wide
from zeroxla.mesh.axes import platform_of
from zeroxla.program.compat import backward_jaxpr, model_line
from zeroxla.program.primitives import LOOPS
from zeroxla.program.trace import Equation, Program, Value, trace
from zeroxla.step.loss_plan import leaf_shapes

NAME = "overflow"

_NAMED = 3  # equations or leaves that a result names


def check_overflow(checked: CheckedModel) -> CheckResult:
    """Run the loss of one device's rows and its gradient in the user's dtype, but wide.

    The program is the one of `config.compute_dtype`. It runs in float32, equation by equation, and
    each value is compared with the largest of the dtype that it would have. Backward starts from a
    loss scale of 1, which is the most that a float16 run can fall back to with good gradients.

    Cost: one compilation, and a reduction for each value.
    """
    dtype = jnp.dtype(checked.config.compute_dtype)
    try:
        program, num_leaves = _gradient_program(checked, dtype)
    except (TypeError, ValueError, NotImplementedError) as error:
        text = str(error).strip().splitlines()
        return _fault(
            f"the model cannot be traced in {dtype.name}, as it can in float32: "
            f"{type(error).__name__}: {text[0] if text else ''}",
            "compute this part in float32 (x.astype(jnp.float32))",
        )
    narrow = {v.aval.dtype for eq in program.equations for v in eq.outputs if _is_narrow(v)}
    if not narrow and not is_narrow(dtype):
        return CheckResult(
            name=NAME,
            verdict="ok",
            found=f"the model computes in {dtype.name}, nothing in a narrower dtype; check with "
            "compute_dtype float16 or bfloat16 to see what those would do",
        )
    args = [
        *jax.tree.leaves((checked.params, checked.model_state)),
        *map(_as_wide, jax.tree.leaves(checked.rows)),
        jax.random.fold_in(jax.random.fold_in(checked.state.key, 0), 0),
        jnp.float32(1),
    ]
    args = jax.device_put(args, checked.one_device.devices.flat[0])
    with checked.tracing_on_one_device(), np.errstate(over="ignore"):
        run = run_wide(program, platform_of(checked.mesh), checked.on_one_device, args)
    faults = _overflows(run)
    if faults:
        more = len(faults) - _NAMED
        words = "; ".join(_words(eq, v, run) for eq, v in faults[:_NAMED])
        return _fault(
            words + (f"; and at {more} more places" if more > 0 else ""),
            "scale before the product, not after it (attention: queries by width**-0.5), compute "
            "this part in float32 (x.astype(jnp.float32), preferred_element_type), or train with "
            "compute_dtype bfloat16",
        )
    if not all(np.isfinite(np.asarray(x)).all() for x in run.outputs):
        return _fault(
            f"the loss or a gradient is not finite: {_first_nan(run)}",
            "mask with jnp.where, not by adding or multiplying infinite values: in "
            f"{dtype.name} -1e9 may be -inf, and 0 times that is NaN",
        )
    return _small_gradients(checked, program, run, dtype, num_leaves)


def _gradient_program(checked: CheckedModel, dtype: Any) -> tuple[Program, int]:
    """Return the program (leaves, model state, rows, key, scale) -> (loss, gradients), with leaves
    and rows in a dtype; and the number of gradients."""
    loss = checked.losses(dtype)[True]
    layout = checked.layout
    trained = [i for i, leaf in enumerate(layout) if not leaf.frozen]

    def gradients(params: Any, state: Any, rows: Any, key: Any, scale: Any) -> Any:
        leaves, tree = jax.tree.flatten(params)

        def of_trained(own: list[Any]) -> Any:
            given = list(leaves)
            for i, x in zip(trained, own, strict=True):
                given[i] = x
            return loss(tree.unflatten(given), state, rows, key)[0]

        value, backward = jax.vjp(of_trained, [leaves[i] for i in trained])
        return value, backward(scale.astype(value.dtype))[0]

    params = layout.tree.unflatten(leaf_shapes(layout, dtype))
    rest = checked.model_state, checked.rows, checked.state.key, jnp.float32(1)
    state, rows, key, scale = jax.eval_shape(lambda *args: args, *rest)
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype if _is_floating(x) else x.dtype), rows
    )
    found: list[Program] = []
    # A mask of -1e9 is infinite in float16; NumPy would warn of it.
    with checked.tracing_on_one_device(), np.errstate(over="ignore"):
        jax.eval_shape(
            checked.on_one_device(
                lambda *args: found.append(trace(gradients, *args, opened=backward_jaxpr)[0])
            ),
            *(params, state, rows, key, scale),
        )
    return found[0], len(trained)


def _overflows(run: WideRun) -> list[tuple[Equation, Value]]:
    """Return the equations that first make a value too large, in order, with the value."""

    def exceeds(v: Value) -> bool:
        return v in run.largest and run.largest[v] > largest_of(v.aval.dtype)

    return [
        (eq, v)
        for eq in run.equations
        if eq.name not in LOOPS | {"cond"} and not any(map(exceeds, eq.values))
        for v in eq.outputs
        if exceeds(v)
    ]


def largest_of(dtype: Any) -> float:
    """Return the size up to which values round to a finite value of a floating dtype.

    >>> largest_of(jnp.float16)
    65520.0
    """
    info = jnp.finfo(dtype)
    last_place = 2.0 ** (info.maxexp - 1 - info.nmant)
    return float(info.max) + last_place / 2


def _words(eq: Equation, v: Value, run: WideRun) -> str:
    dtype = v.aval.dtype
    size = run.largest[v]
    value = f"{size:.3g}" if math.isfinite(size) else "more than float32 holds"
    shape = "x".join(map(str, v.aval.shape)) or "scalar"
    return (
        f"{eq.name} at {model_line(eq.source) or 'an unknown line'} makes a value of {value} "
        f"({dtype.name}[{shape}] holds {float(jnp.finfo(dtype).max):.5g})"
    )


def _first_nan(run: WideRun) -> str:
    """Return the equation that makes the first NaN, in words."""
    for eq in run.equations:
        made = run.nan.intersection(eq.outputs) and run.nan.isdisjoint(eq.values)
        if made and eq.name not in LOOPS | {"cond"}:
            return f"{eq.name} at {model_line(eq.source) or 'an unknown line'} makes the first NaN"
    return "a result is infinite"


def _small_gradients(
    checked: CheckedModel, program: Program, run: WideRun, dtype: Any, num_leaves: int
) -> CheckResult:
    """Return whether gradients become zero in float16 at the largest loss scale that fits."""
    biggest = max((x for v, x in run.largest.items() if _is_narrow(v)), default=0.0)
    words = f"the largest value in a narrow dtype is {biggest:.3g}, and all fit"
    if dtype != jnp.float16:
        return CheckResult(name=NAME, verdict="ok", found=words)
    backward = _backward_values(program, run)
    top = max((run.largest[v] for v in backward if v.aval.dtype == dtype), default=0.0)
    room = 2.0 ** math.floor(math.log2(largest_of(dtype) / top)) if top else math.inf
    scale = min(checked.config.init_loss_scale, room)
    names = [leaf.path for leaf in checked.layout if not leaf.frozen]
    sizes = [float(np.max(np.abs(g), initial=0)) for g in run.outputs[-num_leaves:]]
    least = float(jnp.finfo(dtype).smallest_subnormal) / 2
    lost = [n for n, x in zip(names, sizes, strict=True) if 0 < x * scale <= least]
    if lost:
        more = len(lost) - _NAMED
        return CheckResult(
            name=NAME,
            verdict="notice",
            found=f"{words}; but at a loss scale of {scale:g} the whole gradient becomes zero in "
            f"float16 of {', '.join(lost[:_NAMED])}" + (f" and {more} more" if more > 0 else ""),
            remedy="raise init_loss_scale, or train with compute_dtype bfloat16"
            if scale == checked.config.init_loss_scale
            else "gradients of this model span more than float16 holds: train with compute_dtype "
            "bfloat16",
        )
    settles = "" if room >= scale == checked.config.init_loss_scale else (
        f" (init_loss_scale {checked.config.init_loss_scale:g} overflows: the first steps are "
        "skipped until it has halved to that)"
    )  # fmt: skip
    found = f"{words}; backward has room for a loss scale of {scale:g}{settles}"
    return CheckResult(name=NAME, verdict="ok", found=found)


def _backward_values(program: Program, run: WideRun) -> set[Value]:
    """Return the values that follow from the loss scale: those that it multiplies."""
    scaled = {program.inputs[-1]}
    for i, eq in enumerate(run.equations):
        scaled.update(v for v, operand in run.entered[i] if operand in scaled)
        if not scaled.isdisjoint(eq.values):
            scaled.update(eq.outputs)
    return {v for v in scaled if v in run.largest}


def _is_narrow(v: Value) -> bool:
    return is_narrow(v.aval.dtype)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _as_wide(x: Any) -> Any:
    return jnp.asarray(x).astype(jnp.float32) if _is_floating(x) else jnp.asarray(x)


def _fault(found: str, remedy: str) -> CheckResult:
    return CheckResult(name=NAME, verdict="fault", found=found, remedy=remedy)
