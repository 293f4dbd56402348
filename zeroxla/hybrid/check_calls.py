"""Checks by computing, on a small random instance, that a model's calls mean the usual thing.

Whole rows: the logits at a token depend on this token and on earlier ones. With a cache: they are
those of whole rows, for prompts that are padded on the left or begin together.

Shape letters: B rows, L tokens, M places of the cache, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zeroxla.hybrid.calls import ModelCalls
from zeroxla.hybrid.find_calls import NUM_ROWS
from zeroxla.hybrid.model import LanguageModel, Samples
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.small_instance import SmallInstance

TOLERANCE = 1e-3
"""Largest difference of equal logits, relative to the largest logit, in float32."""

TOLERANCE_16_BITS = 5e-2
"""The same, if the model computes with 16 bits somewhere."""

SHIFTED = (
    "the model's logits at a token depend on the tokens before it, and not on the token itself: it "
    "shifts its inputs, so its logits are a prediction of the token at their own place. Generation "
    "takes the logits at the last token for the next one; undo the shift with "
    "call=lambda model, tokens, **_: model(jnp.pad(tokens, ((0, 0), (0, 1))))[:, 1:], and give a "
    "max_length= one below the model's context"
)
NOT_CAUSAL = (
    "the model is not causal: its logits at a token change when a later token does. Generation "
    "pads rows on the right, which only causal models do not see; if the call takes a mask that "
    "makes it causal, give it with call="
)


def checked_calls(model: LanguageModel) -> ModelCalls:
    """Return a model's calls, with those left out that compute something else than whole rows do.

    Nothing is said of models whose small instance is too large, or whose logits do not tell.

    Args:
      model: the model, with calls that can be traced.

    Raises:
      ValueError: the model is not causal, or shifts its inputs.

    Cost: two small programs are compiled and run on one device.
    """
    samples = model.samples()
    programs = [p for p in (samples.forward, samples.several, samples.one) if p is not None]
    small = SmallInstance.of(programs, samples.leaves)
    if small is None:
        return model.calls
    trial = Trial.of(model, samples, small)
    rows, length = trial.tokens.shape
    if length < 2:
        return model.calls
    logits_BLV, *changed = trial.whole_rows(trial.tokens, *trial.changed())
    if logits_BLV.shape[:2] != (rows, length) or not np.isfinite(logits_BLV).any():
        return model.calls
    if (wrong := trial.wrong_order(logits_BLV, *changed)) is not None:
        raise ValueError(wrong)
    calls = _with_right_cache(model.calls, trial, logits_BLV)
    how = model.calls.with_cache
    if calls.has_cache or how is None or how.traced is not None:
        return calls
    shape = NUM_ROWS, model.sample_places
    traced = calls.with_traced(model.params, model.model_state, *shape)
    return checked_calls(dataclasses.replace(model, calls=traced))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trial:
    """A small instance of a model's programs, and rows of tokens to try it on.

    Attributes:
      model: the model.
      samples: its programs.
      small: the small instance.
      tokens: int32[B, L], none of them 0, which some models take for padding.
      model_state: values of the model's other collections.
      tolerance: the largest difference of equal logits, relative to the largest logit.
    """

    model: LanguageModel
    samples: Samples
    small: SmallInstance
    tokens: np.ndarray
    model_state: Any
    tolerance: float

    @staticmethod
    def of(model: LanguageModel, samples: Samples, small: SmallInstance) -> Trial:
        """Draw the tokens and the model state."""
        generator = np.random.default_rng(1)
        *_, tokens = samples.forward.flow.program.inputs
        is_narrow = any(jnp.finfo(dtype).bits < 32 for dtype in _floats(samples.forward.flow))

        def state(x: jax.ShapeDtypeStruct) -> np.ndarray:
            return generator.uniform(0.5, 1.5, x.shape).astype(x.dtype)

        return Trial(
            model=model,
            samples=samples,
            small=small,
            tokens=generator.integers(1, 3, tokens.aval.shape).astype(np.int32),
            model_state=jax.tree.map(state, model.model_state),
            tolerance=TOLERANCE_16_BITS if is_narrow else TOLERANCE,
        )

    def changed(self) -> list[np.ndarray]:
        """Return the tokens with another last one in the last row, and with another one before."""
        found = []
        for place in (-1, -2):
            other = self.tokens.copy()
            other[-1, place] = 3 - other[-1, place]
            found.append(other)
        return found

    def whole_rows(self, *batches: np.ndarray) -> list[np.ndarray]:
        """Return the logits of batches of whole rows."""

        @jax.jit
        def run(leaves: Any, tokens_BL: jax.Array) -> jax.Array:
            return self.small.run(self.samples.forward, leaves, {}, self.model_state, tokens_BL)[0]

        return [np.asarray(run(self.small.leaves, tokens_BL)) for tokens_BL in batches]

    def wrong_order(
        self, logits_BLV: np.ndarray, last_BLV: np.ndarray, before_BLV: np.ndarray
    ) -> str | None:
        """Return the reason why the logits' dependence on tokens is not the usual one, if so.

        Args:
          logits_BLV: the logits of `tokens`.
          last_BLV, before_BLV: the logits of `changed`.
        """
        last, before = (
            [not self.is_equal(a, b) for a, b in zip(logits_BLV[-1], x[-1], strict=True)]
            for x in (last_BLV, before_BLV)
        )
        if any(last[:-1]) or any(before[:-2]):
            return NOT_CAUSAL
        if before[-1] and not before[-2] and not last[-1]:
            return SHIFTED
        return None

    def is_equal(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Whether logits are equal, rounding aside. Infinite ones rule tokens out."""
        finite = np.isfinite(a)
        if np.any(finite != np.isfinite(b)):
            return False
        scale = max(np.abs(a[finite]).max(initial=0.0), 1e-30)
        return bool(np.all(np.abs(a[finite] - b[finite]) <= self.tolerance * scale))

    def cache_is_right(self, calls: ModelCalls, logits_BLV: np.ndarray) -> bool:
        """Whether calls with a cache return the logits of whole rows."""
        how = calls.with_cache
        assert how is not None
        rows, length = self.tokens.shape
        pads_B = np.arange(rows) % min(3, length) if how.rows == "padded" else np.zeros(rows, int)
        tokens_BL = np.zeros_like(self.tokens)
        for row, pad in enumerate(pads_B):
            tokens_BL[row, pad:] = self.tokens[row, : length - pad]
        positions_BL = np.maximum(np.arange(length) - pads_B[:, None], 0).astype(np.int32)
        found_BLV = np.asarray(self._with_cache(tokens_BL, positions_BL, pads_B, how.one_token))
        return all(
            self.is_equal(logits_BLV[row, : length - pad], found_BLV[row, pad:])
            for row, pad in enumerate(pads_B)
        )

    def _with_cache(
        self, tokens_BL: np.ndarray, positions_BL: np.ndarray, pads_B: np.ndarray, one_token: bool
    ) -> jax.Array:
        """Return the logits of rows that are read with a cache: several tokens, if it can, and then
        one by one."""
        one, several = self.samples.one, self.samples.several
        assert one is not None
        rows = len(tokens_BL)
        places = one.flow.program.inputs[-1].aval.shape[1]
        mask_BM = (np.arange(places) >= pads_B[:, None]).astype(np.int32)
        first = 0 if several is None or one_token else several.flow.program.inputs[-3].aval.shape[1]

        @jax.jit
        def run(leaves: Any, tokens_BL: Any, positions_BL: Any, mask_BM: Any) -> jax.Array:
            def read(program: Any, cache: Any, tokens: jax.Array, positions: jax.Array) -> Any:
                inputs = (self.model_state, tokens, positions, mask_BM)
                return self.small.run(program, leaves, cache, *inputs)

            cache, found = self._empty(rows, places), []
            if first:
                logits, cache = read(several, cache, tokens_BL[:, :first], positions_BL[:, :first])
                found.append(logits)

            def turn(cache: Any, now: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
                logits, cache = read(one, cache, *(x[:, None] for x in now))
                return cache, logits[:, 0]

            rest = (tokens_BL[:, first:].T, positions_BL[:, first:].T)
            _, each = lax.scan(turn, cache, rest)
            return jnp.concatenate([*found, jnp.swapaxes(each, 0, 1)], axis=1)

        return run(self.small.leaves, tokens_BL, positions_BL, mask_BM)

    def _empty(self, rows: int, places: int) -> Any:
        """Return an empty small cache."""
        one, how = self.samples.one, self.model.calls.with_cache
        assert one is not None
        assert how is not None
        if how.make is None:
            return self.small.zeros(one)
        return one.carry_parts(self.small.axis, self.model.empty_cache(rows, places))


def _floats(flow: DimsFlow) -> set[Any]:
    """Return the floating dtypes that a program computes with, in its loops too."""
    outputs = (value for eq in flow.program.equations for value in eq.outputs)
    own = {value.aval.dtype for value in outputs if value.is_float}
    return own.union(*(_floats(body) for bodies in flow.bodies.values() for body in bodies))


def _with_right_cache(calls: ModelCalls, trial: Trial, logits_BLV: np.ndarray) -> ModelCalls:
    """Return the calls with the quickest use of the cache that is right, or without one."""
    if calls.with_cache is None:
        return calls
    for candidate in _cache_uses(calls):
        if trial.cache_is_right(candidate, logits_BLV):
            return candidate
    which = "the model's cache"
    if calls.with_cache.traced is not None:
        which = f"{calls.no_cache}, and the one made from its trace"
    why = (
        f"{which} is not used, since with it a small instance of the model computes other logits "
        "than on whole rows"
    )
    return dataclasses.replace(calls, with_cache=None, no_cache=why)


def _cache_uses(calls: ModelCalls) -> Iterator[ModelCalls]:
    """Yield the ways to use a cache: padded rows before aligned ones, several tokens before one."""
    how = calls.with_cache
    assert how is not None
    for one_token in (False, True):
        for rows in ("padded", "aligned"):
            if (one_token or not how.one_token) and (rows == "aligned" or how.rows == "padded"):
                cache = dataclasses.replace(how, one_token=one_token, rows=rows)
                yield dataclasses.replace(calls, with_cache=cache)
