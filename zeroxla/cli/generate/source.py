"""`TextSource`: the model that generates, its text, and where its weights are."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroxla.cli.data.chat_template import DEFAULT, TEMPLATE, ChatTemplate, read_template
from zeroxla.cli.data.vocabulary import Vocabulary
from zeroxla.cli.run_folder import CONFIG, read_config
from zeroxla.cli.stored_run import StoredRun
from zeroxla.cli.train.model import MODEL, ModelChoice, choose, folder_dtype, from_folder

GENERATION = "generation_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """A folder with a model.

    Attributes:
      folder: the folder that is named.
      choice: the model without adapters, and its vocabulary.
      run: the run whose checkpoints hold the weights; None for a folder in Hugging Face's format.
      model: the model whose weights are stored, with the adapters of a run, if it has some.
    """

    folder: Path
    choice: ModelChoice
    run: StoredRun | None
    model: Any

    @staticmethod
    def of(folder: Path) -> TextSource:
        """Return the model in a folder.

        Raises:
          ImportError: a package that the tokenizer needs is not installed.
          ValueError: there is no model that generates text.
        """
        folder = folder.expanduser()
        if not folder.is_dir():
            raise ValueError(
                f"{folder} is no folder; give the folder of a model in Hugging Face's format "
                "(nothing is downloaded), or of a run of zeroxla train or rlhf"
            )
        if (folder / CONFIG).is_file() and "model_type" in read_config(folder):
            choice = from_folder(folder)
            return TextSource(folder=folder, choice=choice, run=None, model=choice.model)
        run = StoredRun.of(folder, "generate from")
        if run.options.model.model != "gpt":
            raise ValueError(
                f"{folder} is a run of {run.options.model.model}, which tells images apart and "
                "writes no text; give a run of --model gpt"
            )
        choice = choose(run.options, folder)
        model = run.as_stored(run.options.lora.adapted(choice.model, folder))
        return TextSource(folder=folder, choice=choice, run=run, model=model)

    @property
    def vocabulary(self) -> Vocabulary:
        return self.choice.vocabulary

    @property
    def dtype(self) -> str:
        """The dtype in which the model computes, if nobody says otherwise."""
        if self.run is not None:
            return self.run.compute_dtype
        return folder_dtype(self.choice.config)

    def generation_config(self) -> dict[str, Any]:
        """Return the contents of the model's generation_config.json; {} if there is none.

        Raises:
          ValueError: it is damaged.
        """
        file = (self.folder if self.run is None else self.folder / MODEL) / GENERATION
        if not file.is_file():
            return {}
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {file} ({error}); correct it, or remove it") from error
        if not isinstance(found, Mapping):
            raise ValueError(f"{file} holds no JSON object; correct it, or remove it")
        return dict(found)

    def encode(self, prompt: str) -> list[int]:
        """Turn a text to continue into tokens, as the model has seen beginnings of texts.

        From a folder in Hugging Face's format these are the tokens of its tokenizer with the
        special ones that the tokenizer puts around a text. A run has seen rows after the token that
        begins a document, and text from any place on.

        Raises:
          ValueError: the text is empty, and no token begins a document.
        """
        vocabulary = self.vocabulary
        if self.run is None:
            return vocabulary.encode(prompt, framed=True)
        first = vocabulary.first
        if {"rows", "preferences"} & set(self.run.config) and first is not None:
            return [first, *(vocabulary.encode(prompt) if prompt else [])]
        return vocabulary.encode(prompt)

    def chat_template(self, given: Path | None, say: Callable[[str], None]) -> ChatTemplate:
        """Return the template that turns messages into text.

        Args:
          given: a file with a template; None takes the model's own, or a plain one.
          say: told where the template is from.

        Raises:
          ImportError: jinja2 is not installed.
          ValueError: the template cannot be read, or is damaged.
        """
        kept = self.folder / TEMPLATE if self.run is not None else None
        if given is not None:
            source, place = read_template(given.expanduser()), str(given)
        elif kept is not None and kept.is_file():
            source, place = read_template(kept), str(kept)
        elif self.choice.chat_template is not None:
            source, place = self.choice.chat_template, "the model's own"
        else:
            source, place = DEFAULT, "zeroxla's own, because the model brings none"
        say(f"Chat template: {place}")
        return ChatTemplate(source, self.vocabulary.special, now=datetime.datetime.now())
