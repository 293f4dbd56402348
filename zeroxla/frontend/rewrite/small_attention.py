"""A small instance of attention that was found: a few queries and keys, and all else whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from zeroxla.frontend.rewrite.attention_site import KEY, LABELS, QUERY, AttentionSite
from zeroxla.frontend.rewrite.cut_dims import block_shape
from zeroxla.frontend.rewrite.find_attention import find_attention
from zeroxla.frontend.rewrite.found import Replacement, Rewritten
from zeroxla.frontend.rewrite.proof import Proof
from zeroxla.frontend.rewrite.recipe import Recipe
from zeroxla.frontend.rewrite.result_cuts import result_cuts
from zeroxla.frontend.rewrite.scope import TracedScope
from zeroxla.program import compat
from zeroxla.program.trace import Program

QUERIES, OTHER_KEYS = 8, 11
"""The numbers of queries and of keys, if there are not as many of both."""

BLOCK = 3
"""The block of the small instance."""


def objection(
    proof: Proof, name: str, site: AttentionSite, again: Callable[[AttentionSite], Replacement]
) -> str | None:
    """Return what speaks against what runs in the place of attention; see `Proof.objection`.

    Args:
      proof: runs small instances.
      name: the name of the form that it has.
      site: the attention.
      again: returns what runs in the place of other attention, in the same form. It raises
        ValueError if that cannot be.
    """
    lengths = dict(site.lengths)
    same = lengths[QUERY] == lengths[KEY]
    window = {
        QUERY: (0, min(QUERIES, lengths[QUERY])),
        KEY: (0, min(QUERIES if same else OTHER_KEYS, lengths[KEY])),
    }
    known = {site.softmax.scores: site.own_cuts, site.softmax.result: site.own_cuts}
    inner = {*site.inside, *site.shifts()}
    recipe = Recipe(site.scope, LABELS, inner=inner, known=known)
    # The probabilities come first: by them the recipe knows which dim the product sums over.
    recipe.add(site.eq.inputs[site.side], site.cuts)
    of_results = {site.eq.outputs[0]: site.result_cuts}
    for eq in site.after:
        found = result_cuts(eq, of_results, LABELS)
        if found is None:
            return f"`{eq.name}` after the product with values has no rule for some queries"
        of_results[eq.outputs[0]] = found
    value = site.last.outputs[0]
    result = recipe.add(value, of_results[value])
    roots = recipe.roots()
    shapes = [_shape(root, window) for _, root in roots]

    def written(*arrays: jax.Array) -> jax.Array:
        given = {i: x for (i, _), x in zip(roots, arrays, strict=True)}
        return recipe.run([result], given, window)[0]

    def rewrite(program: Program) -> Rewritten:
        scope = TracedScope(program)
        for eq in program.equations:
            found = find_attention(scope, eq)
            if isinstance(found, AttentionSite):
                return Rewritten.of(program, {eq: again(found)}, {})
        raise ValueError("the small instance has no attention")

    return proof.objection(name, written, shapes, rewrite)


def _shape(root: Any, window: Any) -> Any:
    aval = root.operand.aval
    return compat.array_type(block_shape(aval.shape, root.cuts, window), aval.dtype)
