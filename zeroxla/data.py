"""Rows of files as batches: conversations, pairs, documents and preferences; text, and images.

`docs/data.md` explains rows. What `zeroxla train` does with --data is made of these.
"""

from typing import TYPE_CHECKING, Any

from zeroxla.cli.data.bad_rows import BadRows, RowError
from zeroxla.cli.data.chat_template import DEFAULT as DEFAULT_TEMPLATE
from zeroxla.cli.data.chat_template import ChatTemplate, template_of
from zeroxla.cli.data.images import image_batches, load_images, validation_image_batches
from zeroxla.cli.data.mixture import RowStream, Source
from zeroxla.cli.data.preferences import (
    PreferenceEncoder,
    preference_batches,
    validation_preference_batches,
)
from zeroxla.cli.data.prompt_rows import prompt_rows
from zeroxla.cli.data.row_batches import row_batches, validation_row_batches
from zeroxla.cli.data.row_encoder import RowEncoder
from zeroxla.cli.data.row_files import RowFiles
from zeroxla.cli.data.row_lengths import RowLengths, measure
from zeroxla.cli.data.sources import load_sources
from zeroxla.cli.data.text import load_corpus, training_batches, validation_batches
from zeroxla.cli.data.vocabulary import Bytes, Tokens

if TYPE_CHECKING:
    from zeroxla.cli.data.packing import packed_batches, packed_validation_batches

__all__ = [  # noqa: RUF022 (grouped)
    # files
    "BadRows",
    "RowError",
    "RowFiles",
    "Source",
    "load_sources",
    "prompt_rows",
    # tokens
    "DEFAULT_TEMPLATE",
    "Bytes",
    "ChatTemplate",
    "PreferenceEncoder",
    "RowEncoder",
    "RowLengths",
    "Tokens",
    "measure",
    "template_of",
    # batches
    "RowStream",
    "packed_batches",
    "packed_validation_batches",
    "preference_batches",
    "row_batches",
    "validation_preference_batches",
    "validation_row_batches",
    # text and images
    "image_batches",
    "load_corpus",
    "load_images",
    "training_batches",
    "validation_batches",
    "validation_image_batches",
]


def __getattr__(name: str) -> Any:
    """Import packing when it is used: it needs the package grain."""
    if name not in ("packed_batches", "packed_validation_batches"):
        raise AttributeError(f"module 'zeroxla.data' has no attribute {name!r}")
    from zeroxla.cli.data import packing

    return getattr(packing, name)
