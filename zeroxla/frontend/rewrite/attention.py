"""Rewrites attention that was found in a program."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from zeroxla.config.rewrite import Rewrite
from zeroxla.frontend.rewrite.attention_site import AttentionSite
from zeroxla.frontend.rewrite.block_attention import BlockAttention
from zeroxla.frontend.rewrite.causal_attention import CausalAttention
from zeroxla.frontend.rewrite.find_attention import find_attention
from zeroxla.frontend.rewrite.found import Replacement
from zeroxla.frontend.rewrite.masks import Masks, pairs_of
from zeroxla.frontend.rewrite.proof import Proof
from zeroxla.frontend.rewrite.report import Finding
from zeroxla.frontend.rewrite.runs_on import RunsOn
from zeroxla.frontend.rewrite.scope import TracedScope
from zeroxla.frontend.rewrite.small_attention import BLOCK, objection
from zeroxla.program.trace import Equation, Operand


def attention_in(
    scope: TracedScope, options: Rewrite, proof: Proof, times: int, runs_on: RunsOn
) -> tuple[Mapping[Equation, Replacement], set[Equation], list[Finding]]:
    """Return what runs in the place of attention in a program, the equations that no longer run,
    and what was found.

    Args:
      scope: the program.
      options: the sizes of blocks.
      proof: tries what is found on a small instance.
      times: how often the program runs.
      runs_on: what it runs on.
    """
    replaced: dict[Equation, Replacement] = {}
    findings: list[Finding] = []
    inside: set[Equation] = set()
    for eq in scope.program.equations:
        site = find_attention(scope, eq)
        if site is None:
            continue
        shape = eq.outputs[0].aval.str_short()
        if isinstance(site, AttentionSite):
            shape = site.softmax.scores.aval.str_short()
            made = _made(site, options, proof, runs_on)
            if not isinstance(made, str):
                replacement, words, note = made
                replaced[eq] = replacement
                inside |= {*site.inside, *site.calls()}
                findings.append(Finding.at("attention", eq, times, shape, words, note))
                continue
            site = made
        findings.append(Finding.at("attention", eq, times, shape, None, site))
    return replaced, inside, findings


def _made(
    site: AttentionSite, options: Rewrite, proof: Proof, runs_on: RunsOn
) -> tuple[Replacement, str, str] | str:
    """Return what runs in the place of attention, the same in words, and what is to be said of it;
    or why it stays."""
    block, masks = options.attention_block, Masks.of(site)
    longest = max(site.lengths.values())
    causal = CausalAttention.of(site, masks, block)
    pays = causal is not None and (longest > block or causal.may_be_one_kernel)
    if causal and pays and not objection(proof, "causal", site, partial(again, causal)):
        return _causal(causal), f"causal attention by blocks of {block}", ""
    if longest <= block:
        return f"it is not longer than a block of {block}"
    pairs = pairs_of(masks, block)
    if runs_on.split_axes:
        pairs = pairs.without_branch()
    made = BlockAttention(site=site, block=block, pairs=pairs, on_cpu=runs_on.cpus)
    against = objection(proof, "blocks", site, partial(again, made))
    if against is not None:
        return against
    return _by_blocks(made), f"attention by blocks of {block}", pairs.note()


def again(made: CausalAttention | BlockAttention, site: AttentionSite) -> Replacement:
    """Return what runs in the place of other attention, in the form of one that was made.

    Raises:
      ValueError: the other attention cannot have this form.
    """
    block, masks = BLOCK, Masks.of(site)
    if isinstance(made, BlockAttention):
        pairs = pairs_of(masks, block)
        return _by_blocks(BlockAttention(site=site, block=block, pairs=pairs, on_cpu=True))
    causal = CausalAttention.of(site, masks, block)
    if causal is None:
        raise ValueError("it is not causal")
    return _causal(causal)


def _causal(made: CausalAttention) -> Replacement:
    return _replacement(made, made.inputs)


def _by_blocks(made: BlockAttention) -> Replacement:
    scope = made.site.scope
    operands = [scope.visible(root.operand) for _, root in made.site.recipe.roots()]
    inputs = tuple(x for x in operands if x is not None)
    assert len(inputs) == len(operands), "attention with hidden operands is refused"
    return _replacement(made, inputs)


def _replacement(
    made: CausalAttention | BlockAttention, inputs: tuple[Operand, ...]
) -> Replacement:
    site = made.site
    return Replacement(
        inputs=inputs, outputs=site.last.outputs, run=lambda x: [site.finished(made(x))]
    )
