"""`lora`: adds adapters to a model, for `make_step`."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.core import Tracer

from zeroxla.frontend import Adapted, adapt
from zeroxla.frontend.base import AdaptsItself
from zeroxla.frontend.complex_leaves import join_complex, split_complex
from zeroxla.frontend.lora.adapted import adapt_lora
from zeroxla.frontend.lora.at_rest import FORMATS, MIN_ELEMENTS, Frozen
from zeroxla.frontend.lora.checks import check_adapted, shapes_of
from zeroxla.frontend.lora.leaf_plan import BASE, LoraPlan, adapters_of, make_lora_plan
from zeroxla.frontend.staged import StagedModel
from zeroxla.program.paths import paths_of


def lora(
    model: Any,
    *,
    targets: str,
    rank: int = 8,
    alpha: float = 16.0,
    rank_stabilized: bool = False,
    dora: bool = False,
    frozen: Frozen | None = None,
) -> LoraModel:
    """Add low-rank adapters to a model from outside; only they are trained.

    A matched leaf W is used as W + alpha / rank x A . B, which is never made: a product x . W
    becomes x . W + alpha / rank x (x . A) . B, in the place where the model has it. A starts
    uniform within 1 / sqrt(inputs) and B at zero, so that the first loss is the model's own.

    Args:
      model: a model for `make_step`: a flax.linen module, a function `rngs -> nnx module`, or a
        pair `(init, loss)`.
      targets: a regular expression, searched in leaf paths such as "h/attn/c_attn/kernel". All
        matching leaves must be dense: the loss only multiplies activations by them.
      rank: the rank of A . B.
      alpha: the adapters count alpha / rank times.
      rank_stabilized: the adapters count alpha / sqrt(rank) times instead (rsLoRA), so that the
        size of what they add does not shrink as the rank grows.
      dora: train the norms of columns beside their directions (DoRA). With V = W + scaling A . B, W
        is used as m * V / |V|: m, one number for each output, starts as |W| and is trained; |V| is
        a constant in the gradient.
      frozen: how dense leaves of the base with at least 4096 elements (in a layer) are stored,
        adapted or not. None: float32. "int8": 8 bits in blocks of 256 elements. "int4": 4 bits in
        blocks of 64, each with the step of the smallest squared error. They are gathered in this
        form. A warning says so if no leaf is large enough.

    Returns:
      A model for `make_step`. The parameters of its state are `{"base": the model's own, "lora":
      {path: {"a", "b"}}}` (and "m" with DoRA); the base has no gradient and no optimizer state.

    Raises:
      ValueError: the model is a Pipeline, an option is out of range, or `targets` is no regular
        expression. (Matches are known when the step sees a batch; no match, or one that is not
        dense, is a ValueError then.)

    Cost: a step gathers the base and computes with it as without adapters, but it neither computes
    nor reduces gradients of the base. Adapters have rank x (inputs + outputs) elements a leaf, and
    so have their gradients and each moment. At rest a parameter of the base takes 4 bytes / world,
    as "int8" 1.016, as "int4" 0.53. DoRA reads each adapted leaf once more and multiplies it by
    `rank` rows, wherever the leaf is used; backward keeps the products' results before the scaling.

    Source: LoRA, arXiv 2106.09685; QLoRA, arXiv 2305.14314, for the quantized base; rsLoRA, arXiv
    2312.03732; DoRA, arXiv 2402.09353.

    >>> import numpy as np, optax, jax, zeroxla
    >>> from zeroxla.models import MLP
    >>> model = zeroxla.lora(MLP.tiny(), targets=r"dense_\\d/kernel", rank=4)
    >>> step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=1), optax.adam(1e-3))
    >>> batch = {"image": np.zeros((8, 28, 28)), "label": np.zeros(8, int)}
    >>> state = step.init(jax.random.key(0), batch)
    >>> sorted(state.params["lora"]["dense_1"]["kernel"])
    ['a', 'b']
    """
    if isinstance(model, StagedModel):
        raise ValueError(
            "lora of a Pipeline: adapters are added to the model first; give lora the model itself "
            "and Pipeline.from_model what it returns"
        )
    if isinstance(model, LoraModel):
        raise ValueError("the model has adapters already; match all leaves in one targets=")
    try:
        re.compile(targets)
    except (re.error, TypeError) as error:
        raise ValueError(f"targets={targets!r} is no regular expression: {error}") from error
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"rank={rank!r}; give a whole number, at least 1")
    if not alpha > 0:
        raise ValueError(f"alpha={alpha!r} must be above 0; the adapters count alpha / rank times")
    if frozen is not None and frozen not in FORMATS:
        raise ValueError(f"frozen={frozen!r}; choose None, {', '.join(map(repr, FORMATS))}")
    for name, flag in (("rank_stabilized", rank_stabilized), ("dora", dora)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name}={flag!r}; give True or False")
    return LoraModel(
        model=model,
        targets=targets,
        rank=rank,
        alpha=float(alpha),
        rank_stabilized=rank_stabilized,
        dora=dora,
        frozen=frozen,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoraModel(AdaptsItself):
    """A model with adapters. Made by `zeroxla.lora`.

    Attributes:
      model, targets, rank, alpha, rank_stabilized, dora, frozen: the arguments of `lora`.
      asked: whether the user asked for `frozen`, and is warned if no leaf is large enough for it.
      traced: the plan for the newest batch that a step has seen; empty before the first batch.
    """

    model: Any
    targets: str
    rank: int
    alpha: float
    rank_stabilized: bool
    dora: bool
    frozen: Frozen | None
    asked: bool = True
    traced: list[LoraPlan] = dataclasses.field(default_factory=list, repr=False)

    @property
    def scaling(self) -> float:
        """The factor of A . B."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    @property
    def plan(self) -> LoraPlan:
        """The leaves with adapters, and the form of all leaves.

        Raises:
          ValueError: no step of this model has seen a batch, from which the plan follows.
        """
        if not self.traced:
            raise ValueError(
                "which leaves have adapters follows from the model's loss, which no step has "
                "traced yet; call step.init or step.abstract_state first"
            )
        return self.traced[-1]

    def adapt(self, loss: Callable[..., Any] | None) -> Adapted:
        """Return the model with adapters as pure functions; `zeroxla.frontend.adapt` asks for it.

        Args:
          loss: the argument of `make_step`.
        """
        return adapt_lora(self, adapt(self.model, loss))

    def make_plan(self, base: Adapted, key: jax.Array, batch: Any) -> LoraPlan:
        """Read from the trace of the loss which leaves have adapters.

        Args:
          base: the functions of the model without adapters.
          key, batch: arrays or their shapes.
        """
        plan = make_lora_plan(
            base,
            key,
            batch,
            targets=self.targets,
            rank=self.rank,
            scaling=self.scaling,
            dora=self.dora,
            frozen=self.frozen,
        )
        if self.asked and self.frozen is not None and not plan.has_wires:
            warnings.warn(
                f"frozen={self.frozen!r} is without effect: no dense leaf of the model has "
                f"{MIN_ELEMENTS} elements in a layer, so the base is stored as float32",
                stacklevel=2,
            )
        return plan

    def merge(self, params: Any) -> Any:
        """Return the model's own parameters with the adapters added, in float32.

        Args:
          params: the parameters of a state in natural shapes: NumPy arrays, as
            `zeroxla.full_params` returns them, or JAX arrays, which may be traced.

        Returns:
          The tree of the model without adapters, of NumPy arrays if NumPy arrays were given.

        Raises:
          ValueError: no step of this model has seen a batch, or the parameters belong to another
            model.

        Cost: NumPy arrays are merged on the default device, one leaf at a time.
        """
        params = split_complex(params)
        check_adapted(self.plan, shapes_of(params), "the tree of parameters")
        adapters = adapters_of(params)
        leaves = [
            _like(x, self.plan.merged(path, x, adapters.get(path)))
            for path, x in paths_of(params[BASE])
        ]
        return join_complex(jax.tree.unflatten(jax.tree.structure(params[BASE]), leaves))

    def init_from(
        self, step: StateMaker, params: Any, key: jax.Array, model_state: Any = None
    ) -> Any:
        """Make a training state from parameters of the model without adapters.

        `step.init_from`, which this calls, takes them too; see `zeroxla.init_from`.

        Args:
          step: a step of this model that has seen a batch (`init` or `abstract_state`).
          params: the parameters, whole, or of a state of the model without adapters.
          key: a PRNG key, for the adapters among others.
          model_state: see `zeroxla.init_from`.

        Returns:
          The `TrainState` before the first step. Its loss is the parameters' own, after
          quantization if the base is quantized.

        Raises:
          ValueError: the step has seen no batch, or the parameters belong to another model.

        Cost: leaves are quantized one after another; a device holds each leaf whole for a moment.
        """
        return step.init_from(params, key, model_state=model_state)


class StateMaker(Protocol):
    """The part of a `zeroxla.Step` that makes a state from given weights."""

    def init_from(
        self, params: Any, key: jax.Array, batch: Any = None, *, model_state: Any = None
    ) -> Any:
        """Return the state with these parameters and this model state."""
        ...


def _like(given: Any, made: jax.Array) -> Any:
    """Return `made` as a NumPy array if `given` is one, and nothing is being traced."""
    concrete = isinstance(given, np.ndarray) and not isinstance(made, Tracer)
    return np.asarray(made) if concrete else made
