"""Folders of tiny models with a tokenizer whose tokens are words, `t0` to `t63`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import zeroxla
from tools.families import FAMILIES, recorded, tensors_of, write_folder
from zeroxla.models import from_hugging_face


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
    write_folder(folder, name, tensors_of(name))
    config = json.loads((folder / "config.json").read_text())
    for token in ("bos_token_id", "eos_token_id"):
        if not isinstance(number := config.get(token), int) or number >= 64:
            config[token] = None  # it is of the usual vocabulary, of which this is a part
    (folder / "config.json").write_text(json.dumps(config))
    return _with_words(folder)


def wide_text_folder(folder: Path, name: str, width: int = 128) -> Path:
    """Make such a folder of a wider model with random weights, whose layers have more elements than
    those that always stay floats."""
    config = json.loads((FAMILIES / name / "config.json").read_text())
    config |= {"hidden_size": width, "intermediate_size": width, "eos_token_id": None}
    model = from_hugging_face(config)
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=1), optax.sgd(0.0))
    state = step.init(jax.random.key(0), {"tokens": np.zeros((8, 9), np.int32)})
    zeroxla.export_params(state, folder, model=model, config=config)
    return _with_words(folder)


def _with_words(folder: Path) -> Path:
    """Write a tokenizer of words into a folder."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    vocabulary = {f"t{i}": i for i in range(64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def greedy(name: str) -> tuple[str, list[int]]:
    """Return a prompt, and the tokens with which Transformers continues it."""
    found = recorded(name)
    return words(found["tokens"][0, :6]), found["greedy"][0].tolist()
