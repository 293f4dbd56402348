"""`zeroxla train --model gpt`: a language model on text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zeroxla.cli.data import text as data
from zeroxla.cli.train.island import seed_of
from zeroxla.cli.train.language import LanguageTask
from zeroxla.cli.train.options import TrainOptions

if TYPE_CHECKING:
    import grain


class TextTask(LanguageTask):
    """A language model on text; see `Task`."""

    data = "text"

    def __init__(self, options: TrainOptions, run: Path | None) -> None:
        super().__init__(options, run)
        text = options.text
        corpus = data.load_corpus(text.data, holdout=text.holdout)
        self.corpus = self.choice.vocabulary.corpus(corpus)
        self.guess = data.unigram_entropy(self.corpus.valid)

    @property
    def source(self) -> str:
        return describe_corpus(self.corpus, self.unit)

    def record(self) -> dict[str, Any]:
        return record_of(self.corpus)

    def training(self, index: int, count: int, slot: int = 0) -> grain.IterDataset:
        return data.training_batches(
            self.corpus.train,
            batch=self.options.text.batch,
            length=self.options.text.length,
            seed=seed_of(self.options.training.seed, slot),
            shard_index=index,
            shard_count=count,
        )

    def validation(self) -> Iterator[dict[str, np.ndarray]]:
        return data.validation_batches(
            self.corpus.valid,
            batch=self.options.text.batch,
            length=self.options.text.length,
            num_batches=self.options.output.eval_batches,
        )


def describe_corpus(corpus: data.Corpus, unit: str) -> str:
    """Return a sentence about the text that was read."""
    return (
        f"Text: {corpus.source}; {len(corpus.train):,} {unit}s in {corpus.num_train_files} files "
        f"to train on, {len(corpus.valid):,} {unit}s in {corpus.num_valid_files} held out"
    )


def record_of(corpus: data.Corpus) -> dict[str, Any]:
    """Return the facts about a text that a resumed run must find unchanged."""
    return {
        "source": corpus.source,
        "fingerprint": corpus.fingerprint(),
        "train_bytes": len(corpus.train),
        "valid_bytes": len(corpus.valid),
    }
