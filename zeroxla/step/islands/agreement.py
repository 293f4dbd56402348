"""Islands compare what they are before they train, so that a mistake is named at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from zeroxla.step.islands.link import IslandLink

_BYTES = 1 << 16


def check_agreement(link: IslandLink, facts: Mapping[str, str]) -> None:
    """Check that all islands say the same of themselves.

    Args:
      link: joins the islands.
      facts: what must be the same everywhere, by name.

    Raises:
      ValueError: islands differ; the message says in what.
    """
    told = json.dumps({name: _short(text) for name, text in facts.items()}).encode()
    said = link.swap("agreement", [told.ljust(_BYTES)] * link.num)
    mine = json.loads(told)
    for other, line in enumerate(said):
        theirs = json.loads(line)
        if different := [name for name in mine if theirs.get(name) != mine[name]]:
            name = different[0]
            raise ValueError(
                f"island {other} has other {', '.join(different)} than island {link.index}; "
                f"{name}: {theirs.get(name)} there, {mine[name]} here"
            )


def _short(text: str) -> str:
    """Return a text, or its beginning and its hash if it is long."""
    if len(text) <= 200:
        return text
    return f"{text[:160]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"
