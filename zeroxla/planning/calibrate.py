"""Finds a device's efficiency from one measured step."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping

from zeroxla.mesh.machines import Device
from zeroxla.planning.lanes import COMPUTE
from zeroxla.planning.plan import Plan

LEAST = 1e-4
"""The least efficiency that is believed. A lower one means a mistake in measurement or plan."""

_TOLERANCE = 1e-4
_TRIES = 60


def calibrated(device: Device, plan_for: Callable[[Device], Plan], seconds: float) -> Device:
    """Return the device with the efficiency at which a planned step takes the measured time.

    Args:
      device: the device that was measured. Its other figures stay.
      plan_for: plans the measured step on a device. To trace it only once, make one plan and give
        `lambda device: plan.on(device=device)`.
      seconds: the measured seconds of one step.

    Returns:
      The device; its `source` names the calibration. The plan's step takes `seconds` to a
      ten-thousandth.

    Raises:
      ValueError: the step takes so long at no efficiency from `LEAST` to 1, or at many.

    Cost: some ten calls of `plan_for`.

    >>> import jax, zeroxla
    >>> from zeroxla.models import GPT
    >>> tokens = jax.ShapeDtypeStruct((8, 1025), "int32")
    >>> found = zeroxla.plan(GPT.small(), {"device": 8}, {"tokens": tokens}, device="a100")
    >>> mine = calibrated(found.target.device, lambda d: found.on(device=d), 0.2)
    >>> round(found.on(device=mine).time.seconds, 3)
    0.2
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"a step was measured to take {seconds} s; give more than 0, and finite")

    def late(slowness: float) -> float:
        return at(slowness).time.seconds - seconds

    def at(slowness: float) -> Plan:
        return plan_for(dataclasses.replace(device, efficiency=1 / slowness))

    fastest = at(1.0)
    if fastest.time.seconds > seconds * (1 + _TOLERANCE):
        links = _links_s(fastest)
        raise ValueError(
            f"a step of {seconds:.4g} s was measured, and at all of the peak of {device.label} the "
            f"plan's takes {fastest.time.seconds:.4g} s{links}; check the links' rates, and that "
            "the same step was measured"
        )
    # Computation takes as long as 1 / efficiency, so the seconds are nearly linear in it.
    slowness = _root(late, 1.0, 1 / LEAST, seconds * _TOLERANCE)
    if slowness is None:
        longest = at(1 / LEAST).time.seconds
        raise ValueError(
            f"a step of {seconds:.4g} s was measured, and at {LEAST:.2%} of the peak of "
            f"{device.label} the plan's takes {longest:.4g} s; check that the same step was "
            "measured, and that it is bound by this device"
        )
    if late(2 * slowness) < 10 * _TOLERANCE * seconds:
        raise ValueError(
            f"a step of {seconds:.4g} s was measured, and the plan's takes as long at "
            f"{1 / slowness:.2%} and at half of that of the peak of {device.label}: it is bound by "
            f"something else{_links_s(at(slowness))}; measure a step that mostly computes"
        )
    source = f"{device.source.partition('; efficiency')[0]}; efficiency calibrated to "
    return dataclasses.replace(
        device, efficiency=1 / slowness, source=f"{source}a step of {seconds:.4g} s"
    )


def entry(device: Device) -> str:
    """Return a device as an entry of a machines file; it replaces an entry of the same name."""
    lines = [f"[devices.{json.dumps(device.name)}]"]
    for field in dataclasses.fields(device):
        if field.name != "name":
            lines.append(f"{field.name} = {_toml(getattr(device, field.name))}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(x)}" for key, x in value.items()) + " }"
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False)  # TOML writes strings and booleans alike


def _links_s(plan: Plan) -> str:
    """Say in words how long each link is taken."""
    busy = {axis: s for axis, s in plan.time.busy_s.items() if axis != COMPUTE and s}
    words = ", ".join(f"`{axis}` for {s:.4g} s" for axis, s in busy.items())
    return f", of which communication alone takes the links {words}" if words else ""


def _root(
    function: Callable[[float], float], low: float, high: float, tolerance: float
) -> float | None:
    """Return the place where an increasing function is 0, up to `tolerance` in its value.

    None if it is below 0 at `high`. The method is false position (Illinois).
    """
    below, above = function(low), function(high)
    if abs(below) <= tolerance:
        return low
    if above < -tolerance:
        return None
    side = 0
    for _ in range(_TRIES):
        x = (low * above - high * below) / (above - below)
        y = function(x)
        if abs(y) <= tolerance:
            return x
        # An end that stays twice in a row counts for half; otherwise it might never move.
        if y > 0:
            high, above = x, y
            below = below / 2 if side > 0 else below
            side = 1
        else:
            low, below = x, y
            above = above / 2 if side < 0 else above
            side = -1
    return (low + high) / 2
