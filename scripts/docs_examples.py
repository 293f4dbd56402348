"""An extension of griffe, for mkdocs.yml: examples in docstrings are shown as code.

A docstring's example stands by itself, after a blank line, and Markdown would take its prompts for
quotations.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# From a first prompt to the next blank line.
_EXAMPLE = re.compile(r"(?:^|(?<=\n))(?P<indent> *)>>> .*(?:\n(?! *\n).+)*")


class Examples(griffe.Extension):
    """Puts every doctest of a docstring into a fence."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(match: re.Match[str]) -> str:
    indent = match["indent"]
    return f"{indent}```pycon\n{match[0]}\n{indent}```"
