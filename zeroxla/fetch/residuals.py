"""Backward of a segment that keeps no leaf: residuals that depend on leaves alone are computed
again from leaves that are gathered again, and the other residuals are kept.

`jax.vjp` of a segment is traced into one program, from (leaves, inputs) to (outputs, residuals),
and each residual is traced back in it. A residual that depends on leaves and constants alone (a
leaf, its cast, its transpose) is recomputed in backward. A residual that is an input of the segment
is kept by reference. The others, which are activations, are saved. So each value is saved once, and
only casts and layouts of leaves are computed twice. It is also known exactly which leaves backward
reads: no bias, no embedding table.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from zeroxla.fetch.barriers import with_barriers
from zeroxla.fetch.segments import Straight
from zeroxla.program import compat
from zeroxla.program.trace import Equation, Operand, Program, Value, closure, flatten, read, run


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Linearized:
    """A segment's forward and backward, and the values that backward reads.

    Attributes:
      leaves: the leaves that backward gathers.
      references: the segment's inputs that backward reads.
      outputs: the segment's outputs that have a gradient.
      targets: the leaves and inputs that get a gradient.
      saved: the values, of the traced program, that forward keeps for backward.
    """

    leaves: tuple[Value, ...]
    references: tuple[Value, ...]
    outputs: tuple[Value, ...]
    targets: tuple[Value, ...]
    saved: tuple[Value, ...]

    _forward: Callable[..., list[jax.Array]]
    _evaluate: Callable[..., list[jax.Array]]
    _inputs: dict[Value, Value]  # the segment's value -> its stand-in in the traced program
    _recompute: tuple[Equation, ...]
    _residuals: tuple[Operand, ...]
    _pullback: Any

    def forward(self, args: Sequence[jax.Array]) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        """Return the segment's outputs, and the values saved for backward.

        Args:
          args: the segment's leaves and then its inputs.
        """
        results = self._forward(*args)
        num_outputs = len(results) - len(self.saved)
        return results[:num_outputs], tuple(results[num_outputs:])

    def evaluate(self, args: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the segment's outputs without a derivative: no custom rule runs."""
        return self._evaluate(*args)

    def backward(
        self,
        leaves: Mapping[Value, jax.Array],
        references: Mapping[Value, jax.Array],
        saved: Sequence[jax.Array],
        cotangents: Sequence[jax.Array],
    ) -> dict[Value, jax.Array]:
        """Return the cotangent of each of `targets`.

        Args:
          leaves: the gathered leaves, whole.
          references: the inputs that backward reads.
          saved: the values that forward saved.
          cotangents: the cotangents of `outputs`.
        """
        env = {self._inputs[v]: leaves[v] for v in self.leaves}
        env.update((self._inputs[v], references[v]) for v in self.references)
        env.update(zip(self.saved, saved, strict=True))
        run(self._recompute, env)
        pullback = jax.tree.unflatten(self._pullback, [read(env, a) for a in self._residuals])
        (cotangents,) = pullback(list(cotangents))
        return dict(zip(self.targets, cotangents, strict=True))


def linearize(
    segment: Straight,
    active: Iterable[Value],
    constants: Iterable[Value],
    summed: Iterable[Value],
) -> Linearized:
    """Trace the forward and backward of a segment.

    Args:
      segment: the segment to differentiate.
      active: the values that have a gradient.
      constants: the inputs from which a residual may be recomputed, as from a leaf.
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
    residuals = program.outputs[num_outputs:]
    free = {stand_ins[v] for v in everything if v in segment.leaves or v in constants}
    recomputed, roots = _recomputable(program, residuals, free)
    by_reference = {v for v in residuals if v in program.inputs}.union(roots)
    saved = tuple(
        dict.fromkeys(
            v
            for v in residuals
            if isinstance(v, Value) and v not in by_reference and v not in recomputed
        )
    )
    order = dict(zip((*outputs, *passive), program.outputs[:num_outputs], strict=True))
    forward = Program(
        tuple(stand_ins[v] for v in everything),
        program.equations,
        (*(order[v] for v in segment.outputs), *saved),
    )
    evaluate = Program(everything, segment.equations, segment.outputs)
    return Linearized(
        leaves=tuple(v for v in segment.leaves if stand_ins[v] in by_reference),
        references=tuple(v for v in segment.inputs if stand_ins[v] in by_reference),
        outputs=outputs,
        targets=targets,
        saved=saved,
        _forward=with_barriers(forward, [stand_ins[v] for v in segment.leaves]),
        _evaluate=with_barriers(evaluate, segment.leaves),
        _inputs=stand_ins,
        _recompute=tuple(dict.fromkeys(recomputed.values())),
        _residuals=residuals,
        _pullback=pullback_tree,
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


def _recomputable(
    program: Program, residuals: Iterable[Operand], roots: set[Value]
) -> tuple[dict[Value, Equation], list[Value]]:
    """Return the equations that compute residuals from `roots` alone, and the roots that they read.

    The equations are in order, each under the values that it makes.
    """
    known = set(roots)
    producers: dict[Value, Equation] = {}
    for eq in program.equations:
        if not eq.is_pinned and known.issuperset(eq.values):
            known.update(eq.outputs)
            producers.update((v, eq) for v in eq.outputs)
    wanted = [v for v in residuals if isinstance(v, Value) and v in producers]
    equations, used = closure(wanted, producers)
    return {v: eq for eq in equations for v in eq.outputs}, used


def _shape(value: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype)
