"""`Rewrite`: which parts of a model's trace are rewritten to keep less in memory."""

from __future__ import annotations

import dataclasses

from zeroxla.config.values import whole_number

KINDS = ("attention", "loss", "norms")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rewrite:
    """What a step looks for in the trace of a model, to compute it in a form that keeps less.

    What is found is tried on a small instance first. What computes something else there stays as it
    is, and so does all that is found nowhere. `Step.describe` reports both.

    Raises:
      ValueError: nothing is looked for, or a size is out of range.
    """

    attention: bool = True
    """Attention that holds all scores, a softmax of products of queries and keys times values,
    becomes attention by blocks."""

    loss: bool = True
    """A loss of a head's logits computes the logits of some positions at a time."""

    norms: bool = True
    """Norms and activation functions keep their inputs for backward, and compute the rest
    again."""

    attention_block: int = 512
    """The number of queries, and of keys, whose scores exist at a time. Shorter attention stays as
    it is."""

    loss_chunk: int = 512
    """The number of positions whose logits exist at a time. Fewer stay as they are."""

    def __post_init__(self) -> None:
        for name in KINDS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"Rewrite({name}={value!r}): give True or False")
        if not any(getattr(self, name) for name in KINDS):
            raise ValueError(
                f"Rewrite with {', '.join(f'{name}=False' for name in KINDS)} looks for nothing; "
                "leave rewrite= out"
            )
        for name in ("attention_block", "loss_chunk"):
            value = whole_number(f"Rewrite.{name}", getattr(self, name), 1)
            if value is None:
                raise ValueError(f"Rewrite({name}=None): give a number of positions")
            object.__setattr__(self, name, value)
