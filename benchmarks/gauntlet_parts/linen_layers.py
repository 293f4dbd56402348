"""Every public layer of flax.linen, by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import numpy as np

from gauntlet_parts.case import Built, Case
from gauntlet_parts.losses import floats, to_waves, tokens

LEFT_OUT = {
    "Module": "the base class",
    "RNNCellBase": "the base class of cells",
    "Dropout": "has no parameters; it is in the sequence of layers",
    "Fp8DotGeneral": "another name of Fp8DirectDotGeneralOp",
}
"""Classes of flax.linen that are no case of their own, and why."""


def call_x(apply: Any, batch: Any, train: bool) -> Any:
    return apply(batch["x"])


def built(make: Callable[[], nn.Module], *shape: int, call: Any = call_x, x: Any = None) -> Built:
    """Return a layer with a batch {"x": floats [ROWS, *shape]}."""
    batch = {"x": floats(*shape) if x is None else x}
    return Built(model=make(), loss=to_waves(call), batch=batch)


def two_inputs(apply: Any, batch: Any, train: bool) -> Any:
    return apply(batch["x"], batch["x"])


def with_statistics(apply: Any, batch: Any, train: bool) -> Any:
    return apply(batch["x"], use_running_average=not train)


def updated(apply: Any, batch: Any, train: bool) -> Any:
    return apply(batch["x"], update_stats=train)


def cell(make: Callable[[], Any]) -> Built:
    return built(lambda: nn.RNN(make()), 5, 8)


class Normed(nn.Module):
    """A dense layer in a layer that normalizes it."""

    wrapper: Any

    @nn.compact
    def __call__(self, x: Any, *, update_stats: bool) -> Any:
        return self.wrapper(nn.Dense(8))(x, update_stats=update_stats)


class Normalized(nn.Module):
    """A dense layer whose weights a layer normalizes."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.WeightNorm(nn.Dense(8))(x)


class Fp8Product(nn.Module):
    """A product in 8 bits, as an einsum."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (16, 16))
        return nn.Fp8Einsum()("bi,io->bo", x, kernel)


def quantized(operation: Any) -> Built:
    dense = built(lambda: nn.Dense(16, dot_general_cls=operation), 16)
    return dataclasses.replace(dense, slices=1)  # scales are those of the whole batch


LAYERS: dict[str, Callable[[], Built]] = {
    "BatchNorm": lambda: built(nn.BatchNorm, 8, call=with_statistics),
    "Bidirectional": lambda: built(
        lambda: nn.Bidirectional(nn.RNN(nn.GRUCell(8)), nn.RNN(nn.GRUCell(8))), 5, 8
    ),
    "Conv": lambda: built(lambda: nn.Conv(8, (3, 3)), 6, 6, 4),
    "ConvLSTMCell": lambda: built(lambda: nn.RNN(nn.ConvLSTMCell(4, (3, 3))), 3, 6, 6, 4),
    "ConvLocal": lambda: built(lambda: nn.ConvLocal(4, (3,)), 6, 4),
    "ConvTranspose": lambda: built(lambda: nn.ConvTranspose(8, (3, 3)), 6, 6, 4),
    "Dense": lambda: built(lambda: nn.Dense(8), 6),
    "DenseGeneral": lambda: built(lambda: nn.DenseGeneral((4, 6), axis=(-2, -1)), 3, 5),
    "Einsum": lambda: built(lambda: nn.Einsum((8, 3, 4), "ab,bcd->acd"), 8),
    "Embed": lambda: built(lambda: nn.Embed(96, 8), x=tokens(7)),
    "Fp8DirectDotGeneralOp": lambda: quantized(nn.Fp8DirectDotGeneralOp),
    "Fp8DotGeneralOp": lambda: quantized(nn.Fp8DotGeneralOp),
    "Fp8Einsum": lambda: dataclasses.replace(built(Fp8Product, 16), slices=1),
    "GRUCell": lambda: cell(lambda: nn.GRUCell(8)),
    "GroupNorm": lambda: built(lambda: nn.GroupNorm(num_groups=2), 6, 8),
    "InstanceNorm": lambda: built(nn.InstanceNorm, 6, 8),
    "LSTMCell": lambda: cell(lambda: nn.LSTMCell(8)),
    "LayerNorm": lambda: built(nn.LayerNorm, 8),
    "MGUCell": lambda: cell(lambda: nn.MGUCell(8)),
    "MultiHeadAttention": lambda: built(lambda: nn.MultiHeadAttention(2), 5, 8),
    "MultiHeadDotProductAttention": lambda: built(
        lambda: nn.MultiHeadDotProductAttention(2), 5, 8, call=two_inputs
    ),
    "NANOOFp8DotGeneralOp": lambda: quantized(nn.NANOOFp8DotGeneralOp),
    "OptimizedLSTMCell": lambda: cell(lambda: nn.OptimizedLSTMCell(8)),
    "PReLU": lambda: built(nn.PReLU, 8),
    "RMSNorm": lambda: built(nn.RMSNorm, 8),
    "RNN": lambda: built(
        lambda: nn.RNN(nn.SimpleCell(8), reverse=True, keep_order=True, return_carry=True), 5, 8
    ),
    "SelfAttention": lambda: built(lambda: nn.SelfAttention(2), 5, 8),
    "Sequential": lambda: built(
        lambda: nn.Sequential(
            [nn.Dense(8), nn.gelu, nn.Dropout(0.0, deterministic=False), nn.Dense(4)]
        ),
        6,
    ),
    "SimpleCell": lambda: cell(lambda: nn.SimpleCell(8)),
    "SpectralNorm": lambda: dataclasses.replace(
        built(lambda: Normed(nn.SpectralNorm), 6, call=updated), reads_state=True
    ),
    "WeightNorm": lambda: built(Normalized, 6),
}


class Lifted(nn.Module):
    """A transformed dense layer between two plain ones."""

    transform: Callable[[Any], Any]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = self.transform(nn.Dense)(8)(nn.Dense(8)(x))
        return nn.Dense(4)(x)


class Body(nn.Module):
    """A block that `nn.scan` repeats."""

    @nn.compact
    def __call__(self, x: Any, _: Any) -> tuple[Any, None]:
        return x + nn.Dense(8)(nn.LayerNorm()(x)), None


class Scanned(nn.Module):
    """Four blocks in a loop."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        blocks = nn.scan(Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return nn.Dense(4)(blocks()(nn.Dense(8)(x), None)[0])


class Branches(nn.Module):
    """A switch between two layers, by a number in the batch."""

    def setup(self) -> None:
        self.first, self.second, self.head = nn.Dense(8), nn.Dense(8), nn.Dense(4)

    def __call__(self, x: Any) -> Any:
        if self.is_initializing():
            return self.head(self.first(x) + self.second(x))
        branches = (lambda m, x: m.first(x)), (lambda m, x: m.second(x))
        return self.head(nn.cond(x.sum() > 0, *branches, self, x))


TRANSFORMS: dict[str, Callable[[], Built]] = {
    "jit": lambda: built(lambda: Lifted(nn.jit), 6),
    "remat": lambda: built(lambda: Lifted(nn.remat), 6),
    "vmap": lambda: built(
        lambda: Lifted(
            partial(nn.vmap, variable_axes={"params": 0}, split_rngs={"params": True}, axis_size=3)
        ),
        3,
        6,
        call=lambda apply, batch, train: apply(np.swapaxes(batch["x"], 0, 1)),
    ),
    "scan": lambda: built(Scanned, 6),
    "cond": lambda: built(Branches, 6),
    "with_partitioning": lambda: built(
        lambda: nn.Dense(
            8, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model"))
        ),
        6,
    ),
    "BatchNorm(axis_name)": lambda: dataclasses.replace(
        built(lambda: nn.BatchNorm(axis_name="batch"), 8, call=with_statistics),
        reference_model=nn.BatchNorm(),
        slices=1,
        options={"axis_names": {"batch": ("node", "device")}},
    ),
}


def cases() -> list[Case]:
    """Return the cases."""
    return [
        Case(name=f"nn.{name}", kind="layer", package="flax", build=build)
        for name, build in {**LAYERS, **TRANSFORMS}.items()
    ]
