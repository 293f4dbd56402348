"""Rules of collectives: those of axes along which a program has been split before.

A dim that a collective joins from the devices' parts, or cuts into them, is the product of the
devices and of what one of them has. The second factor can be split over another axis.
"""

from __future__ import annotations

from zeroxla.program.trace import Equation
from zeroxla.split.atoms import Dim, Dims, block, dim_of
from zeroxla.split.rules import Rule, connect_unknown, fresh, same, shape_of


def _connect_gather(eq: Equation, ins: list[Dims]) -> list[Dims]:
    d, out = eq.params["all_gather_dimension"], list(fresh(eq.outputs[0]))
    devices = _devices(eq)
    if not eq.params["tiled"]:
        same(eq, out[d], devices)
        return [(*ins[0][:d], out[d], *ins[0][d:])]
    same(eq, out[d], (*devices, *ins[0][d]))
    return [(*ins[0][:d], out[d], *ins[0][d + 1 :])]


def _connect_scatter(eq: Equation, ins: list[Dims]) -> list[Dims]:
    d, out = eq.params["scatter_dimension"], list(fresh(eq.outputs[0]))
    devices = _devices(eq)
    if not eq.params["tiled"]:
        same(eq, ins[0][d], devices)
        return [(*ins[0][:d], *ins[0][d + 1 :])]
    same(eq, ins[0][d], (*devices, *out[d]))
    return [(*ins[0][:d], out[d], *ins[0][d + 1 :])]


def _connect_exchange(eq: Equation, ins: list[Dims]) -> list[Dims]:
    cut, joined = eq.params["split_axis"], eq.params["concat_axis"]
    if not eq.params["tiled"]:
        return connect_unknown(eq, ins)
    if cut == joined:
        block(ins[0][cut], "all_to_all exchanges along it")
        return list(ins)
    out, devices = list(fresh(eq.outputs[0])), _devices(eq)
    same(eq, ins[0][cut], (*devices, *out[cut]))
    same(eq, out[joined], (*devices, *ins[0][joined]))
    return [tuple(out[d] if d in (cut, joined) else dim for d, dim in enumerate(ins[0]))]


def _connect_as_is(eq: Equation, ins: list[Dims]) -> list[Dims]:
    del eq
    return ins


def _devices(eq: Equation) -> Dim:
    """Return the dim of a collective's devices, which stays as it is."""
    found = dim_of(eq.params["axis_size"] if "axis_size" in eq.params else _exchanged(eq))
    block(found, f"{eq.name} goes through it")
    return found


def _exchanged(eq: Equation) -> int:
    """Return the number of devices of an all-to-all: the factor by which a dim becomes shorter."""
    d = eq.params["split_axis"]
    return shape_of(eq.inputs[0])[d] // max(1, shape_of(eq.outputs[0])[d])


COLLECTIVE_RULES = {
    "all_gather": Rule(_connect_gather),
    "reduce_scatter": Rule(_connect_scatter),
    "all_to_all": Rule(_connect_exchange),
    "psum": Rule(_connect_as_is),
    "ppermute": Rule(_connect_as_is),
}
