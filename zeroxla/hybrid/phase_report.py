"""Computes a `PhaseReport` of a step and its engine, from shapes."""

from __future__ import annotations

from typing import Any

import jax

from zeroxla.frontend.staged import StagesReport
from zeroxla.hybrid.model import LanguageModel
from zeroxla.hybrid.phase_memory import PhaseReport
from zeroxla.offload.array_bytes import shard_bytes
from zeroxla.split.tensor_plan import TensorPlan
from zeroxla.step.describe import Description
from zeroxla.step.step import Step


def phase_report(step: Step, model: LanguageModel, plan: TensorPlan, cache: Any) -> PhaseReport:
    """Report one device's memory while it trains, and while it generates.

    Args:
      step: a step that has seen a batch.
      model: the model that generates.
      plan: how the model's leaves are split to generate.
      cache: the shapes of one device's part of the cache.
    """
    state, described = step.shapes(), step.describe()
    assert isinstance(described, Description | StagesReport)
    dtype = jax.tree.leaves(model.params)[0].dtype
    return PhaseReport(
        num_parameters=plan.num_parameters,
        devices=step.mesh.size,
        tensor=plan.parts,
        parameter_bytes=shard_bytes(state.params),
        optimizer_bytes=shard_bytes(state.opt_state),
        other_bytes=shard_bytes((state.model_state, state.wire_state)),
        gradient_bytes=described.gradient_bytes,
        layout_bytes=plan.num_elements * dtype.itemsize,
        cache_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)),
    )
