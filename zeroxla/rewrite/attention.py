"""Rewrites attention that was found in a program."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from zeroxla.config.rewrite import Rewrite
from zeroxla.program.trace import Equation
from zeroxla.rewrite.attention_site import AttentionSite, find_attention
from zeroxla.rewrite.block_attention import BlockAttention
from zeroxla.rewrite.causal_attention import CausalAttention
from zeroxla.rewrite.found import Replacement
from zeroxla.rewrite.masks import Masks, pairs_of
from zeroxla.rewrite.proof import Proof
from zeroxla.rewrite.report import Finding
from zeroxla.rewrite.scope import Scope
from zeroxla.rewrite.small_attention import BLOCK, holds


def attention_in(
    scope: Scope, options: Rewrite, proof: Proof, times: int
) -> tuple[Mapping[Equation, Replacement], set[Equation], list[Finding]]:
    """Return what runs in the place of attention in a program, the equations that no longer run,
    and what was found.

    Args:
      scope: the program.
      options: the sizes of blocks.
      proof: tries what is found on a small instance.
      times: how often the program runs.
    """
    replaced: dict[Equation, Replacement] = {}
    findings: list[Finding] = []
    inside: set[Equation] = set()
    for eq in scope.program.equations:
        site = find_attention(scope, eq) if eq.name == "dot_general" else None
        if site is None:
            continue
        shape = eq.inputs[0].aval.str_short()
        if isinstance(site, AttentionSite):
            shape = site.softmax.scores.aval.str_short()
            made = _made(site, options, proof)
            if not isinstance(made, str):
                replacement, words = made
                replaced[eq] = replacement
                inside |= {*site.inside, *site.calls()}
                findings.append(Finding.at("attention", eq, times, shape, words))
                continue
            site = made
        findings.append(Finding.at("attention", eq, times, shape, None, site))
    return replaced, inside, findings


def _made(
    site: AttentionSite, options: Rewrite, proof: Proof
) -> tuple[Replacement, str] | str:
    """Return what runs in the place of attention, and in words; or why it stays."""
    block, masks = options.attention_block, Masks.of(site)
    longest = max(site.lengths.values())
    causal = CausalAttention.of(site, masks, block)
    if causal is not None and (longest > block or causal.may_be_one_kernel):
        if holds(proof, "causal", site, partial(again, causal)):
            return _causal(causal), f"causal attention by blocks of {block}"
    if longest <= block:
        return f"it is not longer than a block of {block}"
    made = BlockAttention(site=site, block=block, pairs=pairs_of(masks, block))
    if not holds(proof, "blocks", site, partial(again, made)):
        return "a small instance computed something else by blocks"
    return _by_blocks(made), f"attention by blocks of {block}"


def again(made: CausalAttention | BlockAttention, site: AttentionSite) -> Replacement:
    """Return what runs in the place of other attention, in the form of one that was made.

    Raises:
      ValueError: the other attention cannot have this form.
    """
    block, masks = BLOCK, Masks.of(site)
    if isinstance(made, BlockAttention):
        return _by_blocks(BlockAttention(site=site, block=block, pairs=pairs_of(masks, block)))
    causal = CausalAttention.of(site, masks, block)
    if causal is None:
        raise ValueError("it is not causal")
    return _causal(causal)


def _causal(made: CausalAttention) -> Replacement:
    return Replacement(inputs=made.inputs, outputs=made.site.eq.outputs, run=lambda x: [made(x)])


def _by_blocks(made: BlockAttention) -> Replacement:
    scope = made.site.scope
    operands = [scope.visible(root.operand) for _, root in made.site.recipe.roots()]
    inputs = tuple(x for x in operands if x is not None)
    assert len(inputs) == len(operands), "attention with hidden operands is refused"
    return Replacement(inputs=inputs, outputs=made.site.eq.outputs, run=lambda x: [made(x)])
