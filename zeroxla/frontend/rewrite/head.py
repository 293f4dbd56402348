"""Rewrites logits that were found in a program."""

from __future__ import annotations

from collections.abc import Mapping

from zeroxla.config.rewrite import Rewrite
from zeroxla.frontend.rewrite.chunked_head import ChunkedHead
from zeroxla.frontend.rewrite.cut_dims import block_shape
from zeroxla.frontend.rewrite.found import Replacement, Rewritten
from zeroxla.frontend.rewrite.head_site import POSITION, WORD, HeadSite, find_head
from zeroxla.frontend.rewrite.proof import Proof
from zeroxla.frontend.rewrite.report import Finding
from zeroxla.frontend.rewrite.scope import TracedScope
from zeroxla.program import compat
from zeroxla.program.trace import Equation, Program

POSITIONS, WORDS, CHUNK = 7, 16, 3
"""The numbers of a small instance."""


def heads_in(
    scope: TracedScope, options: Rewrite, proof: Proof, times: int
) -> tuple[Mapping[Equation, Replacement], set[Equation], list[Finding]]:
    """Return what runs in the place of logits in a program, the equations that no longer run, and
    what was found; see `attention.attention_in`."""
    replaced: dict[Equation, Replacement] = {}
    findings: list[Finding] = []
    taken: set[Equation] = set()
    for eq in scope.program.equations:
        site = find_head(scope, eq) if eq.name == "dot_general" and eq not in taken else None
        if site is None:
            continue
        shape, chunk = eq.outputs[0].aval.str_short(), options.loss_chunk
        words = None
        if isinstance(site, str):
            findings.append(Finding.at("loss", eq, times, shape, None, site))
            continue
        if site.lengths[POSITION] <= chunk:
            reason = f"it has no more positions than a chunk of {chunk}"
        else:
            reason = _objection(proof, site)
        if reason is None:
            replaced[site.inside[-1]] = _chunked(site, chunk)
            taken.update(site.inside)
            words = f"logits of {chunk} positions at a time"
        findings.append(Finding.at("loss", eq, times, shape, words, reason or ""))
    return replaced, taken, findings


def _chunked(site: HeadSite, chunk: int) -> Replacement:
    operands = [site.scope.visible(root.operand) for _, root in site.recipe.roots()]
    inputs = tuple(x for x in operands if x is not None)
    assert len(inputs) == len(operands), "logits with hidden operands are not found"
    outputs = tuple(v for v, _ in site.results)
    return Replacement(inputs=inputs, outputs=outputs, run=ChunkedHead(site=site, chunk=chunk))


def _objection(proof: Proof, site: HeadSite) -> str | None:
    """Return what speaks against chunks, from a small instance: a few positions and words, and all
    else whole."""
    window = {
        POSITION: (site.begin, min(POSITIONS, site.lengths[POSITION])),
        WORD: (0, min(WORDS, site.lengths[WORD])),
    }
    roots, recipe = site.recipe.roots(), site.recipe
    shapes = []
    for _, root in roots:
        aval = root.operand.aval  # pyright: ignore[reportAttributeAccessIssue]
        shape = block_shape(aval.shape, root.cuts, window)
        shapes.append(compat.array_type(shape, aval.dtype))

    def written(*arrays):
        given = {i: x for (i, _), x in zip(roots, arrays, strict=True)}
        return recipe.run(site.items, given, window)

    def rewrite(program: Program) -> Rewritten:
        scope = TracedScope(program)
        for eq in program.equations:
            may_be = eq.name == "dot_general" and len(eq.outputs[0].aval.shape) == len(site.cuts)
            found = find_head(scope, eq, site.cuts) if may_be else None
            if isinstance(found, HeadSite) and len(found.results) == len(site.results):
                return Rewritten.of(program, {found.inside[-1]: _chunked(found, CHUNK)}, {})
        raise ValueError("the small instance has no logits")

    return proof.objection("chunks", written, shapes, rewrite)
