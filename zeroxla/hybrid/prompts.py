"""Prompts of any lengths, limits of lengths, the result of generating, and checks of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

SMALLEST = 16
"""The shortest length that programs are compiled for."""


class NotFiniteError(ValueError):
    """A model's logits are not finite, so that no token can be drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """The result of `HybridEngine.generate`, as NumPy arrays.

    Attributes:
      tokens: int32[B, max_new_tokens], the new tokens without the prompts; `pad` after a row's end.
      lengths: int32[B], the number of each row's own tokens, the end token included.
      logprobs: float32[B, max_new_tokens], the log-probability of each token under the model
        (temperature 1, all tokens); 0 after a row's end.
      reshard_s: seconds that the tensor-parallel copy took; 0 if it was still there.
      generate_s: seconds from then on; a first call's compilation is included.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    reshard_s: float
    generate_s: float

    def rows(self) -> list[np.ndarray]:
        """Return each row's own tokens."""
        return [row[:n] for row, n in zip(self.tokens, self.lengths, strict=True)]


@dataclasses.dataclass(frozen=True, slots=True)
class LengthLimits:
    """Limits how long sequences may be, and rounds their lengths up to compiled ones.

    Attributes:
      max_length: the most tokens of a prompt and its continuation together.
      multiple: whole rows have a multiple of so many tokens, and so has `max_length`.
    """

    max_length: int
    multiple: int = 1

    @staticmethod
    def of(max_length: int | None, context: int | None) -> LengthLimits:
        """Take the user's number, or the model's context if the user gives none.

        Raises:
          ValueError: neither is known, or the user's number exceeds the model's context.
        """
        if max_length is None and context is None:
            raise ValueError(
                "the model does not say how long its sequences may be (an attribute such as "
                "`length` or `max_position_embeddings`); pass max_length="
            )
        if max_length is not None and (max_length < 2 or max_length != int(max_length)):
            raise ValueError(f"max_length={max_length} must be a whole number, 2 or more")
        if max_length is not None and context is not None and max_length > context:
            raise ValueError(
                f"max_length={max_length} exceeds the model's context of {context} tokens; pass "
                "at most that, or leave it out"
            )
        found = context if max_length is None else int(max_length)
        assert found is not None
        return LengthLimits(found)

    def in_multiples(self, multiple: int) -> LengthLimits:
        """Return the limits for a model whose rows must have a multiple of so many tokens.

        Raises:
          ValueError: no such row is within the limit.
        """
        if multiple > self.max_length:
            raise ValueError(
                f"sample_length={multiple} exceeds the most tokens of a row, {self.max_length}; "
                "give at most that"
            )
        return LengthLimits(self.max_length // multiple * multiple, multiple)

    def buckets(self, prompt: int, new: int) -> tuple[int, int]:
        """Return the lengths to compile for, of prompts and of new tokens.

        Both are powers of two, cut to the limit. The prompts' length is one more, because their
        last token is read together with the first new one.

        Raises:
          ValueError: both together exceed the limit.
        """
        if prompt + new > self.max_length:
            room = self.max_length - new
            remedy = (
                f"cut the prompts to {room} tokens, or ask for fewer new ones"
                if room > 0
                else f"ask for {self.max_length - 1} new ones at most, and cut the prompts"
            )
            raise ValueError(
                f"the longest prompt has {prompt} tokens and max_new_tokens={new}: together "
                f"{prompt + new}, and the model's context is {self.max_length}; {remedy}"
            )
        prompt_bucket = min(bucket(max(prompt - 1, 1)) + 1, self.max_length - new)
        return prompt_bucket, min(bucket(new), self.max_length - prompt_bucket)

    def bucket(self, length: int) -> int:
        """Return the length to compile for, for whole rows of a length.

        Raises:
          ValueError: the rows exceed the limit, or are empty.
        """
        whole = -(-bucket(self.checked(length)) // self.multiple) * self.multiple
        return min(whole, self.max_length)

    def checked(self, length: int) -> int:
        """Return a length of whole rows, if it is within the limit.

        Raises:
          ValueError: the rows exceed the limit, or are empty.
        """
        if not 0 < length <= self.max_length:
            raise ValueError(
                f"rows of {length} tokens exceed the model's context of {self.max_length}; cut them"
                if length > 0
                else f"rows of {length} tokens; give 1 or more"
            )
        return length


def bucket(length: int) -> int:
    """Return the smallest power of two that is not below a length, at least `SMALLEST`."""
    return max(SMALLEST, 1 << (length - 1).bit_length())


def as_rows(prompts: Any) -> list[np.ndarray]:
    """Return prompts as one array of tokens each.

    Args:
      prompts: a sequence of sequences of token numbers, of any lengths; or an array [B, P].

    Raises:
      ValueError: there are no prompts, one is empty, or they do not hold token numbers.
    """
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        raise ValueError(
            f"the prompts are a {type(prompts).__name__}; pass a list of lists of token numbers"
        )
    rows = [np.asarray(row) for row in prompts]
    if not rows:
        raise ValueError("there are no prompts; pass one or more")
    for i, row in enumerate(rows):
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ValueError(
                f"prompt {i} has the shape {row.shape} and dtype {row.dtype}; a prompt is one row "
                "of token numbers"
            )
        if not row.size:
            raise ValueError(
                f"prompt {i} is empty: there is nothing to continue; give it a token, such as the "
                "tokenizer's start of a text"
            )
    return rows


def as_whole_rows(tokens: Any) -> np.ndarray:
    """Return rows of one length as an array [B, L].

    Raises:
      ValueError: they do not hold token numbers, or L is below 2.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or tokens.shape[1] < 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"tokens have the shape {tokens.shape} and dtype {tokens.dtype}; pass whole "
            "numbers [B, L] with L of 2 or more"
        )
    return tokens


def check_vocabulary(rows: Sequence[np.ndarray], size: int, what: str) -> None:
    """Check that tokens are in the model's vocabulary.

    Args:
      rows: whole numbers.
      size: the number of different tokens.
      what: a word for a row, for messages.

    Raises:
      ValueError: a token is negative or too large.
    """
    for i, row in enumerate(rows):
        for token in (row.min(), row.max()):
            if not 0 <= token < size:
                raise ValueError(
                    f"{what} {i} holds the token {token}, and the model's vocabulary is "
                    f"0 to {size - 1}; use the tokenizer of this model, or pass call= if its call "
                    "returns something else than logits"
                )


def end_tokens(eos: Any, pad: int, size: int) -> np.ndarray:
    """Return the tokens that end a row as int32[E], [-1] for none; and check that the model can
    draw them, and read the one after them.

    Args:
      eos: a token, several ones, or None.
      pad: the token after the end.
      size: the number of different tokens.

    Raises:
      ValueError: one of them is not in the vocabulary.
    """

    def is_token(x: Any) -> bool:
        return isinstance(x, int | np.integer) and 0 <= int(x) < size

    if not is_token(pad):
        raise ValueError(
            f"pad={pad}, and the model's vocabulary is 0 to {size - 1}; the model reads "
            "it in rows that have ended, so give one of them"
        )
    ends = [] if eos is None else list(eos) if isinstance(eos, Sequence | np.ndarray) else [eos]
    if not all(map(is_token, ends)):
        raise ValueError(
            f"eos={eos}, and the model's vocabulary is 0 to {size - 1}; give one of "
            "them, several, or None if no token ends a row"
        )
    return np.array(ends or [-1], np.int32)


def left_padded(rows: Sequence[np.ndarray], num_rows: int, length: int) -> dict[str, np.ndarray]:
    """Return `prompt` int32[num_rows, length], padded on the left, and `length` int32[num_rows].

    Rows beyond the given ones repeat the first row; the caller drops their results.
    """
    prompt = np.zeros((num_rows, length), np.int32)
    lengths = np.zeros(num_rows, np.int32)
    for i in range(num_rows):
        row = rows[i] if i < len(rows) else rows[0]
        prompt[i, length - len(row) :] = row
        lengths[i] = len(row)
    return {"prompt": prompt, "length": lengths}


def check_finite(finite_B: np.ndarray) -> None:
    """Check that every row's tokens were drawn from distributions.

    Raises:
      NotFiniteError: some row's logits were not finite.
    """
    if not finite_B.all():
        bad = np.flatnonzero(~finite_B).tolist()
        raise NotFiniteError(
            f"the logits of the rows {bad} are not finite (-inf, for tokens that are ruled "
            "out, would be); the state's parameters hold NaN or infinity, or the compute dtype "
            "overflows: look at the `finite` metric of its training"
        )
