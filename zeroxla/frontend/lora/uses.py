"""Reads from a model's trace which leaves are dense, and along which dims.

A leaf W is dense if the model only ever computes x . W with it: a `dot_general` with an activation,
without batch dims, that contracts the same dims at every use. The leaf may be cast, copied or
transposed on the way, sliced by loops, and used inside a `jax.checkpoint`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from zeroxla.program.primitives import CASTS, REMATS
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Program, Value, flatten


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DenseLeaf:
    """A dense leaf.

    Attributes:
      shape: the leaf's shape.
      layer_dims: the dims along which loops slice it, the outermost loop's first.
      contracted: the dims that a product sums over, in order.
    """

    shape: tuple[int, ...]
    layer_dims: tuple[int, ...]
    contracted: tuple[int, ...]

    @property
    def others(self) -> tuple[int, ...]:
        """The dims of the product's result, in order."""
        taken = {*self.layer_dims, *self.contracted}
        return tuple(d for d in range(len(self.shape)) if d not in taken)

    def sizes(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Return the lengths of these dims."""
        return tuple(self.shape[d] for d in dims)


@dataclasses.dataclass(frozen=True, slots=True)
class _LeafSlice:
    """A leaf or a slice of it, perhaps transposed.

    Attributes:
      leaf: the leaf.
      dims: the leaf's dims that are left, in the order of the slice.
      layer_dims: the leaf's dims that loops have sliced, the outermost loop's first.
    """

    leaf: Value
    dims: tuple[int, ...]
    layer_dims: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class LeafUses:
    """The uses of a leaf in a program.

    Attributes:
      products: the products with the leaf; each as the dense leaf that it alone would make.
      obstacles: the reasons, in words, why the leaf is not dense.
    """

    products: list[DenseLeaf]
    obstacles: list[str]

    def dense(self) -> DenseLeaf | None:
        """Return the leaf if it is dense."""
        return None if self.obstacle() else self.products[0]

    def obstacle(self) -> str | None:
        """Return why the leaf is not dense; None if it is."""
        if self.obstacles:
            return self.obstacles[0]
        if not self.products:
            return "the loss does not use it"
        if len(set(self.products)) > 1:
            return "its products do not all contract the same dims"
        return None


def find_uses(program: Program, leaves: Sequence[Value]) -> list[LeafUses]:
    """Return the uses of each of the inputs `leaves` in a program."""
    found = {leaf: LeafUses([], []) for leaf in leaves}
    slices = {leaf: _LeafSlice(leaf, tuple(range(len(leaf.aval.shape)))) for leaf in leaves}
    _walk(program, slices, found)
    return list(found.values())


def _walk(
    program: Program, slices: dict[Value, _LeafSlice], found: Mapping[Value, LeafUses]
) -> None:
    """Record the uses in a program; `slices` are the values that are leaves or slices of leaves."""
    for eq in program.equations:
        mine = {i: slices[a] for i, a in enumerate(eq.inputs) if a in slices}
        if not mine:
            continue
        if eq.name in CASTS and eq.outputs[0].is_float:
            slices[eq.outputs[0]] = mine[0]
        elif eq.name == "transpose":
            dims = tuple(mine[0].dims[d] for d in eq.params["permutation"])
            slices[eq.outputs[0]] = dataclasses.replace(mine[0], dims=dims)
        elif eq.name == "dot_general":
            _product(eq, mine, found)
        elif eq.name == "scan":
            _loop(eq, mine, found)
        elif eq.name in REMATS:
            body = flatten(eq.params["jaxpr"])
            _walk(body, {body.inputs[i]: leaf_slice for i, leaf_slice in mine.items()}, found)
        else:
            for leaf_slice in mine.values():
                found[leaf_slice.leaf].obstacles.append(f"the loss passes it to `{eq.name}`")
    for operand in program.outputs:
        if operand in slices:
            found[slices[operand].leaf].obstacles.append("it is a result")


def _product(eq: Equation, mine: Mapping[int, _LeafSlice], found: Mapping[Value, LeafUses]) -> None:
    """Record a product, or why it keeps the leaf from being dense."""
    contracting, batch = eq.params["dimension_numbers"]
    for side, leaf_slice in mine.items():
        obstacles = found[leaf_slice.leaf].obstacles
        contracted = tuple(sorted(leaf_slice.dims[d] for d in contracting[side]))
        if len(mine) > 1:
            obstacles.append("it is multiplied by a leaf")
        elif batch[side]:
            obstacles.append("its product has batch dims, as those of experts have")
        elif not 0 < len(contracted) < len(leaf_slice.dims):
            obstacles.append("its product sums over all of its dims, or none")
        else:
            product = DenseLeaf(
                shape=leaf_slice.leaf.aval.shape,
                layer_dims=leaf_slice.layer_dims,
                contracted=contracted,
            )
            found[leaf_slice.leaf].products.append(product)


def _loop(eq: Equation, mine: Mapping[int, _LeafSlice], found: Mapping[Value, LeafUses]) -> None:
    """Record the uses in a loop's body."""
    scan = Scan(eq)
    body = scan.body()
    inside: dict[Value, _LeafSlice] = {}
    for i, leaf_slice in mine.items():
        if i < scan.num_consts:
            inside[body.inputs[i]] = leaf_slice
        elif i < scan.first_x:
            found[leaf_slice.leaf].obstacles.append("a loop carries it")
        else:
            first, *rest = leaf_slice.dims
            layer_dims = (*leaf_slice.layer_dims, first)
            inside[body.inputs[i]] = _LeafSlice(leaf_slice.leaf, tuple(rest), layer_dims)
    _walk(body, inside, found)
