"""`zeroxla.search_plans`: plans of a model in many settings, ranked."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import PIPE
from zeroxla.planning.choices import ZEROS, Choice, Variants, attempts, meshes, with_preset
from zeroxla.planning.make import plan
from zeroxla.planning.plan import Plan
from zeroxla.program.report import Report, format_bytes

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A choice, and its plan."""

    choice: Choice
    plan: Plan

    @property
    def limit(self) -> str:
        """What limits it: memory if it does not fit, otherwise the lane that is taken longest."""
        return self.plan.limit if self.plan.fits else "memory"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Search(Report):
    """The plans that a search found; `print` it.

    Attributes:
      found: the plans, the best first: those that fit by tokens/s, then the others by memory.
      refused: the settings that could not be planned, by the reason why.
    """

    found: tuple[Found, ...]
    refused: Mapping[str, Sequence[str]]

    @property
    def best(self) -> Found | None:
        """The fastest plan that fits; None if none does."""
        return self.found[0] if self.found and self.found[0].plan.fits else None

    def table(self, most: int | None = None) -> Table:
        """Return the plans as a rich table; at most the `most` best of them."""
        from rich.table import Table

        table = Table(title="Settings, by predicted speed", title_justify="left")
        for name in ("wires", "mesh"):
            table.add_column(name, no_wrap=True)
        for name in ("micro-batches", "weights per", "remat", "memory", "a step", "a second"):
            table.add_column(name, justify="right")
        table.add_column("limited by")
        for row in self.found[:most]:
            fits, time = row.plan.fits, row.plan.time.seconds
            table.add_row(
                *row.choice.words(),
                format_bytes(row.plan.most_bytes),
                f"{time:.3g} s",
                f"{row.plan.tokens_per_s:,.0f}",
                row.limit,
                style=None if fits else "dim",
            )
        return table

    def notes(self) -> list[str]:
        """Return a sentence for each reason why settings were refused."""
        return [f"Not planned: {'; '.join(which)}: {why}" for why, which in self.refused.items()]


def search_plans(
    model: Any,
    nodes: int,
    devices_per_node: int,
    batch: Any,
    *,
    config: ZeroConfig | None = None,
    zeros: Sequence[str] = ZEROS,
    pipes: Sequence[int] | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    **options: Any,
) -> Search:
    """Plan a model on a cluster in many settings, and rank the plans.

    Every preset is tried with every way to split the devices into stages and nodes, with and
    without recomputation, and each time with as few micro-batches as fit. A pipeline gets about
    four micro-batches for each stage, which keeps its bubble short. If they do not fit, it gets
    more, and then gathers its weights in every tick.

    Args:
      model: as `make_step` takes it, or {False: the model, True: the model that recomputes in
        backward}. Both are tried, also of a flax.linen module with a field `remat`. Pipelines are
        tried if the model scans over its blocks.
      nodes, devices_per_node: the size of the cluster.
      batch: the shapes of a global batch, the same for all settings.
      config: the options that presets do not decide: dtypes, thresholds, ... None means the
        defaults with `compute_dtype="bfloat16"`.
      zeros: the names of presets.
      pipes: numbers of stages. None means 1, 2, 4 and 8.
      progress: called with (groups of settings done, groups in all, the settings that come next).
      options: further arguments of `zeroxla.plan`: optimizer, loss, device, link,
        machines, memory_fraction.

    Returns:
      The ranked plans.

    Raises:
      ValueError: unknown presets, or no setting can be planned at all (it says why not).

    Cost: a trace for each plan, minutes in all.
    """
    config = config or ZeroConfig(compute_dtype="bfloat16")
    if unknown := set(zeros) - set(ZEROS):
        raise ValueError(f"there are no presets {sorted(unknown)}; there are {ZEROS}")
    rows = jax.tree.leaves(batch)[0].shape[0]
    variants = Variants.of(model, options.get("loss"))
    refused = dict(variants.refused)
    shapes = list(meshes(nodes, devices_per_node, pipes or (1, 2, 4, 8)))
    if not variants.has_pipelines:
        shapes = [shape for shape in shapes if shape.get(PIPE, 1) == 1]
    groups = [
        (zero, shape, remat) for shape in shapes for remat in variants.models for zero in zeros
    ]
    found: list[Found] = []
    for i, (zero, shape, remat) in enumerate(groups):

        def planned(choice: Choice, done: int = i) -> Plan:
            progress(done, len(groups), ", ".join(choice.words()))
            made = variants.model(choice.remat, choice.mesh_shape)
            return _plan(made, choice, batch, config, options)

        last = _first_that_fits(attempts(zero, shape, remat, rows), planned, refused)
        found += [last] if last else []
    progress(len(groups), len(groups), "")
    if not found:
        raise ValueError("no setting can be planned:\n" + "\n".join(refused))
    found.sort(key=lambda row: _rank(row.plan))
    return Search(found=tuple(found), refused=refused)


def _first_that_fits(
    choices: Iterator[Choice],
    planned: Callable[[Choice], Plan],
    refused: dict[str, list[str]],
) -> Found | None:
    """Return the first choice that fits, or the last one that can be planned, with its plan.

    Choices that cannot be planned are added to `refused`, under the reason why.
    """
    last: Found | None = None
    for choice in choices:
        try:
            last = Found(choice=choice, plan=planned(choice))
        except (ValueError, NotImplementedError) as error:
            refused.setdefault(str(error), []).append(", ".join(choice.words()))
            continue
        if last.plan.fits:
            break
    return last


def _plan(
    model: Any, choice: Choice, batch: Any, config: ZeroConfig, options: Mapping[str, Any]
) -> Plan:
    # A pipeline has its own loss.
    more = {} if choice.weights is None else {"weights": choice.weights, "loss": None}
    with warnings.catch_warnings():
        # A search tries presets on meshes and stages for which a part of them does nothing.
        warnings.filterwarnings("ignore", message=".*without effect|.* has no effect in a pipeline")
        return plan(
            model,
            choice.mesh_shape,
            batch,
            config=with_preset(config, choice.zero),
            microbatches=choice.microbatches,
            **{**options, **more},
        )


def _rank(plan: Plan) -> tuple[bool, float]:
    """Return the sort key of a plan: plans that fit first, by speed; then the others, by memory."""
    return not plan.fits, -plan.tokens_per_s if plan.fits else plan.most_bytes
