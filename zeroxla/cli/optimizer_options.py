"""Options of the optimizer, which several commands share, and the optimizer that they make."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from zeroxla.cli.option_groups import LARGEST, flag

if TYPE_CHECKING:
    import optax

_PARAMETERS = ("beta1", "beta2", "epsilon", "momentum")
_RATES = ("learning_rate", "critic_learning_rate", "warmup", "min_rate")
_TAKES = {
    "adamw": ("beta1", "beta2", "epsilon"),
    "lamb": ("beta1", "beta2", "epsilon"),
    "lion": ("beta1", "beta2"),
    "adafactor": ("momentum", "epsilon"),
    "sgd": ("momentum",),
}


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer."""

    optimizer: Literal["adamw", "lamb", "lion", "adafactor", "sgd"] | None = None
    """Optimizer, as optax has it. Default: adamw, or the one of --deepspeed."""
    beta1: float | None = None
    """Decay of the mean of gradients; of adamw, lamb and lion. Default: 0.9."""
    beta2: float | None = None
    """Decay of the mean of squared gradients; of adamw, lamb and lion. Default: 0.999, of lion
    0.99, and of adamw in `zeroxla train` 0.95."""
    epsilon: float | None = None
    """Small number in the denominator; of adamw, lamb and adafactor. Default: optax's."""
    momentum: float | None = None
    """Momentum; of sgd and adafactor. Default: none."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices only. sgd adds it to the gradient."""
    clip: float = 1.0
    """Largest global gradient norm; larger gradients are clipped to it. 0 clips nothing."""

    def __post_init__(self) -> None:
        name = self.optimizer or "adamw"
        for own in _PARAMETERS:
            value = getattr(self, own)
            if value is None:
                continue
            if own not in _TAKES[name]:
                takers = [x for x, taken in _TAKES.items() if own in taken]
                raise ValueError(
                    f"{flag(own)} {value}: --optimizer {name} has none; leave it out, or take one "
                    f"of {', '.join(takers)}"
                )
            if own != "epsilon" and not 0 <= value < 1:
                raise ValueError(f"{flag(own)} {value} must be at least 0, and below 1")
            if own == "epsilon" and not 0 < value <= LARGEST:
                raise ValueError(f"--epsilon {value} must be above 0, and finite in float32")
        for own in ("weight_decay", "clip"):
            value = getattr(self, own)
            if value is not None and not 0 <= value <= LARGEST:
                raise ValueError(f"{flag(own)} {value} must be at least 0, and finite in float32")

    def check_own(self, usual: OptimizerOptions, used: Collection[str] = ()) -> None:
        """Check that no option of the optimizer was given beside the optimizer of a file.

        Args:
          usual: the defaults.
          used: options that the file leaves to the command.

        Raises:
          ValueError: options would have no effect.
        """
        every = (*_PARAMETERS, "weight_decay", "clip", *_RATES)
        found = [
            flag(x)
            for x in every
            if x not in used and getattr(self, x, None) != getattr(usual, x, None)
        ]
        if found:
            raise ValueError(
                f"{', '.join(found)}: without effect, --deepspeed says what the optimizer is; "
                "leave out, or name an --optimizer, which takes the place of the file's"
            )

    def make(
        self, rate: float | Callable[[Any], Any], *, beta2: float = 0.999
    ) -> optax.GradientTransformation:
        """Return the optimizer, with clipping, and with weight decay on matrices only.

        Args:
          rate: the learning rate, or a schedule.
          beta2: the default of adamw's beta2.
        """
        import jax  # here, because --help need not wait for JAX
        import optax

        def decayed(params: Any) -> Any:
            return jax.tree_util.tree_map_with_path(
                lambda path, _: getattr(path[-1], "key", None) in ("kernel", "embedding"), params
            )

        names = {"beta1": "b1", "beta2": "b2", "epsilon": "eps", "momentum": "momentum"}
        given = {names[n]: x for n in _PARAMETERS if (x := getattr(self, n)) is not None}
        decay = {"weight_decay": self.weight_decay, "mask": decayed}
        match self.optimizer or "adamw":
            case "adamw":
                made = optax.adamw(rate, **{"b2": beta2, **given}, **decay)
            case "lamb":
                made = optax.lamb(rate, **given, **decay)
            case "lion":
                made = optax.lion(rate, **given, **decay)
            case "adafactor":
                # optax's own decay would not be multiplied by the rate. Without a rate it descends.
                made = optax.chain(
                    optax.adafactor(**given),
                    optax.add_decayed_weights(-self.weight_decay, mask=decayed),
                    optax.scale_by_learning_rate(rate, flip_sign=False),
                )
            case "sgd":
                added = optax.add_decayed_weights(self.weight_decay, mask=decayed)
                made = optax.chain(added, optax.sgd(rate, **given))
        return made if self.clip == 0 else optax.chain(optax.clip_by_global_norm(self.clip), made)
