"""What all islands of a run have in common. The coordinator refuses an island that differs."""

from __future__ import annotations

import dataclasses
import hashlib

import jax
import jax.numpy as jnp

from zeroxla.program.paths import leaf_path
from zeroxla.step.islands.local_rows import checksum_of
from zeroxla.step.islands.outer_state import IslandState
from zeroxla.step.step import Step


def facts_of(state: IslandState, step: Step) -> dict[str, str]:
    """Return what an island must have in common with the others, by name."""
    outer = step.config.outer
    assert outer is not None
    paths = jax.tree_util.tree_leaves_with_path(state.inner.params)
    own = ("optimizer", "state")  # The other options; each island may keep its state where it can.
    names = [f.name for f in dataclasses.fields(outer) if f.name not in own]
    vector = jnp.zeros(8)
    update = jax.make_jaxpr(outer.optimizer.update)(vector, outer.optimizer.init(vector), vector)
    facts = {
        "model": ", ".join(f"{leaf_path(path)} {x.shape}" for path, x in paths),
        "mesh": str(dict(step.mesh.shape)),
        "shards": str([(p.dim, p.stage_dim, p.axes) for p in state.inner.placements[0]]),
        "outer options": str({name: getattr(outer, name) for name in names}),
        "outer optimizer": str(update),
    }
    if not any(state.versions) and int(state.inner.step) == 0:  # All begin from the same ones.
        process = jax.process_index()
        name = "parameters" if process == 0 else f"parameters of process {process}"
        facts[name] = str([checksum_of(fragment.copy) for fragment in state.outer])
    return {name: _short(text) for name, text in facts.items()}


def _short(text: str) -> str:
    """Return a text, or its beginning and its hash if it is long."""
    if len(text) <= 200:
        return text
    return f"{text[:160]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"
