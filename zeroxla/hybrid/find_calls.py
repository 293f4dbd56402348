"""Finds out how a model is called: by tracing likely calls until one returns logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.frontend import Adapted
from zeroxla.frontend.base import Tree
from zeroxla.hybrid.call_names import CallNames
from zeroxla.hybrid.calls import OWN, CacheCall, MakeCache, ModelCalls, NoLogitsError
from zeroxla.hybrid.named_call import Call, ways
from zeroxla.program.trace import trace

NUM_ROWS = 5
"""The number of rows of a sample: unlike the tokens, so that no array fits by chance."""

SHORTEST = 4
"""The shortest rows that a call is tried on."""


def sample_places(length: int, limit: int | None) -> int:
    """Return the number of a sample cache's places, for samples of a length without a cache: a
    multiple of it, since whole rows may need one.

    Args:
      length: the length of the samples.
      limit: the most tokens of a row; None for no limit.
    """
    return 2 * length if limit is None or 2 * length <= limit else length


def several_tokens(places: int) -> int:
    """Return the number of tokens that a sample reads at a time into a cache of so many places."""
    return max(places // 2 - 1, 1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallOptions:
    """What a user says about the calls of a model.

    Attributes:
      call, make_cache, cache_dtype: as for `HybridEngine`.
      sample_length: the length of rows that the call is tried on; None tries several.
      limit: the most tokens of a row.
    """

    call: Call | None = None
    make_cache: MakeCache | None = None
    cache_dtype: Any = None
    sample_length: int | None = None
    limit: int | None = None

    def lengths(self) -> list[int]:
        """Return the lengths to try: `SHORTEST` and its doubles."""
        if self.sample_length is not None:
            return [self.sample_length]
        limit = self.limit or 8
        found = [min(SHORTEST, limit)]
        while 2 * found[-1] <= limit:
            found.append(2 * found[-1])
        return found


def find_calls(
    adapted: Adapted, params: Tree, model_state: Tree, dtype: Any, options: CallOptions
) -> tuple[ModelCalls, int]:
    """Return the calls of a model, and the length of the rows that they were tried on.

    Nothing is computed: the calls are traced.

    Args:
      adapted: the model.
      params, model_state: the shapes of its leaves and of its other collections.
      dtype: the dtype of the cache, if the user gives none and the module agrees.
      options: what the user says.

    Raises:
      ValueError: the model is a pair (init, loss), or no call returns logits.
    """
    if adapted.bound is None or adapted.signature is None:
        raise ValueError(
            "the model is a pair (init, loss) and generation needs its logits; pass a flax "
            "module, whose call takes tokens [B, L] and returns logits [B, L, V]. A Pipeline of "
            "listed layers is such a pair, too; Pipeline.from_model makes one of a module"
        )
    names = CallNames.of(adapted.signature)
    if names.unknown and options.call is None:
        raise ValueError(
            f"the model's call takes {', '.join(names.unknown)}, which generation does not know "
            f"(the signature is {adapted.signature}); pass call=, a function of the call and the "
            "tokens that returns logits"
        )
    make = options.make_cache or adapted.make_cache
    found, length = _whole_rows(adapted, params, model_state, names, make, options)
    places = sample_places(length, options.limit or adapted.context)
    cache = _find_cache(found, params, model_state, names, make, dtype, places, options)
    if isinstance(cache, str):
        found = dataclasses.replace(found, no_cache=cache)
        return found.with_traced(params, model_state, NUM_ROWS, places), length
    return dataclasses.replace(found, with_cache=cache), length


def _whole_rows(
    adapted: Adapted,
    params: Tree,
    model_state: Tree,
    names: CallNames,
    make: MakeCache | None,
    options: CallOptions,
) -> tuple[ModelCalls, int]:
    """Return the first call on whole rows that returns logits, and the length that it took."""
    lengths, errors = options.lengths(), []
    caches = [None] if make is None or names.cache not in names.required else [None, make]
    for length in lengths:
        tokens = jax.ShapeDtypeStruct((NUM_ROWS, length), jnp.int32)
        for cache in caches:
            named = ways(names, cached=False, gives_cache=cache is not None)
            for call in [options.call] if options.call else named:
                found = ModelCalls(adapted=adapted, call=call, fresh_cache=cache)
                try:
                    jax.eval_shape(found.forward, params, model_state, tokens)
                except Exception as error:  # Whatever a model raises on arguments it does not take.
                    errors.append(error)
                else:
                    return found, length
    first = errors[0]
    if isinstance(first, NoLogitsError):
        raise first
    told = ", ".join(map(str, lengths))
    raise ValueError(
        f"the model's call {adapted.signature} fails on rows of {told} tokens: "
        f"{_told(first)}. If it takes other arguments, pass call=, a function of the call and the "
        "tokens that returns logits; if it takes rows of other lengths, pass sample_length="
    ) from first


def _find_cache(
    found: ModelCalls,
    params: Tree,
    model_state: Tree,
    names: CallNames,
    make: MakeCache | None,
    dtype: Any,
    places: int,
    options: CallOptions,
) -> CacheCall | str:
    """Return how a model is called with a cache, or the reason why it is not."""
    if make is None and found.adapted.caching is None:
        return (
            'the model has no cache (linen: a field "decode", or an argument init_cache; nnx: a '
            "method init_cache(shape, dtype); or an argument of its call, and a method that makes "
            "it, or make_cache=)"
        )
    errors = []
    for candidate in _cache_calls(names, make, dtype, options):
        for num in dict.fromkeys((several_tokens(places), 1)):
            try:
                return _tried(found, candidate, params, model_state, dtype, places, num)
            except Exception as error:  # As above.
                errors.append(error)
    first = errors[0]
    return f"the model's cache cannot be used ({_told(first)})"


def _cache_calls(
    names: CallNames, make: MakeCache | None, dtype: Any, options: CallOptions
) -> Iterator[CacheCall]:
    """Yield the calls to try: in the dtype that the engine wants, then in the module's own."""
    dtypes = [dtype] if options.cache_dtype is not None else [dtype, OWN]
    for kind in dtypes:
        named = ways(names, cached=True, gives_cache=make is not None)
        for call in [options.call] if options.call else named:
            yield CacheCall(call=call, make=make, dtype=kind)


def _tried(
    found: ModelCalls,
    how: CacheCall,
    params: Tree,
    model_state: Tree,
    dtype: Any,
    places: int,
    num_tokens: int,
) -> CacheCall:
    """Return a call with a cache, if it reads so many tokens; raise the model's error otherwise."""
    calls = dataclasses.replace(found, with_cache=how)
    cache = jax.eval_shape(lambda: calls.empty_cache(params, model_state, NUM_ROWS, places, dtype))
    if not jax.tree.leaves(cache):
        raise ValueError("it is empty")
    tokens = jax.ShapeDtypeStruct((NUM_ROWS, num_tokens), jnp.int32)
    mask = jax.ShapeDtypeStruct((NUM_ROWS, places), jnp.int32)
    inputs = (params, model_state, cache, tokens, tokens, mask)
    program, _ = trace(calls.cached, *inputs)
    read = {value for eq in program.equations for value in eq.values}
    padded = all(value in read for value in program.inputs[-2:])
    return dataclasses.replace(
        how, rows="padded" if padded else "aligned", one_token=num_tokens == 1
    )


def _told(error: Exception) -> str:
    """Return an error's kind and the first lines of its message."""
    lines = str(error).strip().splitlines()
    text = " ".join(line.strip() for line in lines[:3])
    return f"{type(error).__name__}: {text[:300]}"
