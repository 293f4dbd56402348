"""`LanguageTask`: what training on text and training on rows have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zeroxla.checkpoint.weights.pretrained import from_pretrained
from zeroxla.cli.run_folder import NoRunFolder, RunFolder
from zeroxla.cli.train.length import MULTIPLE
from zeroxla.cli.train.model import ModelChoice, choose, keep
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.train.output import Output
from zeroxla.cli.train.sample import continue_text
from zeroxla.cli.train.task import Scorer
from zeroxla.pipeline.pipeline import Pipeline
from zeroxla.step.state import TrainState, full_params
from zeroxla.step.step import Step


class FinalPrompt(NamedTuple):
    """What a trained model is asked.

    Attributes:
      prompt: the text, as the model sees it.
      numbers: its tokens.
      reference: the answer in the data; None if there is none.
      ends: the tokens that end an answer.
    """

    prompt: str
    numbers: list[int]
    reference: str | None = None
    ends: frozenset[int] = frozenset()


class LanguageTask:
    """A language model with its vocabulary; see `Task`. A subclass brings the data.

    Attributes:
      options: the run's options.
      choice: the model and its vocabulary.
    """

    counted = "tokens"
    numbers: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    loss: Any = None

    def __init__(
        self, options: TrainOptions, run: Path | None, choice: ModelChoice | None = None
    ) -> None:
        self.options, self.choice = options, choice or choose(options, run)
        self._module = options.lora.adapted(self.choice.model, run)
        stages = options.pipeline
        self.model: Any = self._module
        if stages.pipe > 1:
            self.model = Pipeline.from_model(self._module, **stages.as_arguments)
        self.unit = self.choice.vocabulary.unit
        self.num_counted = options.text.batch * options.text.tokens
        self.guess_name = f"{self.unit}-unigram entropy of the validation set"

    def scorer(self, step: Step) -> Scorer | None:
        return None

    def keep(self, run: Path) -> None:
        keep(self.options, run)
        self.options.lora.keep(run)

    def begin(self, step: Step, key: jax.Array) -> TrainState | None:
        init, adapter = self.options.model.init, self.options.lora.lora_init
        if init is None:
            return None
        return from_pretrained(self._module, init, step, key=key, adapter=adapter)

    def encoded_prompt(self, prompt: str) -> list[int]:
        """Turn the text of --prompt into the numbers that the model continues."""
        return self.choice.vocabulary.encode(prompt)

    def asked(self) -> FinalPrompt:
        """Return what the trained model continues: the text of --prompt."""
        prompt = self.options.output.prompt or "def "
        return FinalPrompt(prompt, self.encoded_prompt(prompt))

    def show(
        self, step: Step, state: TrainState, folder: RunFolder | NoRunFolder, output: Output
    ) -> None:
        """Continue the prompt, or answer a question that was held out."""
        options, vocabulary = self.options.output, self.choice.vocabulary
        if options.sample_bytes == 0:
            return
        params = full_params(state)  # all processes take part in this
        if jax.process_index() != 0:
            return
        apply = step.adapted.apply
        assert apply is not None
        asked = self.asked()
        # Each token is a pass over the window, which need not be longer than what is written.
        written = -(-(len(asked.numbers) + options.sample_bytes) // MULTIPLE) * MULTIPLE
        numbers = continue_text(
            lambda params, tokens: jnp.asarray(apply(params, {}, tokens)),
            params,
            asked.numbers,
            num_tokens=options.sample_bytes,
            length=min(self.options.text.tokens, written),
            temperature=options.temperature,
            key=jax.random.key(self.options.training.seed),
        )
        ends = [i for i, number in enumerate(numbers) if number in asked.ends]
        text = vocabulary.decode(numbers[: ends[0]] if ends else numbers)
        if asked.reference is None:
            output.continuation(asked.prompt, text)
            folder.write_text("sample.txt", asked.prompt + text)
            return
        output.answer(asked.prompt, asked.reference, text)
        parts = {"question": asked.prompt, "reference": asked.reference, "answer": text}
        folder.write_text("sample.txt", "".join(f"[{n}]\n{x}\n\n" for n, x in parts.items()))
