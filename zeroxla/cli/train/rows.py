"""`zeroxla train --data rows.jsonl`: a language model on conversations, pairs and documents.

What this and training on preferences (`preferences.py`) have in common is `RowFilesTask`.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zeroxla.cli.data.bad_rows import BadRows, RowError
from zeroxla.cli.data.chat_template import DEFAULT, TEMPLATE, ChatTemplate, read_template
from zeroxla.cli.data.mixture import RowStream, Source
from zeroxla.cli.data.row_batches import row_batches, validation_row_batches
from zeroxla.cli.data.row_encoder import RowEncoder, TokenRow
from zeroxla.cli.data.row_kinds import Conversation, Pair, Preference, TrainingRow
from zeroxla.cli.data.row_lengths import measure
from zeroxla.cli.data.text import unigram_entropy
from zeroxla.cli.train.island import seed_of
from zeroxla.cli.train.language import FinalPrompt, LanguageTask
from zeroxla.cli.train.length import SequenceLength, agreed, bounded, given, with_length
from zeroxla.cli.train.model import ModelChoice, choose
from zeroxla.cli.train.options import TrainOptions
from zeroxla.mesh.processes.exchange import on_first

if TYPE_CHECKING:
    import grain

MAX_ASKED = 64
"""The most rows that are looked at for a question that the trained model answers."""

_PLURALS = {
    "Conversation": "conversations",
    "Pair": "pairs",
    "Document": "documents",
    "Preference": "preferences",
    "ChatPreference": "preferences between conversations",
}


class RowFilesTask(LanguageTask, abc.ABC):
    """A language model on rows from files; see `Task`. A subclass makes batches of them.

    Args:
      options: the run's options.
      run: the run's folder, if there is one already.
      choice: the model and its vocabulary.
      sources: the rows.
      bad: counts the rows that cannot be trained on.
    """

    sequences = 1
    """The sequences of a row."""

    def __init__(
        self,
        options: TrainOptions,
        run: Path | None,
        choice: ModelChoice,
        sources: Sequence[Source],
        bad: BadRows,
    ) -> None:
        self._bad, self.sources = bad, sources
        self.options, self.choice = options, choice
        self.template, self._template_from = None, ""
        kinds = {kind for source in sources for kind in source.rows.kinds}
        if kinds & {"Conversation", "ChatPreference"}:
            self.template, self._template_from = self._chat_template(run)
        elif options.rows.chat_template is not None:
            raise ValueError(
                f"--chat-template {options.rows.chat_template}: without effect, because no row is "
                "a conversation; leave it out"
            )
        self._report = ""
        if run is None:  # a resumed run has said it, and its options have the length
            length, self._report = agreed(self._length)
            options = with_length(options, length.tokens)
            if options.model.init is None:
                choice = choose(options)
        super().__init__(options, run, choice)
        self._valid = list(self._validation())  # which names the first rows that are bad
        if run is None:
            on_first("rows that are too long", self._check_lengths)

    def _length(self) -> tuple[SequenceLength, str]:
        """Return the length of sequences, and a report on the lengths of rows."""
        options = self.options
        lengths = measure(self.sources, self._encoder(0), self._bad)
        found = given(options, self.choice) or bounded(
            max(1, lengths.percentile(99) - 1),
            "the 99th percentile of the rows",
            self.choice,
            options,
            sequences=self.sequences,
        )
        rows, self._lengths = options.rows, lengths
        report = lengths.report(found.tokens, too_long=rows.too_long, packing=rows.packing)
        return found, f"Length: {found.tokens:,} ({found.source}). {report}"

    def _check_lengths(self) -> None:
        """Check, in the process that measured rows, that few are bad because they are too long."""
        rows, length = self.options.rows, self.options.text.tokens
        self._lengths.check(length, too_long=rows.too_long, limit=rows.max_bad_rows)

    def _encoder(self, length: int) -> Any:
        """Return what turns rows into at most this many tokens and one."""
        return RowEncoder(
            vocabulary=self.choice.vocabulary,
            template=self.template,
            length=length,
            too_long=self.options.rows.too_long,
        )

    @abc.abstractmethod
    def _validation(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield the validation batches."""

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
            f"out{used}" + (f"\n{self._report}" if self._report else "")
        )

    def record(self) -> dict[str, Any]:
        digest = hashlib.blake2b(digest_size=16)
        for source in self.sources:
            digest.update(f"{source.rows.fingerprint} {source.weight};".encode())
        if self.template is not None:
            for name, source in sorted(self.template.sources.items()):
                digest.update((name * (name != "default") + source).encode())
        return {
            "source": ", ".join(self.options.text.data),
            "fingerprint": digest.hexdigest(),
            "train_rows": sum(len(source.rows) for source in self.sources),
            "valid_rows": sum(source.rows.num_valid for source in self.sources),
        }

    def validation(self) -> Iterator[dict[str, np.ndarray]]:
        yield from self._valid

    def keep(self, run: Path) -> None:
        super().keep(run)
        if self.template is not None:
            self.template.write(run)

    def encoded_prompt(self, prompt: str) -> list[int]:
        if self.template is None:
            return super().encoded_prompt(prompt)
        said = [{"role": "user", "content": prompt}]
        return super().encoded_prompt(self.template.prompt(said))

    def asked(self) -> FinalPrompt:
        """Return what the trained model is asked: --prompt, or else the first question that was
        held out, with its answer."""
        given = self.options.output.prompt
        if given is not None:
            ends = self._ends() if self.template is not None else frozenset()
            return FinalPrompt(given, self.encoded_prompt(given), ends=ends)
        for source in self.sources:
            for index in range(min(source.rows.num_valid, MAX_ASKED)):
                with contextlib.suppress(RowError):
                    found = self._question(source.rows.read(index, valid=True))
                    if found is not None:
                        return found
        return super().asked()

    def _question(self, row: TrainingRow) -> FinalPrompt | None:
        """Return the question in a row that has one, if it leaves room for an answer.

        Raises:
          RowError: the chat template refuses the row.
        """
        row = row.chosen if isinstance(row, Preference) else row
        vocabulary = self.choice.vocabulary
        if isinstance(row, Pair):
            first = [] if vocabulary.first is None else [vocabulary.first]
            numbers = [*first, *(vocabulary.encode(row.prompt) if row.prompt else [])]
            found = FinalPrompt(row.prompt, numbers, row.response, self._ends())
        elif isinstance(row, Conversation) and self.template is not None:
            turns = [i for i, x in enumerate(row.messages) if x["role"] == "assistant"]
            last = max((i for i in turns if i >= row.num_given), default=0)
            reference = row.messages[last].get("content")
            if last == 0 or not isinstance(reference, str) or not reference:
                return None
            prompt = self.template.prompt(row.messages[:last], tools=row.tools)
            whole = self.template.render(row.messages[: last + 1], tools=row.tools).text
            end = whole.rpartition(reference)[2]
            closing = frozenset(vocabulary.encode(end)[:1] if end.strip() else [])
            ends = self._ends() | closing
            found = FinalPrompt(prompt, vocabulary.encode(prompt), reference, ends)
        else:
            return None
        return found if 0 < len(found.numbers) < self.options.text.tokens else None

    def _ends(self) -> frozenset[int]:
        """Return the token that ends a document, if there is one."""
        last = self.choice.vocabulary.last
        return frozenset() if last is None else frozenset({last})

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


class RowsTask(RowFilesTask):
    """A language model that learns what rows say; see `Task`. Arguments: as of `RowFilesTask`."""

    data = "rows"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        targets = [batch["tokens"][:, 1:][batch["mask"] != 0] for batch in self._valid]
        self.guess = unigram_entropy(np.concatenate(targets))

    def training(self, index: int, count: int, slot: int = 0) -> grain.IterDataset:
        stream = self._stream(seed_of(self.options.training.seed, slot))
        shards = {"shard_index": index, "shard_count": count}
        if not self.options.rows.packing:
            return row_batches(stream, batch=self.options.text.batch, **shards)
        from zeroxla.cli.data.packing import packed_batches  # here, because it imports grain

        return packed_batches(stream, batch=self.options.text.batch, **shards)

    def _validation(self) -> Iterator[dict[str, np.ndarray]]:
        stream, number = self._stream(0), self.options.output.eval_batches
        if not self.options.rows.packing:
            return validation_row_batches(stream, batch=self.options.text.batch, num_batches=number)
        from zeroxla.cli.data.packing import packed_validation_batches

        return packed_validation_batches(stream, batch=self.options.text.batch, num_batches=number)

    def _stream(self, seed: int) -> RowStream[TokenRow]:
        return RowStream(self.sources, self._encoder(self.options.text.tokens), self._bad, seed)
