"""`zeroxla train --model gpt`: a language model on text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.checkpoint.weights.pretrained import from_pretrained
from zeroxla.cli.data import text as data
from zeroxla.cli.run_folder import NoRunFolder, RunFolder
from zeroxla.cli.train.island import seed_of
from zeroxla.cli.train.model import choose, keep
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.train.output import Output
from zeroxla.cli.train.sample import continue_text
from zeroxla.pipeline.pipeline import Pipeline
from zeroxla.step.state import TrainState, full_params
from zeroxla.step.step import Step

if TYPE_CHECKING:
    import grain


class TextTask:
    """A language model on text; see `Task`."""

    data = "text"
    counted = "tokens"
    metrics: tuple[str, ...] = ()

    def __init__(self, options: TrainOptions, run: Path | None) -> None:
        choice = choose(options, run)
        self.options, self._vocabulary = options, choice.vocabulary
        self._module = options.lora.adapted(choice.model)
        stages = options.pipeline
        self.model: Any = self._module
        if stages.pipe > 1:
            self.model = Pipeline.from_model(self._module, **stages.as_arguments)
        text = options.text
        corpus = data.load_corpus(text.data, holdout=text.holdout)
        self.corpus = self._vocabulary.corpus(corpus)
        self.unit = self._vocabulary.unit
        self.num_counted = text.batch * text.length
        self.guess = data.unigram_entropy(self.corpus.valid)
        self.guess_name = f"{self.unit}-unigram entropy"

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

    def keep(self, run: Path) -> None:
        keep(self.options, run)

    def begin(self, step: Step, key: jax.Array) -> TrainState | None:
        init = self.options.model.init
        return None if init is None else from_pretrained(self._module, init, step, key=key)

    def show(
        self, step: Step, state: TrainState, folder: RunFolder | NoRunFolder, output: Output
    ) -> None:
        """Continue the prompt."""
        options = self.options.output
        if options.sample_bytes == 0:
            return
        params = full_params(state)  # all processes take part in this
        if jax.process_index() != 0:
            return
        apply = step.adapted.apply
        assert apply is not None
        numbers = continue_text(
            lambda params, tokens: jnp.asarray(apply(params, {}, tokens)),
            params,
            self._vocabulary.encode(options.prompt),
            num_tokens=options.sample_bytes,
            length=self.options.text.length,
            temperature=options.temperature,
            key=jax.random.key(self.options.training.seed),
        )
        continuation = self._vocabulary.decode(numbers)
        output.continuation(options.prompt, continuation)
        folder.write_text("sample.txt", options.prompt + continuation)


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
