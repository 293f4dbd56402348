"""Vocabularies turn text into numbers: bytes, or the tokens of a model's own tokenizer.

A corpus is read as bytes (see `text`). A tokenizer turns each of its documents into tokens. If the
model has a special token that begins a document, it stands before each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from zeroxla.cli.data.text import SEPARATOR, VOCABULARY, Corpus
from zeroxla.program.extras import extra

TOKENIZER = "tokenizer.json"


class Vocabulary(Protocol):
    """A way to turn text into numbers.

    Attributes:
      size: the number of different numbers; all are below it.
      unit: one word for the thing that a number stands for.
    """

    size: int
    unit: str

    def corpus(self, corpus: Corpus) -> Corpus:
        """Turn a corpus of bytes into one of numbers."""
        ...

    def encode(self, prompt: str) -> list[int]:
        """Turn a prompt into numbers. An empty prompt becomes the start of a document."""
        ...

    def decode(self, numbers: Sequence[int]) -> str:
        """Turn numbers into text. Numbers that are no text become replacement characters."""
        ...


class Bytes:
    """The vocabulary of bytes: each byte of the text is a number."""

    size, unit = VOCABULARY, "byte"

    def corpus(self, corpus: Corpus) -> Corpus:
        return corpus

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode()) or [SEPARATOR]

    def decode(self, numbers: Sequence[int]) -> str:
        return bytes(numbers).decode("utf-8", errors="replace")


class Tokens:
    """The tokens of a `tokenizer.json`, as Hugging Face's library `tokenizers` reads it.

    Args:
      folder: the folder that holds the file.
      config: the model's config. Its `bos_token_id` begins a document, or, if it has none, its
        `eos_token_id`.

    Raises:
      ImportError: the library is not installed.
      ValueError: the file is missing or damaged.
    """

    unit = "token"

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        file = folder / TOKENIZER
        if not file.is_file():
            raise ValueError(
                f"{folder} holds no {TOKENIZER}, and its model is not one of bytes (a vocabulary "
                f"of {VOCABULARY}); save the tokenizer beside the model"
            )
        try:
            self._tokenizer = _library().Tokenizer.from_file(str(file))
        except ImportError:
            raise
        except Exception as error:  # the library's own error is a plain Exception
            raise ValueError(f"{file} is damaged or no tokenizer: {error}") from error
        # Numbers may be left out, so that there are fewer tokens than numbers.
        numbers = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.size = max(numbers, default=-1) + 1
        ids = (config.get(name) for name in ("bos_token_id", "eos_token_id"))
        first = next((x for x in ids if x is not None), None)
        self._first = first[0] if isinstance(first, list) else first
        if self._first is not None and not 0 <= self._first < self.size:
            raise ValueError(
                f"the config in {folder} begins a document with the token {self._first}, and "
                f"{file} has those from 0 to {self.size - 1}; correct bos_token_id or eos_token_id"
            )

    def corpus(self, corpus: Corpus) -> Corpus:
        return dataclasses.replace(
            corpus, train=self._numbers(corpus.train), valid=self._numbers(corpus.valid)
        )

    def encode(self, prompt: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        if found:
            return found
        if self._first is None:
            raise ValueError(
                "--prompt is empty, and the model has no token that begins a document; give one"
            )
        return [self._first]

    def decode(self, numbers: Sequence[int]) -> str:
        return self._tokenizer.decode(list(numbers), skip_special_tokens=False)

    def _numbers(self, bytes_N: np.ndarray) -> np.ndarray:
        """Turn bytes[N], documents after separators, into the tokens of all documents."""
        texts = [
            document.decode("utf-8", errors="replace")
            for document in bytes_N.tobytes().split(bytes([SEPARATOR]))
            if document
        ]
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        first = [] if self._first is None else [self._first]
        dtype = np.uint16 if self.size <= 2**16 else np.int32
        parts = [np.array(first + one.ids, dtype) for one in encoded]
        return np.concatenate(parts) if parts else np.empty(0, dtype)


def _library() -> Any:
    with extra("text", "a model's tokens need"):
        import tokenizers
    return tokenizers
