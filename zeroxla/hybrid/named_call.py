"""Calls a model with the arguments that its signature names.

Shape letters: B rows, L tokens, M places of the cache (without a cache, M is L).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from zeroxla.hybrid.call_names import EVALUATION, CallNames


class Call(Protocol):
    """Calls a model, as the argument `call` of `HybridEngine` does."""

    def __call__(
        self,
        model: Callable[..., Any],
        tokens: jax.Array,
        *,
        positions: jax.Array,
        mask: jax.Array,
        cache: Any,
    ) -> Any:
        """Return the logits [B, L, V] of tokens.

        Args:
          model: the module's call, with the state's parameters and in evaluation.
          tokens: int32[B, L].
          positions: int32[B, L], the tokens' positions.
          mask: int32[B, M], 1 at each of the cache's M places that holds or will hold a real token.
            Zeros are on the left only. A token must not see places after its own, whose number is
            its position and the number of the row's zeros. In a call on whole rows M is L.
          cache: the cache; None in a call on whole rows. A cache in the module's variables is read
            and advanced by calling `model`, once; these variables come here too, an empty dict in
            the call that makes them.

        Returns:
          An array of logits; or a tuple that begins with it, or an object or a dict with `logits`.
          If the module takes its cache as an argument, one of the other parts of this tuple, object
          or dict is the new cache.
        """
        ...


MaskForm = Literal["places", "tokens", "heads"]
"""The shape of a mask: int32[B, M], bool[B, L, M] or bool[B, 1, L, M]. The last two say for each
token which places it sees: those of real tokens up to its own."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NamedCall:
    """One way of calling a model by the names of its arguments; a `Call`.

    Attributes:
      names: the names.
      optional: whether positions and the mask are given where the call could do without.
      flags: whether all flags are given, not only those that evaluation needs.
      gives_cache: whether the call takes its cache as an argument.
      form: the shape of the mask.
    """

    names: CallNames
    optional: bool
    flags: bool
    gives_cache: bool
    form: MaskForm = "places"

    def __call__(
        self,
        model: Callable[..., Any],
        tokens: jax.Array,
        *,
        positions: jax.Array,
        mask: jax.Array,
        cache: Any,
    ) -> Any:
        """Call the model; see `Call`."""
        names = self.names
        given: dict[str, Any] = {
            flag: EVALUATION[flag] for flag in (names.flags if self.flags else names.needed)
        }
        if names.positions is not None and self._gives(names.positions):
            given[names.positions] = positions
        if names.mask is not None and self._gives(names.mask):
            given[names.mask] = _mask(self.form, positions, mask)
        if names.segments is not None and names.segments in names.required:
            given[names.segments] = jnp.ones_like(tokens)
        if names.cache is not None and (self.gives_cache or names.cache in names.required):
            given[names.cache] = cache if self.gives_cache else None
        if names.tokens is not None:
            return model(**{names.tokens: tokens}, **given)
        return model(tokens, **given)

    def _gives(self, name: str) -> bool:
        return self.optional or name in self.names.required


def ways(names: CallNames, *, cached: bool, gives_cache: bool) -> Iterator[NamedCall]:
    """Yield the ways to call a model, the likeliest first.

    Args:
      names: the names of the call's arguments.
      cached: whether the call has a cache. Then positions and masks are always given, since rows
        are padded on the left. Otherwise the first way gives no more than the call requires.
      gives_cache: whether the call takes its cache as an argument.
    """
    for optional, flags in ((False, False), (True, False), (True, True), (False, True)):
        if cached and not optional:
            continue
        masked = names.mask is not None and (optional or names.mask in names.required)
        forms: tuple[MaskForm, ...] = ("places", "tokens", "heads") if masked else ("places",)
        for form in forms:
            yield NamedCall(
                names=names, optional=optional, flags=flags, gives_cache=gives_cache, form=form
            )


def _mask(form: MaskForm, positions_BL: jax.Array, mask_BM: jax.Array) -> jax.Array:
    """Return a mask of a form; `mask_BM` has zeros on the left only."""
    if form == "places":
        return mask_BM
    pads_B1 = jnp.sum(mask_BM == 0, axis=1, keepdims=True, dtype=positions_BL.dtype)
    place_BL = positions_BL + pads_B1
    reached_BLM = place_BL[:, :, None] >= jnp.arange(mask_BM.shape[1])
    seen_BLM = reached_BLM & (mask_BM[:, None, :] != 0)
    return seen_BLM if form == "tokens" else seen_BLM[:, None]
