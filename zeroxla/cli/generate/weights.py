"""`Weights`: the step whose state holds the weights of a model that generates, and the state.

There is no optimizer, so the state has the parameters alone, split over all devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from zeroxla.checkpoint.checkpointer import Checkpointer
from zeroxla.checkpoint.weights.adapter_import import lora_from_adapter, read_adapter
from zeroxla.checkpoint.weights.pretrained import from_pretrained
from zeroxla.cli.generate.options import WeightOptions
from zeroxla.cli.generate.source import TextSource
from zeroxla.cli.run_folder import CHECKPOINTS
from zeroxla.cli.train.model import folder_dtype
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.frontend.lora.leaf_plan import BASE, LORA, NoTargetError
from zeroxla.frontend.lora.model import LoraModel, lora
from zeroxla.mesh.axes import world_size
from zeroxla.rlhf.make import TARGETS
from zeroxla.step.make import make_step
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step

FLOATS = ("float32", "bfloat16", "float16")
"""The forms of `--weights` that are no quantization."""

_LENGTH = 8  # of the rows on which the loss is traced


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The weights of a source, as they are wanted.

    Attributes:
      source: the model, and where its weights are.
      options: how they are stored, and what is added to them.
      model: the model whose state holds them: with adapters if there are some, or if its leaves are
        stored in 8 or 4 bits.
      step: a step of it, which has seen a batch.
    """

    source: TextSource
    options: WeightOptions
    model: Any
    step: Step

    @staticmethod
    def of(source: TextSource, options: WeightOptions, mesh: Mesh) -> Weights:
        """Trace the model; nothing is read yet.

        Raises:
          ImportError: the package safetensors is not installed, and there is an adapter to read.
          ValueError: the options do not go together, or not with the model.
        """
        if options.step is not None and source.run is None:
            raise ValueError(
                f"--step {options.step}: without effect, {source.folder} is no run with "
                "checkpoints; leave it out"
            )
        if options.island_own and source.run is None:
            raise ValueError(
                f"--island-own: without effect, {source.folder} is no run of an island; leave it "
                "out"
            )
        model = _wanted(source, options)
        try:
            step = _step(model, mesh, options.dtype or source.dtype)
        except NoTargetError as error:
            raise ValueError(
                f"--weights {options.weights}: {error}; leave it out, to store floats"
            ) from error
        return Weights(source=source, options=options, model=model, step=step)

    def read(self, report: Callable[[str], None]) -> TrainState:
        """Read the weights, leaf by leaf.

        Args:
          report: called with a sentence for each damaged checkpoint that is passed over.

        Raises:
          ImportError: the package safetensors is not installed, and files of it are to be read.
          ValueError: files are missing, damaged, or of another model.
        """
        return _in_dtype(self._float32(report), self.dtype)

    @property
    def dtype(self) -> str:
        """The dtype of leaves that are stored as floats. In the one of the computation they are
        what a copy of the model would be given of float32, bit for bit. A base is added to its
        adapters in float32 before, so it is stored so unless its own folder has that dtype."""
        form, computed = self.options.weights, self.step.config.compute_dtype
        if form in FLOATS:
            return form
        is_base = isinstance(self.model, LoraModel)
        if is_base and folder_dtype(self.source.choice.config) != computed:
            return "float32"
        return computed

    def _float32(self, report: Callable[[str], None]) -> TrainState:
        """Read the weights into a state of a training step, whose floats are float32."""
        adapter, run = self.options.adapter, self.source.run
        if run is None:
            return from_pretrained(self.model, self.source.folder, self.step, adapter=adapter)
        number = run.number(self.options.step, report)
        stored, key = self.source.model, jax.random.key(0)
        is_same = self.model is stored
        step = self.step if is_same else _step(stored, self.step.mesh, "float32")
        with Checkpointer(run.folder / CHECKPOINTS, keep=None, report=report) as checkpointer:
            params = checkpointer.restore_params(
                step.shapes(), number=number, island_own=self.options.island_own
            ).params
        if adapter is not None:
            params = {BASE: params, LORA: read_adapter(self.model, adapter)}
        return self.step.init_from(params, key, donate=is_same)


def _wanted(source: TextSource, options: WeightOptions) -> Any:
    """Return the model whose state is wanted: the one whose weights are stored, or one with other
    adapters, or with leaves in another form.

    Raises:
      ValueError: the weights cannot become those of such a model.
    """
    stored, form = source.model, options.weights
    frozen: Any = None if form is None or form in FLOATS else form
    if options.adapter is not None:
        if isinstance(stored, LoraModel):
            raise ValueError(
                f"--adapter {options.adapter}: {source.folder} has adapters of its own; write them "
                "into the weights (zeroxla export) and give that folder, or leave --adapter out"
            )
        return lora_from_adapter(stored, options.adapter, frozen=frozen)
    if not isinstance(stored, LoraModel):
        return stored if frozen is None else lora(stored, targets=TARGETS, rank=1, frozen=frozen)
    if form is None or frozen == stored.frozen:
        return stored
    if stored.frozen is not None:
        raise ValueError(
            f"--weights {form}: {source.folder} stores its frozen base as {stored.frozen}, and it "
            "stays so; leave --weights out"
        )
    return dataclasses.replace(stored, frozen=frozen, traced=[])


def _step(model: Any, mesh: Mesh, dtype: str) -> Step:
    """Return a step that trains nothing, and has seen a batch."""
    config = ZeroConfig(compute_dtype=dtype)
    step = make_step(model, mesh, optax.set_to_zero(), config=config)
    rows = (world_size(mesh), _LENGTH + 1)
    step.abstract_state({"tokens": jax.ShapeDtypeStruct(rows, np.int32)})
    return step


def _in_dtype(state: TrainState, dtype: str) -> TrainState:
    """Return a state for generation alone, its float32 parameters in another dtype, but for
    adapters.

    Cost: at no time more than the state and a leaf. The float32 arrays are deleted one by one.
    """
    if dtype == "float32":
        return state

    def cast(x: jax.Array) -> jax.Array:
        if x.dtype != np.float32:  # of a base in 8 or 4 bits
            return x
        found = jax.block_until_ready(x.astype(dtype))
        x.delete()
        return found

    params = state.params
    if set(params) == {BASE, LORA}:
        return dataclasses.replace(state, params={**params, BASE: jax.tree.map(cast, params[BASE])})
    return dataclasses.replace(state, params=jax.tree.map(cast, params))
