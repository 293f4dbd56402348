"""What islands do to a model: the final loss of islands and of ZeRO-3 after the same tokens.

    python benchmarks/quality_islands.py [--steps 1000] [--long-steps 4000] [--work FOLDER]
        [--part long|short] [--only NAME ...]

Trains GPTs on the text of benchmarks/quality.py, on 8 simulated devices: without islands, and with
2 islands of 4 devices and 4 islands of 2, which are threads of this process. All variants share the
initial weights and the batches of a seed; the rows of a batch are divided between the islands.

The long trainings are judged. Their GPT is so small that it sees many tokens a parameter. The short
trainings compare many variants of the larger GPT of benchmarks/quality.py.

What is finished lies in FOLDER (default runs/quality_islands), and a run that was stopped goes on
with the next training. FOLDER knows nothing of the code that trained: after a change of the islands
take a new one. Exits with 1 if a target is missed; writes results/quality_islands.json, .md and
.png. `--part` and `--only` train some of all, and report nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from common import NUM_DEVICES, start
from quality_islands_report import Results, loss_of, write_report
from quality_islands_training import Trainer
from quality_islands_variants import (
    ALONE,
    CURVE,
    JUDGED,
    LONG_BATCH,
    LONG_MODEL,
    LONG_SWEPT,
    MUON,
    SWEPT,
    VARIANTS,
    Variant,
)
from quality_training import Setup, train_all

from zeroxla.cli.data.text import load_corpus


def main() -> int:
    """Train what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--long-steps", type=int, default=4000)
    parser.add_argument("--part", choices=("long", "short"), help="train this part")
    parser.add_argument("--work", type=Path, default=Path("runs/quality_islands"))
    parser.add_argument("--only", nargs="*", help="train only these variants, and report nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.only or ()) - {v.name for v in VARIANTS}:
        parser.error(f"--only {sorted(unknown)}; take some of {[v.name for v in VARIANTS]}")
    start(threads=2 * NUM_DEVICES)  # those of the steps, and of the exchanges beside them
    arguments.work.mkdir(parents=True, exist_ok=True)
    # Each island compiles the same programs for its own devices, and so does each variant.
    jax.config.update("jax_compilation_cache_dir", str(arguments.work.resolve() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    corpus, folder, only = load_corpus(), arguments.work, arguments.only
    setups = {
        "long": Setup(corpus, arguments.long_steps, folder, model=LONG_MODEL, batch=LONG_BATCH),
        "short": Setup(corpus, arguments.steps, folder),
    }
    groups = {"long": (JUDGED, LONG_SWEPT), "short": (JUDGED, SWEPT, ALONE, MUON, CURVE)}
    results = {
        part: train(setups[part], groups[part], only)
        for part in setups
        if arguments.part in (None, part)
    }
    if only is not None or arguments.part is not None:
        return 0
    return write_report(setups, results)


def train(setup: Setup, groups: Sequence[Sequence[Variant]], only: list[str] | None) -> Results:
    """Train every variant from every seed of its own: group by group, seed by seed."""
    jobs = [
        (variant, seed)
        for group in groups
        for seed in range(max(v.seeds for v in group))
        for variant in group
        if seed < variant.seeds and (only is None or variant.name in only)
    ]
    trainers = {variant.name: Trainer(setup, variant) for variant, _ in jobs}
    return train_all(jobs, trainers, setup.steps, loss_of=loss_of)


if __name__ == "__main__":
    sys.exit(main())
