"""Generation: every drawn token must be the likeliest one of a full pass of the reference."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import zeroxla
from gauntlet_parts.losses import VOCABULARY
from gauntlet_parts.model_run import Run
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

    def drawn(**options: Any) -> tuple[zeroxla.HybridEngine, Any]:
        context = run.built.context or 32
        engine = zeroxla.HybridEngine(run.plain, tensor=tensor, max_length=context, **options)
        key, options = jax.random.key(1), {"max_new_tokens": NEW, "temperature": 0.0}
        return engine, engine.generate(state, PROMPTS, key=key, **options).tokens

    how, logits = "equal", run.built.logits
    try:
        engine, tokens = drawn()
    except ValueError as error:
        if "pass call=" not in str(error) or run.case.kind != "language model" or logits is None:
            raise
        engine, tokens = drawn(call=lambda model, tokens, **_: logits(model, tokens))
        how = "equal, with call="
    compare(run, np.asarray(tokens))
    if tensor == 1:
        return how
    plan = engine.plan
    split = sum(row.dim is not None for row in plan.rows)
    share = plan.num_elements * tensor / plan.num_parameters
    return f"{how}; {split} of {len(plan.rows)} leaves split; {share:.2f} of 1/{tensor} a device"


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
