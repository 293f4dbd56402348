"""What islands do to a model: the final loss of islands and of ZeRO-3 after the same tokens.

    python benchmarks/quality_islands.py [--steps 1000] [--work FOLDER] [--only NAME ...]

Trains the GPT of benchmarks/quality.py on the same text, on 8 simulated devices: without islands,
and with 2 islands of 4 devices and 4 islands of 2, which are threads of this process. All variants
share the initial weights and the batches of a seed; the rows of a batch are divided between the
islands. 42 trainings of 1000 steps take about an hour on 2 idle cores. What is finished lies in
FOLDER (default runs/quality_islands), and a run that was stopped goes on with the next training.
FOLDER knows nothing of the code that trained: after a change of the islands take a new one.
Exits with 1 if a target is missed; writes results/quality_islands.json, .md and .png.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
from common import NUM_DEVICES, start
from quality_islands_report import Results, loss_of, write_report
from quality_islands_training import Trainer
from quality_islands_variants import ALONE, CURVE, JUDGED, MUON, SWEPT, VARIANTS
from quality_training import Setup, train_all

from zeroxla.cli.data.text import load_corpus


def main() -> int:
    """Train what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
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
    setup = Setup(load_corpus(), arguments.steps, arguments.work)
    results = train(setup, arguments.only)
    return 0 if arguments.only is not None else write_report(setup, results)


def train(setup: Setup, only: list[str] | None) -> Results:
    """Train every variant from every seed of its own: the judged ones first, seed by seed."""
    jobs = [
        (variant, seed)
        for group in (JUDGED, SWEPT, ALONE, MUON, CURVE)
        for seed in range(max(v.seeds for v in group))
        for variant in group
        if seed < variant.seeds and (only is None or variant.name in only)
    ]
    trainers = {variant.name: Trainer(setup, variant) for variant, _ in jobs}
    return train_all(jobs, trainers, setup.steps, loss_of=loss_of)


if __name__ == "__main__":
    sys.exit(main())
