"""How Hugging Face configs write rotary positions, in two spellings."""

from collections.abc import Mapping
from typing import Any

from .rope_scaling import RopeScaling


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
