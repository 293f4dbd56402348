"""Answers the rows of a file, and writes the answers into another file, line by line."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jax

from zeroxla.checkpoint.errors import in_words
from zeroxla.cli.appended_files import append_whole
from zeroxla.cli.data.bad_rows import BadRows, RowError
from zeroxla.cli.data.chat_template import ChatTemplate
from zeroxla.cli.data.prompt_rows import ANSWER, PromptRow, prompt_rows
from zeroxla.cli.errors import RunFolderError
from zeroxla.cli.generate.answer_text import AnswerText
from zeroxla.cli.generate.drawing import Drawing
from zeroxla.cli.generate.output import GenerateOutput
from zeroxla.cli.generate.source import TextSource
from zeroxla.mesh.processes.exchange import exchange, on_first

EVERY = 16
"""Steps between two looks at what is drawn: nobody waits for a single token here."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A row, and its prompt in tokens."""

    row: PromptRow
    tokens: list[int]


class PromptFile:
    """The rows of a file that can be answered.

    Args:
      path: the file.
      source: the model; its vocabulary turns texts into tokens.
      template: returns the template for messages; called if some row has messages.
      limit: the largest share of rows that may be bad.
      warn: called with a sentence for each of the first bad rows.

    Attributes:
      num_rows: the number of rows that can be answered.
      longest: the number of tokens of the longest prompt.

    Raises:
      ValueError: the file cannot be read, holds nothing to answer, or too many rows are bad.

    Cost: reads the file once. Its rows are read again when they are answered.
    """

    def __init__(
        self,
        path: Path,
        *,
        source: TextSource,
        template: Callable[[], ChatTemplate],
        limit: float,
        warn: Callable[[str], None],
    ) -> None:
        self._path, self._source, self._make_template = path, source, template
        self._template: ChatTemplate | None = None
        self._bad = BadRows(limit, warn)
        lengths = [len(asked.tokens) for asked in self]
        self._bad.check()
        if not lengths:
            raise ValueError(f"{path} holds no row to answer; give one or more")
        self.num_rows, self.longest = len(lengths), max(lengths)

    def __iter__(self) -> Iterator[Asked]:
        for row in prompt_rows(self._path, self._bad):
            try:
                yield Asked(row, self._tokens(row))
            except RowError as error:
                self._bad.add(row.place, str(error))

    def _tokens(self, row: PromptRow) -> list[int]:
        if isinstance(row.asks, str):
            try:
                return self._source.encode(row.asks)
            except ValueError as error:
                raise RowError(str(error)) from error
        self._template = self._template or self._make_template()
        text = self._template.prompt(row.asks.messages, tools=row.asks.tools)
        return self._source.vocabulary.encode(text)


class AnswerFile:
    """A new file of answers, which holds whole lines at any time. The first process writes it.

    Args:
      path: the file.

    Raises:
      ValueError: it is there already, or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = on_first("new file of answers", self._made)

    def write(self, row: PromptRow, answer: AnswerText) -> None:
        """Append a row with its answer.

        Raises:
          RunFolderError: the disk is full, or the file cannot be written.
        """
        if self._file is None:
            return
        values = (answer.text, answer.num_tokens, answer.finished)
        line = {**row.fields, **dict(zip(ANSWER, values, strict=True))}
        try:
            append_whole(self._file, json.dumps(line, ensure_ascii=False).encode() + b"\n")
        except OSError as error:
            raise RunFolderError(
                f"cannot write {self._path}: {in_words(error, self._path.parent)}; the answers "
                f"before the one to {row.place} are there"
            ) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _made(self) -> Any:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return self._path.open("xb", buffering=0)
        except OSError as error:
            raise ValueError(
                f"--output {self._path} cannot be written: {error.strerror}; name another file"
            ) from error


def check_free(path: Path) -> None:
    """Check, in the first process, that a file of answers may be made.

    Raises:
      ValueError: there is one already.
    """

    def check() -> None:
        if path.exists():
            raise ValueError(f"--output {path} is there already; name another file, or remove it")

    on_first("file of answers", check)


def answer_file(
    drawing: Drawing, file: PromptFile, path: Path, output: GenerateOutput, batch: int
) -> None:
    """Answer all rows of a file, in their order.

    Args:
      drawing: draws the answers.
      file: the rows.
      path: the file for the answers; see `AnswerFile`.
      output: shows how far it is.
      batch: the number of rows that are answered at a time.
    """
    rows, is_full = iter(file), file.num_rows > batch
    with contextlib.closing(AnswerFile(path)) as answers, output.progress(file.num_rows) as bar:
        while some := list(itertools.islice(rows, batch)):
            prompts = [asked.tokens for asked in some]
            growing = drawing.answers(prompts, [isinstance(a.row.asks, str) for a in some])
            # Programs are compiled for a number of rows: the last ones are filled up.
            prompts += [prompts[0]] * (batch - len(prompts) if is_full else 0)
            for _ in drawing.draw(prompts, growing, every=EVERY):
                bar.update(bar.task_ids[0], status=drawing.speed.rate())
            for asked, answer in zip(some, growing.rows, strict=True):
                answers.write(asked.row, answer)
            bar.update(bar.task_ids[0], advance=len(some))
    if jax.process_count() > 1:
        exchange("end", "")  # the first process writes, and all must end together
