"""Rotary positions, their scaling for long sequences, and how Hugging Face configs write it.

Shape letters: B batch, L positions, N heads, H head width, h = H / 2 frequencies.
Source: Su et al., arXiv 2104.09864; the scaling `llama3` is the one of Llama 3.1.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

KEYS = {
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
}
"""The numbers that each kind of scaling needs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are lowered. The names are Hugging Face's.

    Attributes:
      rope_type: "linear" divides every frequency by `factor`. "llama3" divides frequencies whose
        wavelength is above original_max_position_embeddings / low_freq_factor, and keeps those
        below original_max_position_embeddings / high_freq_factor. Between them it interpolates.
      factor: the divisor, at least 1.
      low_freq_factor, high_freq_factor, original_max_position_embeddings: only "llama3" has them.
    """

    rope_type: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

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
        values = dict(values)
        kind = values.pop("type", "default")
        kind = values.pop("rope_type", kind)
        if kind not in ("default", *KEYS):
            raise ValueError(
                f"rope_scaling has the type {kind!r}, which the model does not compute; it knows "
                "'default', 'linear' and 'llama3'"
            )
        needed = KEYS.get(kind, ())
        missing, unknown = sorted(set(needed) - set(values)), sorted(set(values) - set(needed))
        if missing or unknown:
            raise ValueError(
                f"rope_scaling of the type {kind!r} needs {list(needed)}"
                + (f", and lacks {missing}" if missing else "")
                + (f", and knows nothing of {unknown}" if unknown else "")
            )
        if kind == "default":
            return None
        bad = [name for name in needed if not _is_positive(values[name])]
        if not bad and kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
            bad = ["low_freq_factor", "high_freq_factor"]
        if not bad and values["factor"] < 1:
            bad = ["factor"]
        if bad:
            seen = ", ".join(f"{name}={values[name]!r}" for name in bad)
            raise ValueError(
                f"rope_scaling has {seen}; numbers must be positive, factor at least 1, and "
                "low_freq_factor below high_freq_factor"
            )
        return RopeScaling(rope_type=kind, **values)

    def to_config(self) -> dict[str, Any]:
        """Return the mapping that `of` reads."""
        return {"rope_type": self.rope_type, **{n: getattr(self, n) for n in KEYS[self.rope_type]}}

    def scale(self, frequency_h: jax.Array) -> jax.Array:
        """Return the lowered frequencies, in radians for each position."""
        low = frequency_h / self.factor
        if self.rope_type == "linear":
            return low
        assert self.low_freq_factor
        assert self.high_freq_factor
        assert self.original_max_position_embeddings
        # The number of turns that a pair makes within the sequences of the first training.
        turns_h = self.original_max_position_embeddings * frequency_h / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept_h = jnp.clip((turns_h - self.low_freq_factor) / width, 0, 1)
        return (1 - kept_h) * low + kept_h * frequency_h


def rotary_tables(
    positions_BL: jax.Array, head_width: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin, float32[B, L, 1, h], of the scaled angles position / theta^(2 i / H)."""
    frequency_h = theta ** (-jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width)
    if scaling is not None:
        frequency_h = scaling.scale(frequency_h)
    angle_BLh = positions_BL[..., None].astype(jnp.float32) * frequency_h
    return jnp.cos(angle_BLh)[:, :, None, :], jnp.sin(angle_BLh)[:, :, None, :]


def rotate(x_BLNH: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate each pair (x[i], x[i + H / 2]) by its angle, in float32; return x's dtype."""
    cos, sin = rotation
    first, second = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BLNH.dtype)


def rope_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the theta and rope_scaling of a config.json, in either of its spellings.

    Transformers 5 writes all of it as `rope_parameters`. Earlier versions write `rope_theta` and
    `rope_scaling`. If a config has both, they must agree.

    Raises:
      ValueError: they do not agree, or as `RopeScaling.of`.
    """
    new = config.get("rope_parameters") or {}
    old_theta = config.get("rope_theta")
    default = new.get("rope_theta", 10000.0) if old_theta is None else old_theta
    found: list[dict[str, Any]] = []
    for values in (new, config.get("rope_scaling") or {}):
        if values:
            rest = {name: value for name, value in values.items() if name != "rope_theta"}
            if rest.get("partial_rotary_factor") == 1:  # all pairs are rotated, as they are here
                del rest["partial_rotary_factor"]
            theta = float(values.get("rope_theta", default))
            found.append({"theta": theta, "rope_scaling": RopeScaling.of(rest)})
    if not found:
        found.append({"theta": float(default), "rope_scaling": None})
    if old_theta is not None:
        found.append({**found[-1], "theta": float(old_theta)})
    if any(values != found[0] for values in found):
        raise ValueError(
            f"rope_parameters is {dict(new)}, but rope_scaling is {config.get('rope_scaling')} and "
            f"rope_theta {old_theta}: two ways to say one thing that differ; remove one of them"
        )
    return found[0]


def rope_to_config(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the keys that `rope_of_config` reads, in both spellings, for all Transformers."""
    values = {"rope_type": "default"} if scaling is None else scaling.to_config()
    old = None if scaling is None else dict(values)
    if scaling is not None and scaling.rope_type == "linear":
        old = {"type": "linear", "factor": scaling.factor}  # all that versions before 4.43 accept
    return {
        "rope_parameters": {"rope_theta": theta, **values},
        "rope_theta": theta,
        "rope_scaling": old,
    }


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
