"""What each kind of equation says about dims, and how it runs on parts.

A `Rule` has two sides that must agree:

* `connect` joins the atoms of operands and results that are split together, and blocks those that
the
  equation needs whole;
* `run` computes a part of the results from parts of the operands. Where an equation names shapes,
  those of the parts take their place; where a split atom is summed over, the parts are summed.

An equation without a rule needs its operands whole, and runs as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from zeroxla.hybrid.atoms import Dim, Dims, block, contiguous, dim_of, expand, join, splits
from zeroxla.trace import Atom as Operand
from zeroxla.trace import Equation, Value


class Parts(Protocol):
    """What `run` may ask of a program that runs on parts."""

    def dims(self, operand: Operand) -> Dims:
        """The dims of an operand or result."""
        ...

    def part(self, dim: Dim) -> int:
        """The size of a part of a dim."""
        ...

    def take(self, whole: jax.Array, dims: Dims) -> jax.Array:
        """This device's part of an array that every device has whole."""
        ...

    def sum(self, part: jax.Array) -> jax.Array:
        """The sum over the devices that share the model."""
        ...

    @property
    def index(self) -> jax.Array | int:
        """This device's place among them."""
        ...


Args = Sequence[jax.Array]
Connect = Callable[[Equation, list[Dims]], list[Dims]]
Run = Callable[[Parts, Equation, Args], list[jax.Array]]


def bind(eq: Equation, args: Args, **changed: Any) -> list[jax.Array]:
    """Run an equation, with other parameters than its own."""
    out = eq.source.primitive.bind(*args, **{**eq.params, **changed})
    return list(out) if eq.source.primitive.multiple_results else [out]


def run_as_is(parts: Parts, eq: Equation, args: Args) -> list[jax.Array]:
    """Run an equation that names no shape."""
    del parts
    return bind(eq, args)


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """See the top of the file."""

    connect: Connect
    run: Run = run_as_is


def fresh(value: Value) -> Dims:
    """Return dims that nothing has been said of."""
    return tuple(map(dim_of, value.aval.shape))


def shape_of(operand: Operand) -> tuple[int, ...]:
    """Return the shape of an operand."""
    return tuple(operand.aval.shape if isinstance(operand, Value) else jnp.shape(operand.value))


def same(eq: Equation, a: Dim, b: Dim) -> None:
    """Join two dims that an equation makes one."""
    join(a, b, f"{eq.name} regroups it")


def connect_unknown(eq: Equation, ins: list[Dims]) -> list[Dims]:
    """Everything is needed whole."""
    outs = [fresh(v) for v in eq.outputs]
    for dims in (*ins, *outs):
        for dim in dims:
            block(dim, f"{eq.name} needs it whole")
    return outs


# element by element


def _connect_elementwise(eq: Equation, ins: list[Dims]) -> list[Dims]:
    shape = eq.outputs[0].aval.shape
    out = tuple(map(dim_of, shape))
    for operand, dims in zip(eq.inputs, ins, strict=True):
        sizes = shape_of(operand)
        if len(sizes) == len(shape):  # Scalars, and dims of size 1, go with every element.
            for i in range(len(shape)):
                if sizes[i] == shape[i]:
                    same(eq, out[i], dims[i])
    return [out] * len(eq.outputs)


def _connect_each(eq: Equation, ins: list[Dims]) -> list[Dims]:
    return ins


# along some dims


def _along(dims_of: Callable[[Equation], Sequence[int]]) -> Connect:
    """Return what connects an equation that goes through some dims, and does the same for each
    element of the others. Results have the former too (a sort) or not (a sum)."""

    def connect(eq: Equation, ins: list[Dims]) -> list[Dims]:
        rank = len(ins[0])
        through = {d % rank for d in dims_of(eq)}
        others = [i for i in range(rank) if i not in through]
        outs = [list(fresh(v)) for v in eq.outputs]
        for dims in (*ins, *(out for out in outs if len(out) == rank)):
            for i in through:
                block(dims[i], f"{eq.name} goes through it")
        for dims in ins:
            for out in outs:
                for place, i in enumerate(others):
                    same(eq, out[i if len(out) == rank else place], dims[i])
        return [tuple(out) for out in outs]

    return connect


def _connect_concatenate(eq: Equation, ins: list[Dims]) -> list[Dims]:
    (out,) = (fresh(v) for v in eq.outputs)
    for dims in ins:
        for i, dim in enumerate(dims):
            if i == eq.params["dimension"]:
                block((*dim, *out[i]), "concatenate makes it of several")
            else:
                same(eq, out[i], dim)
    return [out]


def _connect_stack(eq: Equation, ins: list[Dims]) -> list[Dims]:
    (out,) = (list(fresh(v)) for v in eq.outputs)
    new = eq.params["axis"] % len(out)
    block(out[new], "stack makes it of several")
    for dims in ins:
        for i, dim in enumerate(dims):
            same(eq, out[i + (i >= new)], dim)
    return [tuple(out)]


# shapes


def _connect_broadcast(eq: Equation, ins: list[Dims]) -> list[Dims]:
    out = list(fresh(eq.outputs[0]))
    sizes, shape = shape_of(eq.inputs[0]), eq.outputs[0].aval.shape
    for i, to in enumerate(eq.params["broadcast_dimensions"]):
        if sizes[i] == shape[to]:
            out[to] = ins[0][i]
    return [tuple(out)]


def _run_broadcast(parts: Parts, eq: Equation, args: Args) -> list[jax.Array]:
    shape = tuple(map(parts.part, parts.dims(eq.outputs[0])))
    return bind(eq, args, shape=shape)


def _connect_reshape(eq: Equation, ins: list[Dims]) -> list[Dims]:
    out = fresh(eq.outputs[0])
    if eq.params["dimensions"] is not None or 0 in eq.outputs[0].aval.shape:
        return connect_unknown(eq, ins)
    same(eq, sum(ins[0], ()), sum(out, ()))
    return [out]


def _run_reshape(parts: Parts, eq: Equation, args: Args) -> list[jax.Array]:
    return bind(eq, args, new_sizes=tuple(map(parts.part, parts.dims(eq.outputs[0]))))


def _connect_transpose(eq: Equation, ins: list[Dims]) -> list[Dims]:
    return [tuple(ins[0][i] for i in eq.params["permutation"])]


def _connect_squeeze(eq: Equation, ins: list[Dims]) -> list[Dims]:
    gone = {d % len(ins[0]) for d in eq.params["dimensions"]}
    return [tuple(dim for i, dim in enumerate(ins[0]) if i not in gone)]


def _connect_iota(eq: Equation, ins: list[Dims]) -> list[Dims]:
    return [fresh(eq.outputs[0])]


def _run_iota(parts: Parts, eq: Equation, args: Args) -> list[jax.Array]:
    (whole,) = bind(eq, args)
    return [parts.take(whole, parts.dims(eq.outputs[0]))]


# slices


def _cut(dim: Dim, start: int, size: int) -> Dim:
    """Return the dim of a slice; blocked where the slice does not take whole outer turns."""
    found = contiguous(dim, start, size)
    if found is None:
        found = dim_of(size)
        block((*dim, *found), "a slice cuts it")
    return found


def _connect_slice(eq: Equation, ins: list[Dims]) -> list[Dims]:
    start, limit = eq.params["start_indices"], eq.params["limit_indices"]
    strides = eq.params["strides"] or (1,) * len(start)
    out = []
    for dim, a, b, stride in zip(ins[0], start, limit, strides, strict=True):
        if stride == 1:
            out.append(_cut(dim, a, b - a))
        else:
            out.append(dim_of(-(-(b - a) // stride)))
            block((*dim, *out[-1]), "a slice steps through it")
    return [tuple(out)]


def _run_slice(parts: Parts, eq: Equation, args: Args) -> list[jax.Array]:
    start, limit = list(eq.params["start_indices"]), list(eq.params["limit_indices"])
    for d, dim in enumerate(parts.dims(eq.outputs[0])):
        if splits(dim):  # It is one of several whole turns: so many of the part's.
            start[d] = start[d] // (limit[d] - start[d]) * parts.part(dim)
            limit[d] = start[d] + parts.part(dim)
    return bind(eq, args, start_indices=tuple(start), limit_indices=tuple(limit))


def _connect_split(eq: Equation, ins: list[Dims]) -> list[Dims]:
    axis, start, outs = eq.params["axis"], 0, []
    for size in map(int, eq.params["sizes"]):
        outs.append([*ins[0]])
        outs[-1][axis] = _cut(ins[0][axis], start, size)
        start += size
    return [tuple(out) for out in outs]


def _run_split(parts: Parts, eq: Equation, args: Args) -> list[jax.Array]:
    axis = eq.params["axis"]
    return bind(eq, args, sizes=tuple(parts.part(parts.dims(v)[axis]) for v in eq.outputs))


def _connect_dynamic_slice(eq: Equation, ins: list[Dims]) -> list[Dims]:
    out = fresh(eq.outputs[0])
    for dim, new in zip(ins[0], out, strict=True):
        _window(eq, dim, new)
    return [out]


def _run_dynamic_slice(parts: Parts, eq: Equation, args: Args) -> list[jax.Array]:
    return bind(eq, args, slice_sizes=tuple(map(parts.part, parts.dims(eq.outputs[0]))))


def _connect_dynamic_update(eq: Equation, ins: list[Dims]) -> list[Dims]:
    for dim, new in zip(*ins[:2], strict=True):
        _window(eq, dim, new)
    return [ins[0]]


def _connect_scatter(eq: Equation, ins: list[Dims]) -> list[Dims]:
    numbers = eq.params["dimension_numbers"]
    operand, indices, updates = ins
    if numbers.operand_batching_dims:
        return connect_unknown(eq, ins)
    windows = iter(numbers.update_window_dims)
    for d, dim in enumerate(operand):
        if d in numbers.inserted_window_dims:
            block(dim, f"{eq.name} moves along it")
        else:
            _window(eq, dim, updates[next(windows)])
    others = [dim for i, dim in enumerate(updates) if i not in numbers.update_window_dims]
    for dim, index in zip(others, indices[:-1], strict=True):
        same(eq, dim, index)
    block(indices[-1], f"{eq.name} needs it whole")
    return [operand]


def _window(eq: Equation, whole: Dim, window: Dim) -> None:
    """Join a window with what it is of, if it is all of it."""
    if _size(whole) == _size(window):
        same(eq, whole, window)
    else:
        block((*whole, *window), f"{eq.name} moves along it")


def _size(dim: Dim) -> int:
    size = 1
    for atom in expand(dim):
        size *= atom.size
    return size


ELEMENTWISE = [
    "abs",
    "acos",
    "acosh",
    "add",
    "add_any",
    "and",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cbrt",
    "ceil",
    "clamp",
    "conj",
    "convert_element_type",
    "copy",
    "copy_p",
    "cos",
    "cosh",
    "digamma",
    "div",
    "eq",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "ge",
    "gt",
    "imag",
    "integer_pow",
    "is_finite",
    "le",
    "lgamma",
    "log",
    "log1p",
    "logistic",
    "lt",
    "max",
    "min",
    "mul",
    "name",
    "ne",
    "neg",
    "nextafter",
    "not",
    "or",
    "population_count",
    "pow",
    "real",
    "reduce_precision",
    "rem",
    "round",
    "rsqrt",
    "select_n",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "stop_gradient",
    "sub",
    "tan",
    "tanh",
    "xor",
]

REDUCTIONS = [
    "argmax",
    "argmin",
    "reduce_and",
    "reduce_max",
    "reduce_min",
    "reduce_or",
    "reduce_prod",
    "reduce_sum",
    "reduce_xor",
]

UNKNOWN = Rule(connect_unknown)

RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, Rule(_connect_elementwise)),
    **dict.fromkeys(REDUCTIONS, Rule(_along(lambda eq: eq.params["axes"]))),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
        Rule(_along(lambda eq: (eq.params["axis"],))),
    ),
    "sort": Rule(_along(lambda eq: (eq.params["dimension"],))),
    "rev": Rule(_along(lambda eq: eq.params["dimensions"])),
    "optimization_barrier": Rule(_connect_each),
    "concatenate": Rule(_connect_concatenate),
    "stack": Rule(_connect_stack),
    "unstack": Rule(_along(lambda eq: (eq.params["axis"],))),
    "broadcast_in_dim": Rule(_connect_broadcast, _run_broadcast),
    "reshape": Rule(_connect_reshape, _run_reshape),
    "transpose": Rule(_connect_transpose),
    "squeeze": Rule(_connect_squeeze),
    "iota": Rule(_connect_iota, _run_iota),
    "slice": Rule(_connect_slice, _run_slice),
    "split": Rule(_connect_split, _run_split),
    "dynamic_slice": Rule(_connect_dynamic_slice, _run_dynamic_slice),
    "dynamic_update_slice": Rule(_connect_dynamic_update),
    "scatter": Rule(_connect_scatter),
    "scatter-add": Rule(_connect_scatter),
}
"""Rules of equations that move and map elements; those of products and lookups are in
`products`."""
