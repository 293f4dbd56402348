"""`zeroxla.search_plans`: plans of a model in many settings, ranked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import DEVICE, NODE
from zeroxla.mesh.machines import Device, Link, Machines
from zeroxla.planning.choices import ZEROS, Variants, axes_inside, axes_over_nodes, meshes
from zeroxla.planning.hunt import Found, Hunt, rank
from zeroxla.planning.trials import TrialCluster, Trials
from zeroxla.program.report import Report, format_bytes

if TYPE_CHECKING:
    from rich.table import Table


MOST_LISTED = 6
"""The most settings that a note on what was refused lists."""


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
        return [f"Not planned: {_listed(which)}: {why}" for why, which in self.refused.items()]


def search_plans(
    model: Any,
    nodes: int,
    devices_per_node: int,
    batch: Any,
    *,
    config: ZeroConfig | None = None,
    zeros: Sequence[str] = ZEROS,
    pipes: Sequence[int] | None = None,
    axes: Sequence[Mapping[str, int]] | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    device: str | Device = "h100",
    link: str | Link = "100gbit",
    machines: str | Path | Machines | None = None,
    memory_fraction: float | None = None,
    **options: Any,
) -> Search:
    """Plan a model on a cluster in many settings, and rank the plans.

    Every preset is tried with every way to split the devices into stages and nodes, with and
    without recomputation, and each time with as few micro-batches as fit. A pipeline gets about
    four micro-batches for each stage, which keeps its bubble short. If they do not fit, it gets
    more, and then gathers its weights in every tick.

    The axes `tensor`, `context` and, if the model has banks of experts, `expert` are tried in all
    lengths whose product divides a node. With these and with stages, the other presets are left out
    where the first one shows that they cannot fit, or cannot be faster than the best plan so far.
    If nothing fits, `context` is also tried over several nodes.

    Args:
      model: as `make_step` takes it, or {False: the model, True: the model that recomputes in
        backward}. Both are tried, also of a flax.linen module with a field `remat`; with `memory`
        in the config, which decides what is computed again, the first alone. Pipelines are tried
        if the model scans over its blocks and there is no `memory`.
      nodes, devices_per_node: the size of the cluster.
      batch: the shapes of a global batch, the same for all settings.
      config: the options that presets do not decide: dtypes, thresholds, ... None means the
        defaults with `compute_dtype="bfloat16"`.
      zeros: the names of presets.
      pipes: numbers of stages. None means 1, 2, 4 and 8.
      axes: lengths of the axes that split the work on one row, such as ({"tensor": 2},); ({},) for
        none of them. None means all, as above.
      progress: called with (groups of settings done, groups in all, the settings that come next).
      device, link, machines, memory_fraction: as `zeroxla.plan` takes them.
      options: further arguments of `zeroxla.plan`: optimizer, loss, axis_names, generating, ahead.

    Returns:
      The ranked plans.

    Raises:
      ValueError: unknown presets, or no setting can be planned at all (it says why not).

    Cost: a trace for each plan, and for each mesh with axes that split the work on one row a search
    of several seconds for each number of micro-batches; minutes in all.
    """
    config = config or ZeroConfig(compute_dtype="bfloat16")
    if unknown := set(zeros) - set(ZEROS):
        raise ValueError(f"there are no presets {sorted(unknown)}; there are {ZEROS}")
    trials = Trials(
        variants=Variants.of(model, options.get("loss"), with_budget=config.memory is not None),
        batch=batch,
        config=config,
        cluster=TrialCluster(
            device=device,
            link=link,
            machines=machines,
            memory_fraction=memory_fraction,
            devices_per_node=devices_per_node,
        ),
        **options,
    )
    zeros = sorted(zeros, key=ZEROS.index)  # the first one needs least memory
    hunt = Hunt(trials=trials, zeros=zeros, progress=progress)
    cluster = nodes, devices_per_node
    stages = pipes or (1, 2, 4, 8)
    inside = axes
    if axes is None:
        experts = devices_per_node > 1 and trials.has_experts({NODE: 1, DEVICE: 1})
        inside = list(axes_inside(devices_per_node, experts=experts))
    hunt.search([shape for each in inside or () for shape in meshes(*cluster, stages, each)])
    if axes is None and hunt.best_s is None:
        wide = axes_over_nodes(*cluster)
        hunt.search([shape for each in wide for shape in meshes(*cluster, (1,), each)])
    if not hunt.found:
        raise ValueError("no setting can be planned:\n" + "\n".join(hunt.refused))
    found = sorted(hunt.found, key=lambda row: rank(row.plan))
    return Search(found=tuple(found), refused=hunt.refused)


def _listed(settings: Sequence[str]) -> str:
    """Return settings as text; of many, the first."""
    more = len(settings) - MOST_LISTED
    return "; ".join(settings[:MOST_LISTED]) + (f"; and {more} more" if more > 0 else "")
