"""Makes DeepSpeed's optimizers from optax transformations.

Formulas: `deepspeed/ops/adam`, `ops/lamb`, `ops/lion` and their kernels, `runtime/zero/muon`, and
PyTorch for Adagrad and SGD. As there, all leaves share one rate, decay and pair of betas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax
from optax import contrib

from zeroxla.config.deepspeed.schedules import make_scheduler
from zeroxla.config.deepspeed.sections import Findings, Key, nearest, take
from zeroxla.config.deepspeed.update_rules import (
    muon_labels,
    scale_by_bounded_trust_ratio,
    scale_by_moments,
    scale_by_root_of_sum,
)

_RATE, _NUMBER, _FLAG = Key(kind="number"), Key(kind="number"), Key(kind="flag")
_BETAS, _MOMENTUM = Key(kind="pair"), Key(kind="number", below=1)
_TORCH = "it says how PyTorch computes the same numbers"
_PARTS = {name: Key(kind="any", reason=_TORCH) for name in ("foreach", "fused", "set_grad_none")}
_PARTS |= {
    n: Key(kind="any", reason=_TORCH, same=(False,)) for n in ("capturable", "differentiable")
}
_PARTS["fp32_optimizer_states"] = Key(
    kind="flag", reason="the optimizer's state is float32 always", same=(True,)
)
_COMMON = {"lr": _RATE, "weight_decay": _NUMBER, **_PARTS}
_ADAM = {
    **_COMMON,
    "betas": _BETAS,
    "eps": _NUMBER,
    "bias_correction": _FLAG,
    "amsgrad": _FLAG,
    "adam_w_mode": _FLAG,
    "torch_adam": _FLAG,
}
KEYS: dict[str, dict[str, Key]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Lamb": {
        **_COMMON,
        "betas": _BETAS,
        "eps": _NUMBER,
        "bias_correction": _FLAG,
        "amsgrad": _FLAG,
        "eps_inside_sqrt": _FLAG,
        "max_coeff": Key(kind="number", above=0),
        "min_coeff": _NUMBER,
    },
    "Lion": {**_COMMON, "betas": _BETAS},
    "Adagrad": {
        **_COMMON,
        "eps": _NUMBER,
        "lr_decay": _NUMBER,
        "initial_accumulator_value": _NUMBER,
        "amsgrad": _FLAG,
        "maximize": _FLAG,
    },
    "SGD": {
        **_COMMON,
        "momentum": _MOMENTUM,
        "dampening": _NUMBER,
        "nesterov": _FLAG,
        "maximize": _FLAG,
    },
    "Muon": {
        **_COMMON,
        "momentum": _MOMENTUM,
        "betas": _BETAS,
        "eps": _NUMBER,
        "muon_lr": _RATE,
        "adam_lr": _RATE,
        "ns_method": Key(
            kind="any", reason="Newton-Schulz is iterated in float32, by optax", same=("standard",)
        ),
    },
}
_COMPRESSED = (
    "it compresses gradients itself and DeepSpeed refuses it together with ZeRO; take Adam "
    "or Lamb, with zero_quantized_gradients"
)
_WIDTHS = "it needs the widths that the package mup writes into PyTorch's parameters"
_MISSING = {
    **dict.fromkeys(("OneBitAdam", "ZeroOneAdam", "OneBitLamb"), _COMPRESSED),
    **dict.fromkeys(("MuAdam", "MuAdamW", "MuSGD"), _WIDTHS),
    **dict.fromkeys(
        ("ASGD", "Adadelta", "Adafactor", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop"),
        "it is PyTorch's; pass optax's to make_step",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Recipe:
    """An optimizer before schedules are applied to its rates and betas."""

    build: Callable[..., optax.GradientTransformation]
    """Makes the optimizer from the rates, and from b1 and b2 if there are `betas`."""

    rates: dict[str, float]
    """Constant learning rates, by the names of the arguments of `build`."""

    betas: tuple[float, float] | None = None
    """Constant b1 and b2. None means that the optimizer has none."""

    decay: float = 0.0
    """Adagrad's own decay, which divides the rate by 1 + decay x count."""


def make_optimizer(
    written: Mapping[str, Any], found: Findings
) -> optax.GradientTransformation | None:
    """Return the optimizer of the sections `optimizer` and `scheduler` and of `gradient_clipping`.

    If only the scheduler or the clipping is written, the optimizer is the AdamW of `make_step`.

    Args:
      written: the honoured keys of the configuration.
      found: receives the dotted keys that have no effect, and the problems: a name or a parameter
        that is unknown, missing or out of range, or that zeroxla lacks.

    Returns:
      A chain that clips the global norm first; None if none of the three is written.
    """
    recipe = scheduler = None
    with found.collected():
        recipe = _recipe(written.get("optimizer", {}), found)
    with found.collected():
        scheduler = make_scheduler(written.get("scheduler", {}), found)
    clipping = written.get("gradient_clipping", 0.0)
    if recipe is None and scheduler is None and not clipping:
        return None
    recipe = recipe or _Recipe(
        build=lambda learning_rate: optax.adamw(learning_rate), rates={"learning_rate": 3e-4}
    )
    rates: dict[str, Any] = dict(recipe.rates)
    betas: dict[str, Any] = dict(zip(("b1", "b2"), recipe.betas or ()))
    if scheduler is not None:
        rates = {name: scheduler.rate(own) for name, own in rates.items()}
        if scheduler.momentum is not None and betas:
            betas = {"b1": scheduler.momentum, "b2": 0.99}
        elif scheduler.momentum is not None:
            reason = "this optimizer has no betas to cycle"
            found.ignored["scheduler.params.cycle_momentum"] = reason
    if recipe.decay:
        rates = {name: _decayed(rate, recipe.decay) for name, rate in rates.items()}
    # Constants stay out of the state: there b2 would be rounded to float32 before 1 - b2.
    static = tuple(name for name, value in betas.items() if not callable(value))
    optimizer = optax.inject_hyperparams(recipe.build, static_args=static)(**rates, **betas)
    return optax.chain(optax.clip_by_global_norm(clipping), optimizer) if clipping else optimizer


def _decayed(rate: Any, decay: float) -> Callable[[Any], Any]:
    return lambda count: (rate(count) if callable(rate) else rate) / (1 + decay * count)


def _recipe(written: Mapping[str, Any], found: Findings) -> _Recipe | None:
    kind = written.get("type")
    if kind is None:
        if written.get("params"):
            found.ignored["optimizer.params"] = "optimizer.type is not written"
        return None
    names = {name.lower(): name for name in (*KEYS, *_MISSING)}
    name = names.get(kind.lower())
    if name is None:
        raise ValueError(
            f"optimizer.type={kind!r} is no optimizer of DeepSpeed's; the nearest one is "
            f"{nearest(kind, names.values())!r}"
        )
    if name in _MISSING:
        raise NotImplementedError(f"optimizer.type={kind!r} is not here: {_MISSING[name]}")
    params = written.get("params", {})
    if "max_grad_norm" in params:
        raise ValueError(
            "optimizer.params.max_grad_norm is refused by DeepSpeed too; write gradient_clipping "
            "at the top level"
        )
    p = take(params, KEYS[name], found, ("optimizer", "params"))
    for refused in ("amsgrad", "maximize", "dampening"):
        if p.get(refused):
            raise NotImplementedError(
                f"optimizer.params.{refused}={p[refused]!r} is not here; pass an optax optimizer "
                "to make_step"
            )
    make = {
        "Adam": lambda p: _adam(p, decoupled=p.get("adam_w_mode", True)),
        "AdamW": lambda p: _adam(p, decoupled=True),
        "Lamb": _lamb,
        "Lion": _lion,
        "Adagrad": _adagrad,
        "SGD": _sgd,
        "Muon": _muon,
    }
    return make[name](p)


def _adam(p: Mapping[str, Any], decoupled: bool) -> _Recipe:
    # By default PyTorch's AdamW decays by 0.01, and DeepSpeed's own does not decay.
    default = 0.01 if decoupled and p.get("torch_adam", False) else 0.0
    decay = optax.add_decayed_weights(p.get("weight_decay", default))
    moments = optax.scale_by_adam if p.get("bias_correction", True) else scale_by_moments

    def build(learning_rate: Any, b1: Any, b2: Any) -> optax.GradientTransformation:
        adam = moments(b1=b1, b2=b2, eps=p.get("eps", 1e-8))
        parts = (adam, decay) if decoupled else (decay, adam)
        return optax.chain(*parts, optax.scale_by_learning_rate(learning_rate))

    return _Recipe(build=build, rates=_rate(p, 1e-3), betas=_betas(p, 0.9, 0.999))


def _lamb(p: Mapping[str, Any]) -> _Recipe:
    """Return DeepSpeed's LAMB: it corrects the rate, not the moments, and bounds the ratio."""
    eps, inside = p.get("eps", 1e-8), p.get("eps_inside_sqrt", False)
    least, most = p.get("min_coeff", 0.01), p.get("max_coeff", 10.0)

    def build(learning_rate: Any, b1: Any, b2: Any) -> optax.GradientTransformation:
        def correction(count: Any) -> Any:
            n = count + 1.0
            return jnp.sqrt(1 - b2**n) / (1 - b1**n) if p.get("bias_correction", True) else 1.0

        return optax.chain(
            scale_by_moments(b1=b1, b2=b2, eps=0.0 if inside else eps, root=eps if inside else 0),
            optax.add_decayed_weights(p.get("weight_decay", 0.0)),
            scale_by_bounded_trust_ratio(least, most),
            optax.scale_by_schedule(correction),
            optax.scale_by_learning_rate(learning_rate),
        )

    return _Recipe(build=build, rates=_rate(p, 1e-3), betas=_betas(p, 0.9, 0.999))


def _lion(p: Mapping[str, Any]) -> _Recipe:
    def build(learning_rate: Any, b1: Any, b2: Any) -> optax.GradientTransformation:
        return optax.lion(learning_rate, b1, b2, weight_decay=p.get("weight_decay", 0.0))

    return _Recipe(build=build, rates=_rate(p, 1e-3), betas=_betas(p, 0.9, 0.999))


def _adagrad(p: Mapping[str, Any]) -> _Recipe:
    def build(learning_rate: Any) -> optax.GradientTransformation:
        return optax.chain(
            optax.add_decayed_weights(p.get("weight_decay", 0.0)),
            scale_by_root_of_sum(p.get("eps", 1e-10), p.get("initial_accumulator_value", 0.0)),
            optax.scale_by_learning_rate(learning_rate),
        )

    return _Recipe(build=build, rates=_rate(p, 1e-2), decay=p.get("lr_decay", 0.0))


def _sgd(p: Mapping[str, Any]) -> _Recipe:
    momentum, nesterov = p.get("momentum", 0.0), p.get("nesterov", False)
    if nesterov and not momentum:
        raise ValueError("optimizer.params.nesterov=True needs a momentum above 0")

    def build(learning_rate: Any) -> optax.GradientTransformation:
        decay = optax.add_decayed_weights(p.get("weight_decay", 0.0))
        return optax.chain(decay, optax.sgd(learning_rate, momentum or None, nesterov))

    return _Recipe(build=build, rates=_rate(p, 1e-3))


def _muon(p: Mapping[str, Any]) -> _Recipe:
    """Return Muon for matrices and AdamW for the rest. As in DeepSpeed, names tell them apart."""
    decay, eps = p.get("weight_decay", 0.0), p.get("eps", 1e-10)
    b1, b2 = p.get("betas", (0.9, 0.95))

    def build(learning_rate: Any, adam_learning_rate: Any) -> optax.GradientTransformation:
        muon = contrib.muon(
            learning_rate, beta=p.get("momentum", 0.95), eps=1e-7, weight_decay=decay
        )
        adam = optax.adamw(adam_learning_rate, b1, b2, eps, weight_decay=decay)
        return optax.multi_transform({"muon": muon, "adam": adam}, muon_labels)

    rates = {
        "learning_rate": p.get("muon_lr", p.get("lr", 0.02)),
        "adam_learning_rate": p.get("adam_lr", p.get("lr", 3e-4)),
    }
    return _Recipe(build=build, rates=rates)


def _rate(p: Mapping[str, Any], default: float) -> dict[str, float]:
    return {"learning_rate": p.get("lr", default)}


def _betas(p: Mapping[str, Any], b1: float, b2: float) -> tuple[float, float]:
    b1, b2 = p.get("betas", (b1, b2))
    return b1, b2
