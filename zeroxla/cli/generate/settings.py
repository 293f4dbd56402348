"""`AnswerSettings`: how tokens are chosen, and what ends an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroxla.cli.data.vocabulary import Vocabulary
from zeroxla.cli.generate.options import SamplingOptions
from zeroxla.cli.generate.source import GENERATION, TextSource
from zeroxla.hybrid.sampling import Sampling

MAX_NEW_TOKENS = 256
TEMPERATURE = 0.7
"""The temperature of models that say nothing about it; `zeroxla train` has the same."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (),
    "min_p": (0.0,),
    "top_h": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": ({},),
    "exponential_decay_length_penalty": (),
}
"""Keys of a generation_config.json that change what is drawn, and are not followed here; each with
the values, besides null, that change nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerSettings:
    """How answers are drawn.

    Attributes:
      sampling: how a token is chosen.
      max_new_tokens: the most tokens of an answer.
      may_be_less: whether an answer may have fewer tokens where the context has no room.
      ends: the tokens that end an answer.
      stops: texts that end an answer.
      seed: the seed of the tokens.
      asked: what the model's generation_config.json asks for and is not followed, in words.
    """

    sampling: Sampling
    max_new_tokens: int
    may_be_less: bool
    ends: tuple[int, ...]
    stops: tuple[str, ...]
    seed: int
    asked: tuple[str, ...] = ()

    @staticmethod
    def of(options: SamplingOptions, source: TextSource) -> AnswerSettings:
        """Return what the options say, and for the rest what the model's files say.

        Raises:
          ValueError: a value in the files, or of the options, is out of range.
        """
        told = source.generation_config()
        values = _of_file(told)
        values |= {
            name: given
            for name in ("temperature", "top_k", "top_p")
            if (given := getattr(options, name)) is not None
        }
        try:
            sampling = Sampling(**{**values, "top_k": values.get("top_k") or None})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{GENERATION} of {source.folder}: {error}") from error
        most = told.get("max_new_tokens")
        if options.max_new_tokens is None and most is not None and not _is_token(most, 1):
            raise ValueError(
                f"{GENERATION} of {source.folder} has max_new_tokens={most!r}; give "
                "--max-new-tokens"
            )
        return AnswerSettings(
            sampling=sampling,
            max_new_tokens=options.max_new_tokens or most or MAX_NEW_TOKENS,
            may_be_less=options.max_new_tokens is None,
            ends=options.eos or _ends(told, source),
            stops=options.stop or _texts(told.get("stop_strings"), source),
            seed=options.seed,
            asked=tuple(
                f"{name}={told[name]!r}"
                for name, neutral in _NEUTRAL.items()
                if told.get(name) is not None and told[name] not in neutral
            ),
        )

    def words(self, vocabulary: Vocabulary) -> str:
        """Return a sentence about how tokens are chosen, and about what ends an answer."""
        sampling = self.sampling
        if sampling.is_greedy:
            how = "the likeliest token each time"
        else:
            how = f"temperature {sampling.temperature:g}"
            how += "" if sampling.top_k is None else f", top-k {sampling.top_k}"
            how += "" if sampling.top_p == 1 else f", top-p {sampling.top_p:g}"
            how += f", seed {self.seed}"
        ends = [repr(vocabulary.decode([token])) for token in self.ends]
        ends += [repr(stop) for stop in self.stops]
        at = f", or at {' or '.join(ends)}" if ends else ""
        most = f"{self.max_new_tokens} tokens" + (" or at the context's end" * self.may_be_less)
        return f"Sampling: {how}; an answer ends after {most}{at}"

    def check_ends(self, size: int) -> None:
        """Check that the model can draw the tokens that end an answer.

        Args:
          size: the number of the model's tokens.

        Raises:
          ValueError: it cannot.
        """
        if wrong := [token for token in self.ends if not 0 <= token < size]:
            raise ValueError(
                f"the token {wrong[0]} is to end an answer, and the model's vocabulary is 0 to "
                f"{size - 1}; give --eos with one of them"
            )

    def room(self, longest: int, context: int) -> int:
        """Return the most new tokens that may follow prompts.

        Args:
          longest: the number of tokens of the longest prompt.
          context: the most tokens of a prompt and its continuation together.

        Raises:
          ValueError: the context has no room for them.
        """
        left = context - longest
        if left < 1 or (left < self.max_new_tokens and not self.may_be_less):
            wanted = "" if self.may_be_less else f" with --max-new-tokens {self.max_new_tokens}"
            fewer = f", or ask for {left} new ones at most" if left > 0 and wanted else ""
            raise ValueError(
                f"a prompt has {longest} tokens, and the model's context is {context}, so that "
                f"there is no room for an answer{wanted}; shorten the prompt{fewer}"
            )
        return min(left, self.max_new_tokens)


def _of_file(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return temperature, top_k and top_p, as a generation_config.json says."""
    if not told:
        return {"temperature": TEMPERATURE}
    if not told.get("do_sample"):
        return {"temperature": 0.0}
    given = {name: told[name] for name in ("top_k", "top_p") if told.get(name) is not None}
    return {"temperature": 1.0 if told.get("temperature") is None else told["temperature"], **given}


def _ends(told: Mapping[str, Any], source: TextSource) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of the generation config, or else of the model's
    config; the one of the tokenizer, which chat templates write; and the one of a run of rlhf."""
    vocabulary, config = source.vocabulary, source.choice.config or {}
    found = told.get("eos_token_id")
    found = config.get("eos_token_id") if found is None else found
    ends = found if isinstance(found, list) else [] if found is None else [found]
    ends = [*ends] or ([] if vocabulary.last is None else [vocabulary.last])
    if text := vocabulary.special.get("eos_token"):
        numbers = vocabulary.encode(text)
        ends += numbers if len(numbers) == 1 else []
    if source.run is not None and source.run.eos is not None:
        ends.append(source.run.eos)
    if wrong := [token for token in ends if not _is_token(token, 0)]:
        raise ValueError(
            f"eos_token_id of {source.folder} is {wrong[0]!r}, and no token; give --eos NUMBER"
        )
    return tuple(dict.fromkeys(ends))


def _texts(value: Any, source: TextSource) -> tuple[str, ...]:
    """Return the texts that end an answer, as a generation config names them."""
    found = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(x, str) and x for x in found):
        raise ValueError(
            f"{GENERATION} of {source.folder} has stop_strings={value!r}, and no texts; correct it"
        )
    return tuple(found)


def _is_token(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
