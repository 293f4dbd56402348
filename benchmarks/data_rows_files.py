"""Files of rows for `data_rows.py`, and streams of them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from zeroxla.cli.data.bad_rows import BadRows
from zeroxla.cli.data.chat_template import DEFAULT, ChatTemplate
from zeroxla.cli.data.mixture import RowStream, Source
from zeroxla.cli.data.row_encoder import RowEncoder
from zeroxla.cli.data.sources import load_sources
from zeroxla.cli.data.vocabulary import Bytes


def stream_of(paths: list[Path], length: int, seed: int = 0) -> RowStream:
    """Return the stream of some files, in bytes."""
    bad = BadRows(0.1, lambda text: None)  # prompts that fill a sequence leave nothing to learn
    sources: list[Source] = load_sources(paths, bad=bad)
    vocabulary = Bytes()
    template = ChatTemplate(DEFAULT, vocabulary.special)
    encoder = RowEncoder(vocabulary=vocabulary, template=template, length=length)
    return RowStream(sources, encoder, bad, seed)


def write_conversations(path: Path, num_bytes: float, words: int = 300) -> None:
    """Write a JSONL file of conversations with about `num_bytes`."""
    generator = random.Random(0)
    text = " ".join(generator.choice(("alpha", "beta", "gamma", "delta")) for _ in range(20_000))

    def some() -> str:
        first = generator.randrange(len(text) - 1)
        return text[first : first + 1 + int(generator.lognormvariate(np.log(words), 0.8))]

    with path.open("w") as file:
        while file.tell() < num_bytes:
            lines = [
                json.dumps(
                    {
                        "id": number,
                        "messages": [
                            {"role": "user", "content": some()},
                            {"role": "assistant", "content": some()},
                        ],
                    }
                )
                for number in range(1000)
            ]
            file.write("\n".join(lines) + "\n")
