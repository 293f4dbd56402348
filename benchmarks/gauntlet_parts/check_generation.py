"""Generation: every drawn token must be the likeliest one of a full pass of the reference."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import zeroxla
from gauntlet_parts.checks import Run
from gauntlet_parts.losses import VOCABULARY
from gauntlet_parts.outcome import NotApplicable, Wrong

NEW = 5
PROMPTS = ([5, 9, 31, 7, 44], [6], [17, 3, 80])
TIE = 1e-4
"""Tokens whose logits differ by less than this part of the logits' range count as equal."""


def generation(run: Run) -> str:
    """Generate on 2 x 2 devices, each with the whole model."""
    return generate(run, tensor=1)


def tensor(run: Run) -> str:
    """Generate with the model split over 2 devices."""
    return generate(run, tensor=2)


def generate(run: Run, *, tensor: int) -> str:
    """Generate greedily and compare with full passes."""
    if run.case.kind not in ("language model", "encoder-decoder"):
        raise NotApplicable("no language model")
    state = run.start()
    engine = zeroxla.HybridEngine(run.plain, tensor=tensor, max_length=run.built.context or 32)
    found = engine.generate(
        state, PROMPTS, key=jax.random.key(1), max_new_tokens=NEW, temperature=0.0
    )
    compare(run, np.asarray(found.tokens))
    split = sum(row.dim is not None for row in engine.plan.rows)
    leaves = len(engine.plan.rows)
    return "equal" if tensor == 1 else f"equal; {split} of {leaves} leaves split"


def compare(run: Run, drawn: np.ndarray) -> None:
    """Compare drawn tokens with the likeliest ones of full passes, prefix by prefix.

    Raises:
      Wrong: a token is not the likeliest.
    """
    reference = run.reference
    if reference.logits is None:
        raise Wrong("the model has no logits to compare with")
    call = jax.jit(reference.logits)
    for prompt, tokens in zip(PROMPTS, drawn, strict=True):
        for i, token in enumerate(tokens):
            prefix = np.asarray([*prompt, *tokens[:i]], np.int32)[None]
            logits: Any = np.asarray(call(reference.params, prefix)[0, -1], np.float64)
            gap = logits.max() - logits[token]
            if gap > TIE * (logits.max() - logits.min()):
                raise Wrong(
                    f"token {i} after the prompt {prompt} is {token}, and the likeliest is "
                    f"{logits.argmax()} (logits {logits[token]:.4f} and {logits.max():.4f})"
                )


assert max(max(prompt) for prompt in PROMPTS) < VOCABULARY
