"""`TracedSegment`: a segment's forward and the residuals of its derivative, as one program."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
from jax import lax

from zeroxla.fetch.segments import Straight
from zeroxla.program import compat
from zeroxla.program.trace import Equation, Operand, Program, Value, closure, flatten, read


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TracedSegment:
    """`jax.vjp` of a segment, traced into one program, from its leaves and inputs to its outputs
    and residuals.

    Attributes:
      segment: the segment.
      targets: its leaves and inputs that get a gradient.
      outputs: its outputs that have a gradient.
      program: the program. Its inputs stand for `segment.leaves` and `segment.inputs`, in another
        order.
      stand_ins: the program's input for each of the segment's leaves and inputs.
      results: the program's value for each of the segment's outputs, in order.
      residuals: what the derivative reads, in the order of the leaves of `pullback`.
      free: the inputs of the program that backward has anyway: leaves, which it gathers again, and
        constants.
      pullback: the tree structure of the derivative, a function of the outputs' cotangents.
    """

    segment: Straight
    targets: tuple[Value, ...]
    outputs: tuple[Value, ...]
    program: Program
    stand_ins: dict[Value, Value]
    results: tuple[Operand, ...]
    residuals: tuple[Operand, ...]
    free: frozenset[Value]
    pullback: Any

    def producers(self) -> dict[Value, Equation]:
        """Return the equation that makes each value, of equations that may run again."""
        return {v: eq for eq in self.program.equations if not eq.is_pinned for v in eq.outputs}

    def leaves_of_backward(self) -> frozenset[Value]:
        """Return the segment's leaves that the derivative reads."""
        free = self.from_free()
        producers = {v: eq for v, eq in self.producers().items() if v in free}
        read = [v for v in self.residuals if isinstance(v, Value) and v in free]
        roots = frozenset(closure(read, producers)[1])
        return frozenset(v for v in self.segment.leaves if self.stand_ins[v] in roots)

    def from_free(self) -> frozenset[Value]:
        """Return the values that are computed from `free` inputs alone."""
        known = set(self.free)
        for eq in self.program.equations:
            if not eq.is_pinned and known.issuperset(eq.values):
                known.update(eq.outputs)
        return frozenset(known)


def trace_segment(
    segment: Straight,
    active: Iterable[Value],
    constants: Iterable[Value],
    summed: Iterable[Value],
) -> TracedSegment:
    """Trace a segment with its derivative.

    Args:
      segment: the segment to differentiate.
      active: the values that have a gradient.
      constants: the inputs that backward has anyway, as it has leaves.
      summed: the values whose cotangents are summed one reader at a time; see `_sum_up_to_here`.
    """
    active, constants = frozenset(active), frozenset(constants)
    everything = (*segment.leaves, *segment.inputs)
    targets = tuple(v for v in everything if v in active)
    rest = tuple(v for v in everything if v not in active)
    outputs = tuple(v for v in segment.outputs if v in active)
    passive = tuple(v for v in segment.outputs if v not in active)
    summed = active.intersection(summed)
    pullback_tree = None

    def with_residuals(target_args: list[jax.Array], rest_args: list[jax.Array]) -> Any:
        nonlocal pullback_tree

        def primal(target_args: list[jax.Array]) -> tuple[list, list]:
            env = dict(zip((*targets, *rest), (*target_args, *rest_args), strict=True))
            run_saving_no_leaf(segment, env, summed)
            return [env[v] for v in outputs], [env[v] for v in passive]

        out, pullback, aux = jax.vjp(primal, target_args, has_aux=True)
        residuals, pullback_tree = jax.tree.flatten(pullback)
        return out, aux, residuals

    shapes = [[_shape(v) for v in targets], [_shape(v) for v in rest]]
    program = flatten(jax.make_jaxpr(with_residuals)(*shapes))
    num_outputs = len(segment.outputs)
    stand_ins = dict(zip((*targets, *rest), program.inputs, strict=True))
    made = dict(zip((*outputs, *passive), program.outputs[:num_outputs], strict=True))
    return TracedSegment(
        segment=segment,
        targets=targets,
        outputs=outputs,
        program=program,
        stand_ins=stand_ins,
        results=tuple(made[v] for v in segment.outputs),
        residuals=program.outputs[num_outputs:],
        free=frozenset(stand_ins[v] for v in everything if v in segment.leaves or v in constants),
        pullback=pullback_tree,
    )


def run_saving_no_leaf(segment: Straight, env: dict[Value, Any], summed: frozenset[Value]) -> None:
    """Run a segment's equations, with `jax.checkpoint` around each `cond` that reads leaves.

    A branch returns its residuals, copies of the leaves among them, as results of the `cond`, where
    they look like activations. Cost: the taken branch runs once more in backward.

    Args:
      segment: the segment.
      env: its leaves and inputs; results are added.
      summed: the values whose cotangents are summed one reader at a time; see `_sum_up_to_here`.
    """
    model = set(segment.leaves)
    readers = collections.Counter(
        v for eq in segment.equations for v in summed.intersection(eq.values)
    )
    for eq in segment.equations:
        args = [read(env, a) for a in eq.inputs]
        if eq.values and model.issuperset(eq.values):
            model.update(eq.outputs)

        def call(*args: Any, eq: Equation = eq) -> list[Any]:
            return compat.call_equation(eq.source, eq.name_stack, args)

        if eq.name == "cond" and not model.isdisjoint(eq.values):
            call = jax.checkpoint(call)
        env.update(zip(eq.outputs, call(*args)))
        for v in summed.intersection(eq.values):
            readers[v] -= 1
            if readers[v]:
                env[v] = _sum_up_to_here(env[v])


@jax.custom_vjp
def _sum_up_to_here(x: jax.Array) -> jax.Array:
    """Return x. In backward the cotangents of later readers are added up before others come.

    XLA makes one kernel of all sums otherwise, before which every reader's cotangent is alive.
    """
    return x


def _sum_up_to_here_forward(x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _sum_up_to_here_backward(_: None, ct: jax.Array) -> tuple[jax.Array]:
    return (lax.optimization_barrier(ct),)


_sum_up_to_here.defvjp(_sum_up_to_here_forward, _sum_up_to_here_backward)


def _shape(value: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype)
