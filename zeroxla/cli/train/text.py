"""`zeroxla train --model gpt`: a language model on text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zeroxla.cli.data import text as data
from zeroxla.cli.train.island import seed_of
from zeroxla.cli.train.language import LanguageTask
from zeroxla.cli.train.length import MULTIPLE, Length, agreed, bounded, given, with_length
from zeroxla.cli.train.model import TEXT_LENGTH, choose
from zeroxla.cli.train.options import TrainOptions

if TYPE_CHECKING:
    import grain

FURTHER_LENGTH = 1024
"""The tokens of a sequence of text, for a model that has learned before."""


class TextTask(LanguageTask):
    """A language model on text; see `Task`."""

    data = "text"

    def __init__(self, options: TrainOptions, run: Path | None) -> None:
        choice, text = choose(options, run), options.text
        corpus = data.load_corpus(text.data, holdout=text.holdout)
        self.corpus = choice.vocabulary.corpus(corpus)
        if options.model.init is None:
            length = given(options, choice) or Length(TEXT_LENGTH, "the default for text")
        else:
            wanted, why = self._room(text.batch), "the default for text"
            length = given(options, choice)
            if length is None:
                length, _ = agreed(lambda: (bounded(wanted, why, choice, options), ""))
        self._length = length
        super().__init__(with_length(options, length.tokens), run, choice)
        self.guess = data.unigram_entropy(self.corpus.valid)

    @property
    def source(self) -> str:
        length = f"sequences of {self._length.tokens:,} ({self._length.source})"
        return f"{describe_corpus(self.corpus, self.unit)}; {length}"

    def _room(self, batch: int) -> int:
        """Return the length of sequences for a model of `--init`; less if the text is short."""
        train, valid = len(self.corpus.train) // batch - 1, len(self.corpus.valid) - 1
        return max(TEXT_LENGTH, min(FURTHER_LENGTH, train, valid) // MULTIPLE * MULTIPLE)

    def record(self) -> dict[str, Any]:
        return record_of(self.corpus)

    def training(self, index: int, count: int, slot: int = 0) -> grain.IterDataset:
        return data.training_batches(
            self.corpus.train,
            batch=self.options.text.batch,
            length=self.options.text.tokens,
            seed=seed_of(self.options.training.seed, slot),
            shard_index=index,
            shard_count=count,
        )

    def validation(self) -> Iterator[dict[str, np.ndarray]]:
        return data.validation_batches(
            self.corpus.valid,
            batch=self.options.text.batch,
            length=self.options.text.tokens,
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
