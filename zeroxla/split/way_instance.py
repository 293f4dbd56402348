"""A small instance of one equation and of one way to run it on an axis.

Every index of the equation is cut to a few elements, the split one to two for each part. The
equation runs on random operands, whole and in parts, with its derivative. The parts run under
`vmap`, whose axis stands for the mesh axis. So do the devices of other axes, over which the
equation may itself be a collective.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zeroxla.program.trace import Equation, Operand, Program, Value
from zeroxla.split.atoms import Atom, atoms_in
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.expert_rules import group_dims
from zeroxla.split.holdings import SUMMANDS, WHOLE, Holding
from zeroxla.split.run_parts import PartsRunner
from zeroxla.split.run_plan import PlanRunner
from zeroxla.split.split_axis import SplitAxis
from zeroxla.split.ways import AxisPlan, Way, paired

OTHERS = 3
"""The elements that indices are cut to which are not split."""

USUAL_ELEMENTS = 2**18
"""An instance of more elements is cut along every dim, also where its equation needs it whole."""

MOST_ELEMENTS = 2**24
"""The most elements of operands and results."""

Runs = Callable[[Sequence[jax.Array]], list[jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WayInstance:
    """Runs one way of one equation on a small instance, and the equation whole.

    Attributes:
      axis: the axis that is proved; it says the sizes of classes.
      way: the way.
      plan: the plan that consists of the way.
      targets: the positions of the operands to which a gradient flows.
      results: the positions of the results from which one flows.
      others: the lengths of other axes by name, over which the equation is a collective.
    """

    axis: SplitAxis
    way: Way
    plan: AxisPlan
    targets: tuple[int, ...]
    results: tuple[int, ...]
    others: Mapping[str, int]

    @staticmethod
    def options(
        eq: Equation, flow: DimsFlow, way: Way, parts: int, others: Mapping[str, int]
    ) -> list[WayInstance]:
        """Return instances of several sizes; the first that runs is the one to take. They have at
        most `MOST_ELEMENTS` elements.

        Args:
          eq: the equation.
          flow: the flow through the program that it is of.
          way: a way that runs the equation alone.
          parts: the length of the axis.
          others: as the attribute.
        """
        way, alone = dataclasses.replace(way, keeps=()), _alone(way)
        dims = DimsFlow(Program(alone.values, (alone,), alone.outputs), opened=flow.opened)
        dims.dims.update(zip(alone.values, map(flow.of_operand, eq.inputs), strict=True))
        dims.dims.update((v, flow.dims[v]) for v in eq.outputs)
        plan = AxisPlan(
            dims.program,
            dims,
            ((alone, way),),
            tuple((SUMMANDS if needs == (SUMMANDS,) else WHOLE,) for needs in way.needs),
            (WHOLE,) * len(alone.outputs),
            0.0,
        )
        axis = SplitAxis(parts=parts, name=_NAME, small=parts)
        flows = [isinstance(x, Value) and flow.has_gradient(x) for x in eq.inputs]
        one = WayInstance(
            axis=axis,
            way=way,
            plan=plan,
            targets=tuple(i for i, yes in enumerate(flows) if yes),
            results=tuple(i for i, v in enumerate(eq.outputs) if flow.has_gradient(v)),
            others=others,
        )
        found = [one._with(_sizes(way, plan, parts, every=every)) for every in (False, True)]
        if found[0].num_elements > USUAL_ELEMENTS:
            found.reverse()
        return [x for x in found if x.num_elements <= MOST_ELEMENTS]

    def _with(self, sizes: Mapping[Atom, int]) -> WayInstance:
        return dataclasses.replace(self, axis=dataclasses.replace(self.axis, sizes=sizes))

    @property
    def num_elements(self) -> int:
        """The number of elements of operands and results."""
        eq, flow, axis = _alone(self.way), self.way.flow, self._whole
        assert flow is not None
        arrays = [flow.dims[v] for v in (*eq.values, *eq.outputs)]
        num = sum(math.prod(map(axis.dim_size, dims)) for dims in arrays)
        return num * math.prod(self.others.values())

    def operands(self) -> list[np.ndarray]:
        """Return random operands, one of each for every device along the other axes."""
        draw, axis = np.random.default_rng(0), self._whole
        assert self.way.flow is not None
        eq, found = _alone(self.way), []
        for i, v in enumerate(eq.values):
            shape = tuple(map(axis.dim_size, self.way.flow.dims[v]))
            shape = (*self.others.values(), *shape)
            if v.is_float:
                found.append(_normal(draw, shape, v.aval.dtype))
            elif i == 2 and group_dims(eq) is not None:
                num_rows = found[0].shape[len(self.others)]
                sizes = _composition(num_rows - 1, shape[-1]).astype(v.aval.dtype)
                found.append(np.broadcast_to(sizes, shape))
            else:
                found.append(draw.integers(0, self._below(eq, i), shape).astype(v.aval.dtype))
        return found

    def whole(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the equation's results, and the gradients of its operands."""
        assert self.way.flow is not None
        run = partial(self._differentiated, PartsRunner(self.way.flow, self._whole), self._whole)
        return self._over_others(run)(list(operands))

    def in_parts(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the same as the way computes it, on each device, along a new first dim."""
        runner = PlanRunner(self.plan, self.axis, self._sizes_of_groups(operands))
        given = [h for (h,) in self.plan.inputs]
        run = partial(
            self._differentiated,
            lambda args: runner([{h: x} for h, x in zip(given, args, strict=True)]),
            self.axis,
        )
        held = [self._held(x, h) for x, h in zip(operands, given, strict=True)]
        return jax.vmap(self._over_others(run), axis_name=_NAME, axis_size=self.axis.parts)(held)

    def _sizes_of_groups(self, operands: Sequence[jax.Array]) -> dict[Operand, jax.Array]:
        """Return the sizes of groups of rows that are ragged: those of a product with a bank, or
        any, some of them empty."""
        eq, flow = _alone(self.way), self.way.flow
        assert flow is not None
        holdings = (*(h for (h,) in self.way.needs), *self.way.gives)
        found: dict[Operand, jax.Array] = {}
        for v, held in zip((*eq.values, *eq.outputs), holdings, strict=True):
            if held.sizes is not None and group_dims(eq) is not None:
                found[held.sizes] = jnp.asarray(operands[2])
            elif held.sizes is not None and held.dim is not None:
                num_rows = self._whole.dim_size(flow.dims[v][held.dim])
                found[held.sizes] = jnp.asarray(_composition(num_rows, self.axis.parts))
        return found

    @property
    def _whole(self) -> SplitAxis:
        return dataclasses.replace(self.axis, parts=1, name=None)

    def _below(self, eq: Equation, i: int) -> int:
        """Return the number below which an operand's integers are: they may be indices."""
        if eq.name != "gather" or i == 0:
            return 2
        assert self.way.flow is not None
        table = self.way.flow.dims[eq.values[0]]
        along = eq.params["dimension_numbers"].start_index_map
        return min((self._whole.dim_size(table[d]) for d in along), default=2)

    def _held(self, x: jax.Array, holding: Holding) -> jax.Array:
        """Return what each device has of an array that is whole, or a sum of summands."""
        shape = (self.axis.parts, *x.shape)
        if holding is WHOLE:
            return jnp.broadcast_to(x, shape)
        others = _normal(np.random.default_rng(1), shape, x.dtype)
        return jnp.asarray(others).at[0].set(x - others[1:].sum(0))

    def _over_others(self, run: Runs) -> Runs:
        for name, length in reversed(list(self.others.items())):
            run = jax.vmap(run, axis_name=name, axis_size=length)
        return run

    def _differentiated(
        self, run: Runs, axis: SplitAxis, operands: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Return the results of a function on an axis, and the gradients of its operands."""

        def of_targets(targets: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            given = list(operands)
            for i, x in zip(self.targets, targets, strict=True):
                given[i] = x
            found = run(given)
            return [found[i] for i in self.results], found

        if not self.targets or not self.results:
            return run(operands)
        of = [operands[i] for i in self.targets]
        _, pullback, found = jax.vjp(of_targets, of, has_aux=True)
        draw = np.random.default_rng(2)
        cts = [_normal(draw, found[i].shape, found[i].dtype) for i in self.results]
        for name in self.others:  # Each device along another axis has cotangents of its own.
            cts = [(ct * (1 + lax.axis_index(name))).astype(ct.dtype) for ct in cts]
        if axis.name is not None:  # JAX's vmap lacks some rules for what all devices share.
            cts = [(ct + 0 * lax.axis_index(axis.name)).astype(ct.dtype) for ct in cts]
        (grads,) = pullback(cts)
        return [*found, *grads]


_NAME = "the proved axis"


def _alone(way: Way) -> Equation:
    """Return the equation of a way, whose operands are values of its own."""
    assert way.flow is not None, "it has a body"
    (eq,) = way.flow.program.equations
    return eq


def _composition(total: int, num: int) -> np.ndarray:
    """Return random sizes of groups that add up to a total; some are 0."""
    draw = np.random.default_rng(3)
    return draw.multinomial(total, draw.dirichlet(np.full(num, 0.5)))


def _normal(draw: np.random.Generator, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    return np.asarray(draw.standard_normal(shape), dtype)


def _sizes(way: Way, plan: AxisPlan, parts: int, *, every: bool) -> dict[Atom, int]:
    """Return the small sizes of the equation's indices, and of the program's classes that they are.

    Args:
      way: the way.
      plan: the plan that consists of it.
      parts: the length of the axis.
      every: whether to cut also what the equation needs whole.
    """
    assert way.flow is not None
    atoms = dict.fromkeys(a for dim in way.flow.all_dims() for a in atoms_in(dim))
    small = {a: min(a.size, OTHERS) for a in atoms if not a.is_loop and (every or not a.blocked)}
    if (known := group_dims(_alone(way))) is not None:  # enough rows for several groups
        rows = way.flow.dims[_alone(way).values[0]][known[0]]
        small.update((a, min(a.size, 4 * parts)) for a in atoms_in(rows))
    if way.index is not None:
        small[way.index] = min(way.index.size, 2 * parts)
    pairs = _pairs(way, plan)
    while True:  # What is one class of the program has one size.
        classes: dict[Atom, int] = {}
        for _, atom in pairs:
            sizes = [small.get(a, a.size) for a, b in pairs if b is atom]
            own = way.index in [a for a, b in pairs if b is atom]
            natural = atom.size in sizes
            classes[atom] = atom.size if natural else max(sizes) if own else min(sizes)
        changed = [a for a, b in pairs if small.get(a, a.size) != classes[b]]
        for local, atom in pairs:
            small[local] = classes[atom]
        if not changed:
            return {**classes, **small}


def _pairs(way: Way, plan: AxisPlan) -> list[tuple[Atom, Atom]]:
    """Return the indices of the equation's split dims, each with the class that it is."""
    assert way.flow is not None
    eq, found = _alone(way), []
    holdings = (*(h for (h,) in way.needs), *way.gives)
    for v, holding in zip((*eq.values, *eq.outputs), holdings, strict=True):
        if holding.dim is not None:
            pairs = paired(way.flow.dims[v][holding.dim], plan.flow.dims[v][holding.dim])
            assert pairs is not None, (eq, holding)
            found += pairs
    return found
