"""Joins dims that an equation makes one, and takes dims apart: into factors and into pieces."""

from __future__ import annotations

import math

from zeroxla.split.atoms import (
    Atom,
    Dim,
    atoms_in,
    block,
    dim_in_pieces,
    dim_of,
    expand,
    pieces_of,
    size_of,
)

MOST_PIECES = 16
"""How often the same dim is cut. One that is cut more often stays whole."""


def join(a: Dim, b: Dim, why: str) -> None:
    """Make two dims one.

    If one dim has an atom of 12 where the other has 3 x 4, the 12 is refined. If neither fits into
    the other (6 x 2 and 4 x 3, after the common 2), the rest of both is blocked, with the reason
    `why`. Where one has pieces, the other is cut alike.
    """
    assert size_of(expand(a)) == size_of(expand(b)), (a, b)
    first, second = list(expand(a)), list(expand(b))
    while first and second:
        x, y = first[0].root, second[0].root
        common = math.gcd(x.size, y.size)
        if x is y:
            del first[0], second[0]
        elif pieces_of(x) or pieces_of(y):
            cut, other = (first, second) if pieces_of(x) else (second, first)
            if not _join_pieces(cut, other, why):
                block((*first, *second), why)
                return
        elif common == 1:
            block((*first, *second), why)
            return
        elif x.size == y.size:
            _unite(x, y)
            del first[0], second[0]
        else:
            longer = x if x.size != common else y
            if longer.chosen:
                block((*first, *second), why)
                return
            refine(longer, common)
        # The same atom may stand in both dims, and again further on.
        first[:], second[:] = expand(tuple(first)), expand(tuple(second))


def refine(atom: Atom, outer: int) -> None:
    """Take a root of one piece apart into an atom of size `outer` and one for the rest."""
    if atom.chosen:
        block((atom,), "it is taken apart")
        return
    parts = Atom(outer), Atom(atom.size // outer)
    for part in parts:
        part.note(atom)
        part.depth = atom.depth
    atom._factors = parts


def cut(dim: Dim, at: int) -> tuple[Dim, Dim] | None:
    """Cut a dim into two pieces, one of `at` elements and one of the rest.

    Returns None if it cannot be cut there without losing what is known of it.
    """
    whole = expand(dim)
    if len(whole) == 1:
        pieces = pieces_of(whole[0])
        return _cut_between(pieces, at) if pieces else _cut_atom(whole[0], at)
    # The product is seen as several equal pieces.
    run = math.gcd(size_of(whole), at)
    num = size_of(whole) // run
    if run == 1 or num > MOST_PIECES:
        return None
    inner = dim_of(run)
    _join_runs((inner,) * num, whole, "a slice cuts it")
    inner = expand(inner)
    return dim_in_pieces([inner] * (at // run)), dim_in_pieces([inner] * (num - at // run))


def _cut_between(pieces: tuple[Dim, ...], at: int) -> tuple[Dim, Dim] | None:
    """Cut a dim that has pieces, between two of them or through one."""
    for i, piece in enumerate(pieces):
        size = size_of(piece)
        if at == 0:
            return dim_in_pieces(pieces[:i]), dim_in_pieces(pieces[i:])
        if at < size:
            if (parts := cut(piece, at)) is None:
                return None
            before, after = parts
            return dim_in_pieces([*pieces[:i], before]), dim_in_pieces([after, *pieces[i + 1 :]])
        at -= size
    return None


def _cut_atom(atom: Atom, at: int) -> tuple[Dim, Dim] | None:
    if atom.chosen or atom.blocked or atom.is_table or atom.is_loop or atom.depth >= MOST_PIECES:
        return None
    parts = dim_of(at), dim_of(atom.size - at)
    for part in (a for piece in parts for a in piece):
        part.note(atom)
        part.depth = atom.depth + 1
    atom._pieces = parts
    return parts


def _join_pieces(cut: list[Atom], other: list[Atom], why: str) -> bool:
    """Join the first atom of a dim, which has pieces, with as much of another; drop both.

    Returns False if they do not fit.
    """
    x, num = cut[0].root, 0
    while size_of(tuple(other[:num])) < x.size:
        y, (wanted, rest) = other[num].root, divmod(x.size, size_of(tuple(other[:num])))
        if rest == 0 and y.size > wanted and y.size % wanted == 0 and not pieces_of(y):
            if y.chosen:
                return False
            refine(y, wanted)
            other[:] = expand(tuple(other))
        num += 1
    group = tuple(other[:num])
    if size_of(group) != x.size:
        return False
    del cut[0], other[:num]
    if len(group) != 1:
        return _join_runs(pieces_of(x), group, why)
    y = group[0]
    return _align(list(pieces_of(x)), list(pieces_of(y)), why) if pieces_of(y) else _become(y, x)


def _join_runs(pieces: tuple[Dim, ...], product: Dim, why: str) -> bool:
    """Join equal pieces with a product, which has them as its inner part."""
    sizes = {size_of(piece) for piece in pieces}
    if len(sizes) > 1:
        for piece in (*pieces, product):
            block(piece, why)
        return True
    outer, inner = dim_of(len(pieces)), dim_of(sizes.pop())
    join(product, (*outer, *inner), why)
    block(outer, "a slice takes one of its parts")
    for piece in pieces:
        join(piece, inner, why)
    return True


def _align(first: list[Dim], second: list[Dim], why: str) -> bool:
    """Join two dims of the same size that have pieces; cut both where one has a boundary."""
    while first and second:
        a, b = size_of(first[0]), size_of(second[0])
        if a == b:
            join(first.pop(0), second.pop(0), why)
            continue
        longer = first if a > b else second
        if (parts := cut(longer[0], min(a, b))) is None:
            for piece in (*first, *second):
                block(piece, why)
            break
        longer[:1] = parts
    return True


def _become(atom: Atom, pieced: Atom) -> bool:
    """Join an atom of one piece with one of the same size that has pieces."""
    if atom.chosen or atom.is_table or atom.is_loop:
        return False
    for inner in atoms_in((pieced,)):
        inner.note(atom)
    atom._parent = pieced
    return True


def _unite(a: Atom, b: Atom) -> None:
    """Join two roots of the same size, each of one piece."""
    if a is not b:
        b._parent = a
        a.note(b)
        a.chosen = a.chosen or b.chosen
        a.depth = max(a.depth, b.depth)
