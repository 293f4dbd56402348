"""`OwnedGroup`: pieces that do the same with matrices of one shape, and who owns which of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zeroxla.mesh.axes import PIPE, axes_size, leaf_axes
from zeroxla.mesh.placement import Placement
from zeroxla.program.flops import flops_of
from zeroxla.program.likeness import likeness_of_run
from zeroxla.program.trace import Constant, Value
from zeroxla.step.owners.layers import Layers, layers_of, program_of
from zeroxla.step.owners.matrix_pieces import MatrixPiece
from zeroxla.step.owners.spread import placed_anew


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnedGroup:
    """Pieces that do the same with matrices of one shape.

    A matrix is what one owner computes at a time: a piece, or one of its layers. Matrices are
    numbered piece by piece. In a pipeline each stage numbers its own layers.

    Attributes:
      pieces: the pieces.
      layers: how they are cut into layers; None if they are not.
      reads, results: the placements of what a piece reads and makes, by position; None for what
        all devices have whole.
      axes: the axes over which these are split, and over which the owners lie.
      num_stages: the number of stages that have layers of their own; 1 if all have the same.
    """

    pieces: tuple[MatrixPiece, ...]
    layers: Layers | None
    reads: tuple[Placement | None, ...]
    results: tuple[Placement | None, ...]
    axes: tuple[str, ...]
    num_stages: int

    @property
    def piece(self) -> MatrixPiece:
        """The first piece; the others do the same."""
        return self.pieces[0]

    @property
    def layers_here(self) -> int:
        """The number of a piece's matrices, on one stage."""
        return 1 if self.layers is None else self.layers.length // self.num_stages

    @property
    def num_matrices(self) -> int:
        """The number of matrices, on one stage."""
        return len(self.pieces) * self.layers_here

    @property
    def flops(self) -> float:
        """The FLOPs of one matrix."""
        whole = sum(map(flops_of, self.piece.equations))
        return whole / (1 if self.layers is None else self.layers.length)

    def shape_of(self, k: int, *, result: bool) -> tuple[int, ...]:
        """Return the shape of a value that one matrix' computation reads or makes."""
        values = self.piece.results if result else self.piece.reads
        shape = list(values[k].aval.shape)
        if self.layers is not None:
            dim = (self.layers.results if result else self.layers.reads)[k]
            if dim is not None:
                shape[dim] = 1
        return tuple(shape)

    def run(self, args: Sequence[jax.Array], layer: jax.Array) -> list[jax.Array]:
        """Compute one matrix; see `Layers.run`."""
        if self.layers is None:
            return program_of(self.piece)(*args)
        return self.layers.run(args, layer)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OwnersShare:
    """Who owns the matrices of a group.

    Owner i has the matrices i * each, ..., (i + 1) * each - 1, and `rest[i]` besides.

    Attributes:
      each: the number of matrices that every owner has.
      rest: the numbers of the other matrices, by owner.
    """

    each: int
    rest: tuple[tuple[int, ...], ...]


def shares_of(groups: Sequence[OwnedGroup], num_owners: int) -> tuple[list[OwnersShare], float]:
    """Give each matrix an owner, so that the busiest one has few FLOPs.

    What is left of a group once all owners have the same number goes to the owner with the least to
    do, the matrices with the most FLOPs first. If it helps by more than 2 %, all owners have one
    matrix of each group less in common, and more is left.

    Returns:
      The share of each group, and the FLOPs of the busiest owner.
    """
    fewer, even = (_shares(groups, num_owners, held_back) for held_back in (1, 0))
    return fewer if fewer[1] < 0.98 * even[1] else even


def _shares(
    groups: Sequence[OwnedGroup], num_owners: int, held_back: int
) -> tuple[list[OwnersShare], float]:
    """Return the shares if all owners have `held_back` matrices less in common than they could."""
    each = [max(0, group.num_matrices // num_owners - held_back) for group in groups]
    loads = [0.0] * num_owners
    rest: list[list[list[int]]] = [[[] for _ in range(num_owners)] for _ in groups]
    flops = [group.flops for group in groups]
    for g in sorted(range(len(groups)), key=lambda g: -flops[g]):
        for matrix in range(each[g] * num_owners, groups[g].num_matrices):
            owner = loads.index(min(loads))
            loads[owner] += flops[g]
            rest[g][owner].append(matrix)
    shares = [
        OwnersShare(each=num, rest=tuple(map(tuple, mine)))
        for num, mine in zip(each, rest, strict=True)
    ]
    whole = sum(share.each * n for share, n in zip(shares, flops, strict=True))
    return shares, whole + max(loads)


def group_of(
    piece: MatrixPiece, placed: Mapping[Value, Placement], mesh: Mesh
) -> OwnedGroup | None:
    """Return a group of one piece; None if no device needs more of it than the part that it has.

    That holds if all that the piece reads is split along a batch dim, or not split. A piece that
    makes PRNG keys has none either: they do not travel.
    """
    if any(map(_is_key, piece.results)):
        return None
    whole = [Placement(shape=tuple(v.aval.shape)) for v in piece.reads]
    pairs = zip(piece.reads, whole, strict=True)
    reads = [p if _is_key(v) else placed[v] for v, p in pairs]
    if all(p.dim is None for p in reads):
        return None
    found = layers_of(piece)
    split = [k for k, p in enumerate(reads) if p.dim is not None]
    if any(all(layers.reads[k] == reads[k].dim for k in split) for layers in found):
        return None
    layers = next((x for x in found if _all_have(x, reads)), None)
    own = (None,) * len(piece.reads) if layers is None else layers.reads
    made = (None,) * len(piece.results) if layers is None else layers.results
    inputs = [_placed(p, d, mesh) for p, d in zip(reads, own, strict=True)]
    outputs = [_placed(placed[v], d, mesh) for v, d in zip(piece.results, made, strict=True)]
    by_stage = {p.stage_dim is not None for p in (*inputs, *outputs) if p.dim is not None}
    if len(by_stage) > 1:  # Not all have their layers on the stages: all devices share all.
        inputs = [_anew(p, d, mesh) for p, d in zip(inputs, own, strict=True)]
        outputs = [_anew(p, d, mesh) for p, d in zip(outputs, made, strict=True)]
    staged = by_stage == {True}
    return OwnedGroup(
        pieces=(piece,),
        layers=layers,
        reads=tuple(None if p.dim is None else p for p in inputs),
        results=tuple(None if p.dim is None else p for p in outputs),
        axes=tuple(a for a in leaf_axes(mesh) if not (staged and a == PIPE)),
        num_stages=mesh.shape[PIPE] if staged else 1,
    )


def _all_have(layers: Layers, reads: Sequence[Placement]) -> bool:
    """Return whether all split arrays have layers, and are not split along them."""
    pairs = zip(layers.reads, reads, strict=True)
    return all(d is not None and d != p.dim for d, p in pairs if p.dim is not None)


def _placed(placement: Placement, layer_dim: int | None, mesh: Mesh) -> Placement:
    """Return a placement that leaves the layers whole, and has them on their stages if at all."""
    if placement.dim is None:
        return placement
    if placement.dim == layer_dim or placement.stage_dim not in (None, layer_dim):
        return _anew(placement, layer_dim, mesh)
    return placement


def _anew(placement: Placement, layer_dim: int | None, mesh: Mesh) -> Placement:
    if placement.dim is None:
        return placement
    return placed_anew(placement.shape, mesh, () if layer_dim is None else (layer_dim,))


def joined_groups(groups: Sequence[OwnedGroup]) -> list[OwnedGroup]:
    """Join the groups that do the same with matrices of the same shapes and placements."""
    found: dict[Hashable, list[OwnedGroup]] = {}
    for group in groups:
        piece = group.piece
        likeness = likeness_of_run(piece.equations, piece.reads, piece.results)
        key = likeness, group.reads, group.results, group.axes
        found.setdefault(key, []).append(group)
    return [
        dataclasses.replace(same[0], pieces=tuple(g.piece for g in same)) for same in found.values()
    ]


def num_owners(group: OwnedGroup, mesh: Mesh) -> int:
    """Return the number of devices among which a group's matrices are shared."""
    return axes_size(mesh, group.axes)


def _is_key(operand: Value | Constant) -> bool:
    """Return whether an operand is an array of PRNG keys."""
    array = operand.aval if isinstance(operand, Value) else operand.value
    return jnp.issubdtype(jax.dtypes.result_type(array), jax.dtypes.extended)
