"""How full packed sequences are, for `data_rows.py`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import grain
import numpy as np
from data_rows_files import stream_of
from grain.experimental import FirstFitPackIterDataset

from zeroxla.cli.data.packing import WINDOW, fill_of, packed_batches

# Median and sigma of the lognormal lengths, in tokens, for sequences of 2048.
LENGTHS = ((150, 1.2), (250, 1.0), (600, 0.8), (1000, 0.6))
PACKED_LENGTH, PACKED_ROWS = 2048, 1024
BINS = 256  # of grain's packer


def measure_fill(folder: Path) -> dict[str, dict[str, float]]:
    """Pack rows of lognormal lengths."""
    found: dict[str, dict[str, float]] = {}
    for median, sigma in LENGTHS:
        generator = np.random.default_rng(0)
        lengths = np.exp(generator.normal(np.log(median), sigma, 20_000)).astype(int)
        path = folder / "lengths.jsonl"
        with path.open("w") as file:
            for number, length in enumerate(lengths):
                # The byte that begins a document and the one that ends it are added.
                response = f"{number}".ljust(max(8, length - 2), ".")
                file.write(json.dumps({"prompt": "", "response": response}) + "\n")
        name = f"median {median}, sigma {sigma}"
        found[name] = {}
        for window in (256, WINDOW, 4 * WINDOW):
            stream = stream_of([path], PACKED_LENGTH)
            batches = iter(packed_batches(stream, batch=64, window=window))
            fills = [fill_of(next(batches)) for _ in range(PACKED_ROWS // 64)]
            batches.close()
            found[name][f"windows of {window}"] = float(np.mean(fills))
        found[name][f"grain, {BINS} bins"] = fill_of_grain(lengths)
        print(name, found[name], flush=True)
    return found


def fill_of_grain(lengths: np.ndarray) -> float:
    """Return the share of places that grain's first-fit packer fills."""
    size = PACKED_LENGTH + 1
    tokens = [{"tokens": np.ones(min(max(10, n), size), np.int32)} for n in lengths]
    packed = FirstFitPackIterDataset(
        grain.MapDataset.source(tokens).repeat().to_iter_dataset(),
        length_struct={"tokens": size},
        num_packing_bins=BINS,
        shuffle_bins=False,
    )
    rows = itertools.islice(packed, PACKED_ROWS)
    return float(np.mean([(row["tokens"] != 0).mean() for row in rows]))
