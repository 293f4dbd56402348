"""Files of rows for tests, and streams of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from zeroxla.cli.data.bad_rows import BadRows
from zeroxla.cli.data.chat_template import DEFAULT, ChatTemplate
from zeroxla.cli.data.mixture import RowStream
from zeroxla.cli.data.row_encoder import RowEncoder, TokenRow
from zeroxla.cli.data.sources import load_sources
from zeroxla.cli.data.vocabulary import Bytes

HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as JSON lines; strings are lines as they are."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def mixed_rows(number: int) -> list[dict[str, Any]]:
    """Return different rows of all kinds, of 8 to 60 bytes."""
    rows: list[dict[str, Any]] = []
    for i in range(number):
        said = f"{i}" + "abcdefg"[: i % 7]
        rows += [
            {"messages": [{**HELLO[0], "content": said}, HELLO[1]]},
            {"prompt": f"{said}?", "response": "yes" * (1 + i % 5)},
            {"text": said * (1 + i % 9)},
        ]
    return rows[:number]


def preference_rows(number: int, *, chat: bool = False) -> list[dict[str, Any]]:
    """Return preferences for the answer "yes", of 10 to 30 bytes."""
    rows = []
    for i in range(number):
        asked, chosen = f"{i}" + "abcdefg"[: i % 7], "yes" * (1 + i % 3)
        rejected = "xyzw"[: 1 + i % 4]
        if chat:
            user = {"role": "user", "content": asked}
            answers = [[user, {**HELLO[1], "content": x}] for x in (chosen, rejected)]
            rows.append({"chosen": answers[0], "rejected": answers[1]})
        else:
            rows.append({"prompt": f"{asked}?", "chosen": chosen, "rejected": rejected})
    return rows


def stream_of(
    *names: Any,
    length: int = 48,
    seed: int = 0,
    limit: float = 0.0,
    holdout: float = 0.05,
    report: Callable[[str], None] = lambda text: None,
    template: ChatTemplate | None = None,
    **encoder: Any,
) -> RowStream[TokenRow]:
    """Return a stream of files, in bytes."""
    bad = BadRows(limit, report)
    sources = load_sources(names, bad=bad, holdout=holdout)
    vocabulary = Bytes()
    chosen = template or ChatTemplate(DEFAULT, vocabulary.special)
    made = RowEncoder(vocabulary=vocabulary, template=chosen, length=length, **encoder)
    return RowStream(sources, made, bad, seed)
