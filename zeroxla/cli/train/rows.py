"""`zeroxla train --data rows.jsonl`: a language model on conversations, pairs and documents."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zeroxla.cli.data.bad_rows import BadRows
from zeroxla.cli.data.chat_template import DEFAULT, TEMPLATE, ChatTemplate, read_template
from zeroxla.cli.data.mixture import RowStream
from zeroxla.cli.data.row_batches import row_batches, validation_row_batches
from zeroxla.cli.data.row_encoder import RowEncoder
from zeroxla.cli.data.sources import load_sources
from zeroxla.cli.data.text import unigram_entropy
from zeroxla.cli.option_groups import flag
from zeroxla.cli.train.island import seed_of
from zeroxla.cli.train.language import LanguageTask
from zeroxla.cli.train.options import TrainOptions

if TYPE_CHECKING:
    import grain

_PLURALS = {"Conversation": "conversations", "Pair": "pairs", "Document": "documents"}


class RowsTask(LanguageTask):
    """A language model on rows; see `Task`.

    Args:
      options: the run's options.
      run: the run's folder, if there is one already.
      warn: prints a warning, in the first process.
    """

    data = "rows"

    def __init__(
        self, options: TrainOptions, run: Path | None, warn: Callable[[str], None]
    ) -> None:
        super().__init__(options, run)
        rows = options.rows
        if rows.packing:
            self._check_packing()
        self._bad = BadRows(rows.max_bad_rows, warn if jax.process_index() == 0 else _complain)
        self.sources = load_sources(options.text.data, bad=self._bad, holdout=options.text.holdout)
        self.template, self._template_from = None, ""
        if any("Conversation" in source.rows.kinds for source in self.sources):
            self.template, self._template_from = self._chat_template(run)
        elif rows.chat_template is not None:
            raise ValueError(
                f"--chat-template {rows.chat_template}: without effect, because no row is a "
                "conversation; leave it out"
            )
        self._encoder = RowEncoder(
            vocabulary=self.choice.vocabulary,
            template=self.template,
            length=options.text.length,
            too_long=rows.too_long,
        )
        self._valid = list(self._validation())
        targets = [batch["tokens"][:, 1:][batch["mask"] != 0] for batch in self._valid]
        self.guess = unigram_entropy(np.concatenate(targets))

    @property
    def source(self) -> str:
        found: dict[str, int] = {}
        for source in self.sources:
            for kind, number in source.rows.kinds.items():
                found[kind] = found.get(kind, 0) + number
        kinds = ", ".join(f"{number:,} {_PLURALS[kind]}" for kind, number in found.items())
        train = sum(len(source.rows) for source in self.sources)
        valid = sum(source.rows.num_valid for source in self.sources)
        names = ", ".join(self.options.text.data)
        used = f"; chat template: {self._template_from}" if self._template_from else ""
        return (
            f"Rows: {names}; {kinds}, {self._bad.summary}; {train:,} to train on, {valid:,} held "
            f"out{used}"
        )

    def record(self) -> dict[str, Any]:
        digest = hashlib.blake2b(digest_size=16)
        for source in self.sources:
            digest.update(f"{source.rows.fingerprint} {source.weight};".encode())
        if self.template is not None:
            digest.update(self.template.source.encode())
        return {
            "source": ", ".join(self.options.text.data),
            "fingerprint": digest.hexdigest(),
            "train_rows": sum(len(source.rows) for source in self.sources),
            "valid_rows": sum(source.rows.num_valid for source in self.sources),
        }

    def training(self, index: int, count: int, slot: int = 0) -> grain.IterDataset:
        stream = self._stream(seed_of(self.options.training.seed, slot))
        shards = {"shard_index": index, "shard_count": count}
        if not self.options.rows.packing:
            return row_batches(stream, batch=self.options.text.batch, **shards)
        from zeroxla.cli.data.packing import packed_batches  # here, because it imports grain

        return packed_batches(stream, batch=self.options.text.batch, **shards)

    def validation(self) -> Iterator[dict[str, np.ndarray]]:
        yield from self._valid

    def keep(self, run: Path) -> None:
        super().keep(run)
        if self.template is not None:
            (run / TEMPLATE).write_text(self.template.source, encoding="utf-8")

    def encoded_prompt(self, prompt: str) -> list[int]:
        if self.template is None:
            return super().encoded_prompt(prompt)
        said = [{"role": "user", "content": prompt}]
        return super().encoded_prompt(self.template.prompt(said))

    def _stream(self, seed: int) -> RowStream:
        return RowStream(self.sources, self._encoder, self._bad, seed)

    def _validation(self) -> Iterator[dict[str, np.ndarray]]:
        stream, number = self._stream(0), self.options.output.eval_batches
        if not self.options.rows.packing:
            return validation_row_batches(stream, batch=self.options.text.batch, num_batches=number)
        from zeroxla.cli.data.packing import packed_validation_batches

        return packed_validation_batches(stream, batch=self.options.text.batch, num_batches=number)

    def _chat_template(self, run: Path | None) -> tuple[ChatTemplate, str]:
        """Return the chat template, and where it is from."""
        kept = run / TEMPLATE if run is not None and (run / TEMPLATE).is_file() else None
        file = kept or self.options.rows.chat_template
        if file is not None:
            source, name = read_template(file.expanduser()), str(file)
        elif self.choice.chat_template is not None:
            source, name = self.choice.chat_template, str(self.options.model.init)
        else:
            source, name = DEFAULT, "zeroxla's own, because the model brings none"
        return ChatTemplate(source, self.choice.vocabulary.special), name

    def _check_packing(self) -> None:
        if not self.choice.takes_segments:
            raise ValueError(
                "--packing: this model takes no segments, so tokens of one row would see those of "
                "another; leave it out"
            )


def check_text_only(options: TrainOptions) -> None:
    """Check that no option of rows is given to a run on text.

    Raises:
      ValueError: one is.
    """
    usual = type(options.rows)()
    given = [flag(n) for n, x in vars(options.rows).items() if x != getattr(usual, n)]
    if given:
        raise ValueError(
            f"{', '.join(given)}: without effect on text; leave out, or give --data files of rows "
            "(.jsonl, .json, .parquet)"
        )


def _complain(text: str) -> None:
    """Name a bad row that another process than the first has met in its own part of a batch."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
