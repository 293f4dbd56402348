"""Evaluates a program in which some leaves have adapters: x . W becomes x . W + (s x . A) . B.

Loops and `jax.checkpoint` bodies that a leaf enters stay loops and bodies, with a rewritten inside.
A leaf that a loop slices is still sliced, together with its adapter. So the fetch plan, which
traces the result, finds each leaf where the model uses it, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from zeroxla.frontend.lora.dense_view import DenseView
from zeroxla.program import compat
from zeroxla.program.primitives import CASTS, REMATS
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Program, flatten, read


def evaluate(program: Program, args: Sequence[Any]) -> list[Any]:
    """Evaluate on arrays and `DenseView` leaves; return arrays.

    Raises:
      NotImplementedError: a leaf with an adapter is used outside of products.
    """
    env: dict[Any, Any] = dict(zip(program.inputs, args, strict=True))
    for eq in program.equations:
        inputs = [read(env, operand) for operand in eq.inputs]
        env.update(zip(eq.outputs, _results(eq, inputs)))
    return [_whole(read(env, operand), "returns it") for operand in program.outputs]


def _results(eq: Equation, args: list[Any]) -> Sequence[Any]:
    """Return the results of one equation, as arrays or views."""
    if not any(isinstance(x, DenseView) for x in args):
        return compat.call_equation(eq.source, eq.name_stack, args)
    if eq.name in CASTS and eq.outputs[0].is_float:
        return [args[0].cast(eq.outputs[0].aval.dtype)]
    if eq.name == "transpose":
        return [args[0].transpose(eq.params["permutation"])]
    if eq.name == "scan":
        return _loop(eq, args)
    if eq.name in REMATS:
        body, params = flatten(eq.params["jaxpr"]), eq.params
        return jax.checkpoint(
            lambda args: evaluate(body, args),
            prevent_cse=params["prevent_cse"],
            policy=params["policy"],
        )(args)
    if eq.name == "dot_general" and _is_product(eq, args):
        return [_product(eq, args)]
    arrays = [_whole(x, f"passes it to `{eq.name}`") for x in args]
    return compat.call_equation(eq.source, eq.name_stack, arrays)


def _is_product(eq: Equation, args: list[Any]) -> bool:
    """Return whether an equation multiplies an activation by a leaf."""
    contracting, batch = eq.params["dimension_numbers"]
    views = [(i, x) for i, x in enumerate(args) if isinstance(x, DenseView)]
    if len(views) > 1 or any(batch):
        return False
    ((side, view),) = views
    return sorted(view.dims[d] for d in contracting[side]) == list(view.leaf.contracted)


def _product(eq: Equation, args: list[Any]) -> jax.Array:
    """Multiply an activation by a view, its adapter included."""
    side = next(i for i, x in enumerate(args) if isinstance(x, DenseView))
    view, x = args[side], args[1 - side]
    values = view.values()
    arrays = [x, values] if side else [values, x]
    (y,) = compat.call_equation(eq.source, eq.name_stack, arrays)
    if view.a is None:
        return y
    contracting = eq.params["dimension_numbers"][0]
    with jax.named_scope("lora"):
        more = view.correction(
            x,
            (contracting[1 - side], contracting[side]),
            first=side == 0,
            precision=eq.params["precision"],
        )
        return view.scaled(y + more.astype(y.dtype), values, first=side == 0)


def _loop(eq: Equation, args: list[Any]) -> list[Any]:
    """Run a loop with its body rewritten. It slices the views of stacked leaves."""
    scan = Scan(eq)
    body = scan.body()
    consts, carry, xs = scan.split_inputs(args)
    carry = [_whole(x, "has a loop carry it") for x in carry]
    xs = [
        x.stacked()
        if isinstance(x, DenseView) and x.dims[0] in x.layers
        else _whole(x, "slices it")
        for x in xs
    ]

    def turn(carry: list[Any], xs: list[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        xs = [x.layer() if isinstance(x, DenseView) else x for x in xs]
        results = evaluate(body, [*consts, *carry, *xs])
        return scan.split_outputs(results)

    carry, ys = scan.run(turn, carry, xs)
    return [*carry, *ys]


def _whole(x: Any, what: str) -> Any:
    """Return an array, or the array of a view. Refuse a view with an adapter."""
    if not isinstance(x, DenseView):
        return x
    if x.a is not None:
        raise NotImplementedError(
            f"a leaf of shape {x.leaf.shape} has an adapter, and the model {what} where its loss "
            "in training only multiplies by it; leave it out of targets="
        )
    return x.values()
