"""How rotary frequencies are lowered for sequences longer than those of the first training.

Shape letters: B batch, L positions, h frequencies.
Sources: "linear", Chen et al., arXiv 2306.15595; "yarn", Peng et al., arXiv 2309.00071; "longrope",
Ding et al., arXiv 2402.13753; "llama3" is the one of Llama 3.1.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

NEEDED = {
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
"""The numbers that each kind of scaling needs."""

OPTIONAL = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
}
"""The numbers that a kind of scaling may have besides."""

_LISTS = ("short_factor", "long_factor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are lowered. The names are Hugging Face's.

    Attributes:
      rope_type: "linear" divides every frequency by `factor`. "llama3" divides frequencies whose
        wavelength is above original_max_position_embeddings / low_freq_factor, and keeps those
        below original_max_position_embeddings / high_freq_factor. Between them it interpolates.
        "yarn" does so between frequencies that turn `beta_slow` and `beta_fast` times within the
        sequences of the first training. "longrope" divides each frequency by a factor of its own:
        `short_factor`, or, in a row with positions from original_max_position_embeddings on,
        `long_factor`.
      factor: the divisor, at least 1.
      low_freq_factor, high_freq_factor: only "llama3" has them.
      original_max_position_embeddings: the length of the sequences of the first training.
      short_factor, long_factor: only "longrope" has them: h numbers.
      beta_fast, beta_slow, mscale, mscale_all_dim, truncate: only "yarn" has them. `truncate` takes
        whole numbers for the first and the last frequency that is interpolated.
      attention_factor: what cos and sin are multiplied with; None means the value that follows from
        the other numbers.
    """

    rope_type: str
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    attention_factor: float | None = None

    @staticmethod
    def of(values: "Mapping[str, Any] | RopeScaling | None") -> "RopeScaling | None":
        """Read the mapping that a config holds. The type "default" gives None, and so does None.

        Args:
          values: "rope_type" (or, in older files, "type") and the numbers that the type needs.

        Raises:
          ValueError: the type is not computed here, or a number is missing, unknown or out of
            range.
        """
        if values is None or isinstance(values, RopeScaling):
            return values
        values = {name: value for name, value in values.items() if value is not None}
        kind = values.pop("type", "default")
        kind = values.pop("rope_type", kind)
        kind = {"su": "longrope"}.get(kind, kind)  # the name in the first files of Phi-3
        if kind not in ("default", *NEEDED):
            raise ValueError(
                f"rope_scaling has the type {kind!r}, which the model does not compute; it knows "
                + ", ".join(map(repr, ("default", *NEEDED)))
            )
        needed = NEEDED.get(kind, ())
        known = {*needed, *OPTIONAL.get(kind, ())}
        missing, unknown = sorted(set(needed) - set(values)), sorted(set(values) - known)
        if missing or unknown:
            raise ValueError(
                f"rope_scaling of the type {kind!r} needs {list(needed)}"
                + (f", and lacks {missing}" if missing else "")
                + (f", and knows nothing of {unknown}" if unknown else "")
            )
        if kind == "default":
            return None
        bad = [name for name in values if not _fits(name, values[name])]
        if not bad and kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
            bad = ["low_freq_factor", "high_freq_factor"]
        if not bad and values.get("factor", 1) < 1:
            bad = ["factor"]
        if bad:
            seen = ", ".join(f"{name}={values[name]!r}" for name in bad)
            raise ValueError(
                f"rope_scaling has {seen}; numbers must be positive, factor at least 1, and "
                "low_freq_factor below high_freq_factor"
            )
        lists = {name: tuple(map(float, values[name])) for name in _LISTS if name in values}
        return RopeScaling(rope_type=kind, **{**values, **lists})

    def to_config(self) -> dict[str, Any]:
        """Return the mapping that `of` reads."""
        names = (*NEEDED[self.rope_type], *OPTIONAL.get(self.rope_type, ()))
        found = {name: getattr(self, name) for name in names}
        found = {name: list(x) if name in _LISTS else x for name, x in found.items()}
        return {"rope_type": self.rope_type, **{n: x for n, x in found.items() if x is not None}}

    def scale(self, frequency_h: jax.Array, theta: float, positions_BL: jax.Array) -> jax.Array:
        """Return the lowered frequencies, in radians for each position.

        Args:
          frequency_h: the frequencies, powers of theta.
          theta: their base.
          positions_BL: the positions of each row.

        Returns:
          [h], or for "longrope" [B, 1, h].

        Raises:
          ValueError: "longrope" has another number of factors than there are frequencies.
        """
        if self.rope_type == "longrope":
            return self._longrope(frequency_h, positions_BL)
        assert self.factor
        low_h = frequency_h / self.factor
        if self.rope_type == "linear":
            return low_h
        if self.rope_type == "llama3":
            kept_h = self._kept_llama3(frequency_h)
        else:
            kept_h = self._kept_yarn(frequency_h.shape[0], theta)
        return (1 - kept_h) * low_h + kept_h * frequency_h

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied with."""
        if self.attention_factor is not None or self.rope_type in ("linear", "llama3"):
            return self.attention_factor or 1.0
        if self.rope_type == "longrope":
            assert self.original_max_position_embeddings
            factor = self.factor or 1.0
            return math.sqrt(1 + math.log(factor) / math.log(self.original_max_position_embeddings))
        if self.mscale and self.mscale_all_dim:
            return self.growth(self.mscale) / self.growth(self.mscale_all_dim)
        return self.growth(1.0)

    def growth(self, mscale: float) -> float:
        """Return 1 + mscale * log(factor) / 10, of "yarn"."""
        assert self.factor
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def _kept_llama3(self, frequency_h: jax.Array) -> jax.Array:
        assert self.low_freq_factor
        assert self.high_freq_factor
        assert self.original_max_position_embeddings
        # The number of turns that a pair makes within the sequences of the first training.
        turns_h = self.original_max_position_embeddings * frequency_h / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        return jnp.clip((turns_h - self.low_freq_factor) / width, 0, 1)

    def _kept_yarn(self, count: int, theta: float) -> jax.Array:
        assert self.original_max_position_embeddings
        length = self.original_max_position_embeddings

        def index(turns: float) -> float:  # of the frequency that makes so many turns
            return count * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

        first, last = index(self.beta_fast or 32.0), index(self.beta_slow or 1.0)
        if self.truncate is not False:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * count - 1)
        span = max(last - first, 1e-3)
        return 1 - jnp.clip((jnp.arange(count, dtype=jnp.float32) - first) / span, 0, 1)

    def _longrope(self, frequency_h: jax.Array, positions_BL: jax.Array) -> jax.Array:
        assert self.original_max_position_embeddings
        factors = {name: jnp.asarray(getattr(self, name), jnp.float32) for name in _LISTS}
        for name, factor_h in factors.items():
            if factor_h.shape != frequency_h.shape:
                raise ValueError(
                    f"rope_scaling has {factor_h.size} numbers in {name}, and there are "
                    f"{frequency_h.size} frequencies; give one for each"
                )
        last_B1 = positions_BL.max(axis=1, keepdims=True)
        is_long = last_B1[..., None] >= self.original_max_position_embeddings
        return frequency_h / jnp.where(is_long, factors["long_factor"], factors["short_factor"])


def _fits(name: str, value: Any) -> bool:
    if name in _LISTS:
        return isinstance(value, list | tuple) and all(map(_is_positive, value))
    if name == "truncate":
        return isinstance(value, bool)
    return _is_positive(value)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
