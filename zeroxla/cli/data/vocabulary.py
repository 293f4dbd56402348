"""Vocabularies turn text into numbers: bytes, or the tokens of a model's own tokenizer.

A corpus is read as bytes (see `text`). A tokenizer turns each of its documents into tokens. If the
model has a special token that begins a document, it stands before each.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from zeroxla.cli.data.text import SEPARATOR, VOCABULARY, Corpus
from zeroxla.models.folders import is_pointer, pointer_text
from zeroxla.program.extras import extra

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_SLOW = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Files of tokenizers that Transformers can turn into a tokenizer.json."""


class Spans(NamedTuple):
    """A text in numbers.

    Attributes:
      ids_T: int32[T], the numbers.
      spans_T2: int32[T, 2], the first character of each and the one after its last, counted in
        characters of the text. A character whose bytes are several numbers belongs to all of them.
    """

    ids_T: np.ndarray
    spans_T2: np.ndarray


class Vocabulary(Protocol):
    """A way to turn text into numbers.

    Attributes:
      size: the number of different numbers; all are below it.
      unit: one word for the thing that a number stands for.
      first: the number that begins a document; None if the model has none.
      last: the number that ends a document; None if the model has none.
      special: the texts of these two, as chat templates read them: "bos_token" and "eos_token".
    """

    size: int
    unit: str
    special: Mapping[str, str]

    @property
    def first(self) -> int | None: ...

    @property
    def last(self) -> int | None: ...

    def corpus(self, corpus: Corpus) -> Corpus:
        """Turn a corpus of bytes into one of numbers."""
        ...

    def encode(self, prompt: str, *, framed: bool = False) -> list[int]:
        """Turn a prompt into numbers. An empty prompt becomes the start of a document.

        Args:
          prompt: the text.
          framed: add the special tokens that the tokenizer's own file puts around a text.
        """
        ...

    def decode(self, numbers: Sequence[int], *, special: bool = True) -> str:
        """Turn numbers into text. Numbers that are no text become replacement characters.

        Args:
          numbers: the numbers.
          special: write special tokens, too.
        """
        ...

    def encode_spans(self, texts: Sequence[str]) -> list[Spans]:
        """Turn texts into numbers, each with the characters that it stands for.

        No number is added that begins or ends a document.
        """
        ...


class Bytes:
    """The vocabulary of bytes: each byte of the text is a number."""

    size, unit = VOCABULARY, "byte"
    first = last = SEPARATOR
    special: Mapping[str, str] = {"bos_token": chr(SEPARATOR), "eos_token": chr(SEPARATOR)}

    def corpus(self, corpus: Corpus) -> Corpus:
        return corpus

    def encode(self, prompt: str, *, framed: bool = False) -> list[int]:
        return list(prompt.encode()) or [SEPARATOR]

    def decode(self, numbers: Sequence[int], *, special: bool = True) -> str:
        return bytes(numbers).decode("utf-8", errors="replace")

    def encode_spans(self, texts: Sequence[str]) -> list[Spans]:
        found = []
        for text in texts:
            widths = [len(character.encode()) for character in text]
            starts_T = np.repeat(np.arange(len(text), dtype=np.int32), widths)
            ids_T = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
            found.append(Spans(ids_T, np.stack([starts_T, starts_T + 1], axis=1)))
        return found


class Tokens:
    """The tokens of a `tokenizer.json`, as Hugging Face's library `tokenizers` reads it.

    A text becomes all of its tokens and no others: `truncation` and `padding` of the file, which
    are settings of the program that saved it, are switched off.

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
            remedy = "save the tokenizer beside the model"
            if any((folder / name).is_file() for name in _SLOW):
                remedy = (
                    'convert the tokenizer that is there: python -c "from transformers import '
                    f"AutoTokenizer as T; T.from_pretrained('{folder}').save_pretrained('{folder}')"
                    '"'
                )
            raise ValueError(
                f"{folder} holds no {TOKENIZER}, and its model is not one of bytes (a vocabulary "
                f"of {VOCABULARY}); {remedy}"
            )
        if is_pointer(file):
            raise ValueError(pointer_text(file))
        try:
            self._tokenizer = _library().Tokenizer.from_file(str(file))
        except ImportError:
            raise
        except Exception as error:  # the library's own error is a plain Exception
            raise ValueError(f"{file} is damaged or no tokenizer: {error}") from error
        # Fine-tunes leave these in the file. Texts would lose their ends, or get padding, unseen.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Numbers may be left out, so that there are fewer tokens than numbers.
        numbers = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.size = max(numbers, default=-1) + 1
        ids = (config.get(name) for name in ("bos_token_id", "eos_token_id"))
        self.first: int | None = next((_one(x) for x in ids if x is not None), None)
        self.last: int | None = _one(config.get("eos_token_id"))
        for does, number in (("begins", self.first), ("ends", self.last)):
            if number is not None and not 0 <= number < self.size:
                raise ValueError(
                    f"the config in {folder} {does} a document with the token {number}, and {file} "
                    f"has those from 0 to {self.size - 1}; correct bos_token_id or eos_token_id"
                )
        self.special: Mapping[str, str] = {
            f"{name}_token": self._tokenizer.id_to_token(number)
            for name in ("bos", "eos")
            if (number := _one(config.get(f"{name}_token_id"))) is not None
            and 0 <= number < self.size
        } | special_tokens(folder)

    def corpus(self, corpus: Corpus) -> Corpus:
        return dataclasses.replace(
            corpus, train=self._numbers(corpus.train), valid=self._numbers(corpus.valid)
        )

    def encode(self, prompt: str, *, framed: bool = False) -> list[int]:
        found: list[int] = self._tokenizer.encode(prompt, add_special_tokens=framed).ids
        if found:
            return found
        if self.first is None:
            raise ValueError(
                "a prompt is empty (--prompt), and the model has no token that begins a document; "
                "give a text"
            )
        return [self.first]

    def decode(self, numbers: Sequence[int], *, special: bool = True) -> str:
        return self._tokenizer.decode(list(numbers), skip_special_tokens=not special)

    def encode_spans(self, texts: Sequence[str]) -> list[Spans]:
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            Spans(np.array(one.ids, np.int32), np.array(one.offsets, np.int32).reshape(-1, 2))
            for one in encoded
        ]

    def _numbers(self, bytes_N: np.ndarray) -> np.ndarray:
        """Turn bytes[N], documents after separators, into the tokens of all documents."""
        texts = [
            document.decode("utf-8", errors="replace")
            for document in bytes_N.tobytes().split(bytes([SEPARATOR]))
            if document
        ]
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        first = [] if self.first is None else [self.first]
        dtype = np.uint16 if self.size <= 2**16 else np.int32
        parts = [np.array(first + one.ids, dtype) for one in encoded]
        return np.concatenate(parts) if parts else np.empty(0, dtype)


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens that a folder's `tokenizer_config.json` names, as texts by name:
    "bos_token", "eos_token" and the like. Without the file there are none.

    Raises:
      ValueError: the file is no JSON object.
    """
    found = tokenizer_config(folder)
    texts = {name: x.get("content") if isinstance(x, dict) else x for name, x in found.items()}
    return {n: x for n, x in texts.items() if n.endswith("_token") and isinstance(x, str)}


def tokenizer_config(folder: Path, name: str = TOKENIZER_CONFIG) -> dict[str, Any]:
    """Return the content of a folder's `tokenizer_config.json`, or of a file of another name beside
    it; an empty dict without the file.

    Raises:
      ValueError: the file is no JSON object.
    """
    file = folder / name
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if is_pointer(file):
            raise ValueError(pointer_text(file)) from error
        raise ValueError(f"cannot read {file} ({error}); save the tokenizer anew") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object; save the tokenizer anew")
    return found


def _one(number: Any) -> int | None:
    """Return a token's number; the first one of several."""
    if isinstance(number, list):
        return number[0] if number else None
    return number


def _library() -> Any:
    with extra("text", "a model's tokens need"):
        import tokenizers
    return tokenizers
