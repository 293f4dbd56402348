"""Folders of tiny models with a tokenizer whose tokens are words, `t0` to `t63`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.families import recorded, tensors_of, write_folder


def words(tokens: Any) -> str:
    """Return the text of tokens."""
    return " ".join(f"t{token}" for token in tokens)


def numbers(text: str) -> list[int]:
    """Return the tokens of a text."""
    return [int(word[1:]) for word in text.split()]


def text_folder(folder: Path, name: str) -> Path:
    """Make a folder like the one in which Transformers saves a model and its tokenizer.

    Args:
      folder: the folder to make.
      name: a family of `tools.families`.
    """
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    write_folder(folder, name, tensors_of(name))
    config = json.loads((folder / "config.json").read_text())
    for token in ("bos_token_id", "eos_token_id"):
        if not isinstance(number := config.get(token), int) or number >= 64:
            config[token] = None  # it is of the usual vocabulary, of which this is a part
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {f"t{i}": i for i in range(64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def greedy(name: str) -> tuple[str, list[int]]:
    """Return a prompt, and the tokens with which Transformers continues it."""
    found = recorded(name)
    return words(found["tokens"][0, :6]), found["greedy"][0].tolist()
