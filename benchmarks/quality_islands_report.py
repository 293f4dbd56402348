"""The tables and the picture of benchmarks/quality_islands.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from common import RESULTS, Check, report, table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from quality_islands_variants import (
    ALONE,
    CURVE_BITS,
    CURVE_EVERY,
    EVERY,
    JUDGED,
    LONG_SWEPT,
    MUON,
    SWEPT,
    VARIANTS,
    Variant,
    curve_name,
)
from quality_training import EVAL_BATCH, LENGTH, NUM_FINAL_BATCHES, Setup

from zeroxla.frontend import adapt
from zeroxla.models import GPT

Results = dict[str, list[dict[str, Any]]]  # by variant, one for each seed


def loss_of(result: dict[str, Any], which: str = "outer_loss") -> float:
    """Return the loss of a training.

    Args:
      result: of a training.
      which: "outer_loss" of the outer parameters, or "loss" of the first island's own. They are one
        without islands.
    """
    return result.get(which, result["loss"])


def differences(results: Results, variant: Variant, which: str = "outer_loss") -> list[float]:
    """Return the relative differences of a variant's losses to its base's in percent, by seed."""
    pairs = zip(results[variant.name], results[variant.base], strict=False)
    return [100 * (loss_of(mine, which) / loss_of(base) - 1) for mine, base in pairs]


def curve(results: Results) -> dict[int, dict[int, float]]:
    """Return the relative difference of the first seed in percent, by bits and H."""
    names = {(every, bits): curve_name(every, bits) for every in CURVE_EVERY for bits in CURVE_BITS}
    names[EVERY, 4] = "streaming, 2 islands"
    by_name = {variant.name: variant for variant in VARIANTS}
    found: dict[int, dict[int, float]] = {bits: {} for bits in CURVE_BITS}
    for (every, bits), name in sorted(names.items()):
        found[bits][every] = differences(results, by_name[name])[0]
    return found


def spread(results: Results) -> float:
    """Return the largest standard deviation between the seeds of an island variant, in percent."""
    several = [v for v in VARIANTS if v.islands and v.seeds > 1]
    return max(statistics.stdev(differences(results, variant)) for variant in several)


def write_report(setups: Mapping[str, Setup], parts: Mapping[str, Results]) -> int:
    """Write tables and picture; return the exit code.

    Args:
      setups, parts: the setup and the results of the "long" and of the "short" trainings.
    """
    setup, results = setups["short"], parts["short"]
    draw(parts)
    tokens = NUM_FINAL_BATCHES * EVAL_BATCH * LENGTH
    body = (
        f"GPTs over bytes ({setup.corpus.source}) on 8 simulated devices. Islands divide the rows "
        "of each batch, so all variants see the same tokens. Each of 2 islands has 4 devices and "
        "half of the rows, each of 4 islands 2 devices and a quarter. Variants with the same seed "
        "begin with the same weights and see the same batches. All have the learning rate of "
        "`zeroxla train`, which is not tuned for islands. Islands train from the first step on.\n\n"
        f"The loss is the mean over {tokens:,} held-out tokens, in nats, of the outer parameters "
        "after `settle`, which all islands share and `Island.shared` returns. The last but one "
        "column has the same for the first island's own parameters. All islands took part in every "
        "round, and their outer parameters were equal bit for bit at the end. The base is `zero3` "
        "with the same inner optimizer.\n\n"
        "![above zero3](quality_islands.png)\n\n"
        "## Long trainings\n\n"
        f"{_in_words(setups['long'])} These are judged.\n\n"
        f"{_variants_table(parts['long'], JUDGED, setups['long'].steps)}\n\n"
        f"H = {EVERY}, 2 islands, one seed, with other outer optimizers:\n\n"
        f"{_swept_table(parts['long'], LONG_SWEPT)}\n\n"
        "## Short trainings\n\n"
        f"{_in_words(setup)} They compare many variants. An island alone sees only its own part of "
        "the tokens: exchanges must win back what it has lost.\n\n"
        f"{_variants_table(results, (*JUDGED, *ALONE, *MUON), setup.steps)}\n\n"
        "Muon steps the matrices of the blocks, and AdamW all other leaves. Its updates are scaled "
        "to AdamW's size (`consistent_rms=0.2`, arXiv 2502.16982), so it takes AdamW's rate, "
        "schedule and decay.\n\n"
        "## Other outer optimizers\n\n"
        f"H = {EVERY} but where a row says another, 2 islands, one seed; SGD with Nesterov's "
        "momentum. `diloco` has rate "
        "0.7 and momentum 0.9, `streaming` 1 and 0.8; neither has mixing. No target judges these "
        "rows.\n\n"
        f"{_swept_table(results, SWEPT)}\n\n"
        "## Over H and bits\n\n"
        "2 islands, the fragments and the delay that `ZeroConfig.streaming(every=H)` has, AdamW, "
        "one seed: above zero3's loss, in percent. Between seeds the difference of a variant has a "
        f"standard deviation of up to {spread(results):.2f} %, so smaller differences between two "
        "cells say nothing. Below H = 20 the preset has rate 0.7, momentum 0.9 and mixing "
        "0.5; the rows of H=10 above say why. There is no column of 2 bits: `WireFormat` has codes "
        "of 8 and 4 bits.\n\n"
        f"{_curve_table(results)}"
    )
    checks = [
        Check(
            name=f"loss of {v.name}, above zero3's, mean of {v.seeds} seeds",
            value=statistics.mean(differences(parts["long"], v)),
            limit=100 * v.bar,
            unit=" %",
        )
        for v in VARIANTS
        if v.bar is not None
    ]
    figures = {
        "steps": {part: setups[part].steps for part in setups},
        "curve, %": curve(results),
        "results": parts,
    }
    return report("quality_islands", "Quality of islands", body, figures, checks)


def _in_words(setup: Setup) -> str:
    """Return the model and the data of trainings in words."""
    model = setup.model
    shapes = jax.eval_shape(
        adapt(GPT(**model)).init, jax.random.key(0), {"tokens": jnp.zeros((1, LENGTH + 1), int)}
    )
    parameters = sum(x.size for x in jax.tree.leaves(shapes[0]))
    tokens = setup.steps * setup.batch * LENGTH
    return (
        f"A GPT of {model['layers']} layers of width {model['width']}, {parameters:,} parameters, "
        f"and {setup.steps} steps of {setup.batch} x {LENGTH} tokens: {tokens / parameters:.1f} "
        "tokens a parameter."
    )


def _variants_table(results: Results, variants: Sequence[Variant], steps: int) -> str:
    """Return a table of variants."""
    rows = []
    for variant in variants:
        mine, found = results[variant.name], differences(results, variant)
        row = [variant.name, variant.says, f"{statistics.mean(map(loss_of, mine)):.4f}"]
        if variant.islands:
            error = statistics.stdev(found) / len(found) ** 0.5
            own = statistics.mean(differences(results, variant, "loss"))
            row += [", ".join(f"{x:+.2f}" for x in found), f"{statistics.mean(found):+.2f}"]
            sent = mine[0]["seen_bytes"] / mine[0]["seen_rounds"] * mine[0]["rounds"] / steps
            row += [f"{error:.2f}", f"{own:+.2f}", f"{sent / 1e3:,.1f}"]
        else:
            row += [", ".join(f"{x:+.2f}" for x in found) if variant.parts > 1 else "", *[""] * 4]
        rows.append(row)
    header = ("variant", "what it is", "final loss", "above the base, %, each seed", "mean")
    more = ("standard error", "an island's own parameters, mean", "kB an island sends a step")
    return table((*header, *more), rows)


def _swept_table(results: Results, swept: Sequence[Variant]) -> str:
    """Return the table of the presets and of other outer optimizers, from the first seed."""
    rows = []
    for variant in (*(v for v in JUDGED if v.islands == 2), *swept):
        own, outer = (differences(results, variant, x)[0] for x in ("loss", "outer_loss"))
        loss = loss_of(results[variant.name][0])
        rows.append((variant.name, f"{loss:.4f}", f"{outer:+.2f}", f"{own:+.2f}"))
    header = ("variant", "final loss", "above zero3's, %", "an island's own parameters, %")
    return table(header, rows)


def _curve_table(results: Results) -> str:
    """Return the table of the curve."""
    found = curve(results)
    everies = sorted({every for line in found.values() for every in line})
    rows = [
        (f"H = {every}", *(f"{found[b][every]:+.2f}" if every in found[b] else "" for b in found))
        for every in everies
    ]
    names = ["float32" if bits == 32 else f"{bits} bits" for bits in found]
    return table(("", *names), rows)


def draw(parts: Mapping[str, Results]) -> None:
    """Draw the curve over H for each number of bits, and each seed of the other variants."""
    results = parts["short"]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 3))
    for (bits, line), marker in zip(curve(results).items(), "os^", strict=True):
        label = "float32" if bits == 32 else f"{bits} bits"
        left.plot(list(line), list(line.values()), marker=marker, label=label)
    wide = spread(results)
    left.axhspan(-wide, wide, color="gray", alpha=0.15, linewidth=0)
    left.text(CURVE_EVERY[0], -wide, " standard deviation between seeds", va="bottom", fontsize=8)
    bar = next(100 * v.bar for v in VARIANTS if v.bar is not None)
    left.text(CURVE_EVERY[0], bar, " target", va="bottom", fontsize=8)
    left.set_xscale("log")
    left.set_xticks([*CURVE_EVERY, EVERY], [str(x) for x in (*CURVE_EVERY, EVERY)])
    left.minorticks_off()
    left.set_xlabel("H, steps between two exchanges; 2 islands, one seed, short")
    left.set_ylabel("loss above zero3's, %")
    left.legend(frameon=False)
    several = [v for v in VARIANTS if v.islands and v.seeds > 1]
    shown = [("long", v) for v in several if v in JUDGED] + [("short", v) for v in several]
    for place, (part, variant) in enumerate(shown):
        found = differences(parts[part], variant)
        color = "C2" if part == "long" else "C0" if variant in JUDGED else "C4"
        right.plot([place] * len(found), found, "o", color=color, alpha=0.5)
        right.plot(place, statistics.mean(found), "_", color=color, markersize=18)
    names = [f"{v.name}\n{part}".replace(", ", ",\n") for part, v in shown]
    right.set_xticks(range(len(shown)), names, fontsize=8)
    right.set_xlabel(f"H = {EVERY}: each seed, and the mean")
    for axes in (left, right):
        axes.axhline(bar, color="black", linewidth=0.8, linestyle=":")
        axes.axhline(0, color="black", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "quality_islands.png", dpi=120)
