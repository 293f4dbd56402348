"""`zeroxla train --data preferences.jsonl`: a language model on preferences (DPO)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.checkpoint.checkpointer import Checkpointer
from zeroxla.cli.data.mixture import RowStream
from zeroxla.cli.data.preferences import (
    PreferenceEncoder,
    TokenPreference,
    preference_batches,
    validation_preference_batches,
)
from zeroxla.cli.train.island import seed_of
from zeroxla.cli.train.options import DpoOptions, TrainOptions
from zeroxla.cli.train.rows import RowFilesTask
from zeroxla.frontend.lora.leaf_plan import NoTargetError
from zeroxla.frontend.lora.model import LoraModel
from zeroxla.offload.array_bytes import shard_bytes
from zeroxla.program.report import format_bytes
from zeroxla.rlhf.dpo_objective import DpoSettings, pair_shapes, preference_loss
from zeroxla.rlhf.dpo_trainer import Dpo, frozen_reference
from zeroxla.rlhf.make import Storage
from zeroxla.rlhf.pairs import Pairs
from zeroxla.rlhf.policy import Policy
from zeroxla.rlhf.states import States
from zeroxla.step.memory.device_facts import device_bytes
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step

if TYPE_CHECKING:
    import grain


REFERENCE = "reference"
"""The folder of a run with the reference, if it is a copy of the first weights."""


class PreferencesTask(RowFilesTask):
    """A language model that learns to prefer responses; see `Task`. Arguments: as of
    `RowFilesTask`."""

    data = "preferences"
    sequences = 2
    numbers: tuple[str, ...] = ("margin",)
    metrics: tuple[str, ...] = ("accuracy",)
    guess = math.log(2)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.unit = "pair"
        self.guess_name = "loss without a preference (log 2)"
        self.settings = settings_of(self.options)
        self.loss = preference_loss(self.settings)
        self._reference_words = ""
        self.num_counted = 2 * self.options.text.batch * self.options.text.tokens

    def training(self, index: int, count: int, slot: int = 0) -> grain.IterDataset:
        return preference_batches(
            self._stream(seed_of(self.options.training.seed, slot)),
            batch=self.options.text.batch,
            shard_index=index,
            shard_count=count,
        )

    @property
    def source(self) -> str:
        return super().source + self._reference_words

    def scorer(self, step: Step) -> PreferenceScorer:
        made = PreferenceScorer(self.settings, self.model, step, self.options.dpo)
        self._reference_words = made.words
        return made

    def _validation(self) -> Iterator[dict[str, np.ndarray]]:
        return validation_preference_batches(
            self._stream(0),
            batch=self.options.text.batch,
            num_batches=self.options.output.eval_batches,
        )

    def _stream(self, seed: int) -> RowStream[TokenPreference]:
        return RowStream(self.sources, self._encoder(self.options.text.tokens), self._bad, seed)

    def _encoder(self, length: int) -> PreferenceEncoder:
        return PreferenceEncoder(super()._encoder(length))


class PreferenceScorer:
    """Adds the reference's log-probabilities to batches of preferences; see `Scorer`.

    The reference is the policy without its adapters, or, if it has none, a copy of its first
    weights, which the run keeps.

    Args:
      settings: the settings of the loss.
      model: the model in training; with adapters, what `zeroxla.lora` made.
      step: its step.
      options: the format of the copy, and the number of devices that share it while it scores.

    Attributes:
      words: a sentence about the copy, with its bytes; "" if there is none.

    Raises:
      ValueError: as `Dpo`; or a device has no room for the copy.
    """

    def __init__(self, settings: DpoSettings, model: Any, step: Step, options: DpoOptions) -> None:
        self.shapes, self.words = pair_shapes(settings), ""
        self._reference: Policy | None = None
        self._state: TrainState | None = None
        adapters = model if isinstance(model, LoraModel) else None
        form = options.dpo_reference or "int8"
        if adapters is None:
            storage = Storage(frozen=None if form == "float32" else form)
            self._reference = frozen_reference(
                model, step.mesh, settings, storage=storage, config=step.config
            )
        try:
            self._trainer = Dpo(
                settings,
                actor=Policy(step=step, adapters=adapters),
                reference=self._reference,
                tensor=options.dpo_tensor,
            )
        except NoTargetError as error:
            raise ValueError(
                f"the reference cannot be stored as {form}, because {error}; give --dpo-reference "
                "float32"
            ) from error
        if self._reference is not None:
            self.words = self._room(self._reference.step, form, options.dpo_tensor)

    def _room(self, reference: Step, form: str, tensor: int) -> str:
        """Return a sentence about the bytes of the reference.

        Raises:
          ValueError: a device has no room for it beside the state.
        """
        step = self._trainer.actor.step
        state, copy = shard_bytes(step.shapes()), shard_bytes(reference.shapes().params)
        itemsize = np.dtype(jnp.dtype(step.config.compute_dtype)).itemsize
        whole = self._trainer.engine.plan.num_parameters * itemsize // tensor
        limit = _memory_of(step)
        figures = (
            f"{format_bytes(copy)} on a device beside {format_bytes(state)} of state, and "
            f"{format_bytes(whole)} more while it scores"
        )
        if limit is not None and state + copy + whole > limit:
            raise ValueError(
                f"a device has {format_bytes(limit)}, and no room for the reference, a copy of the "
                f"first weights in {form}: {figures}; train adapters, whose base is the reference "
                "(--lora-rank 16), let more devices share it while it scores (--dpo-tensor), store "
                "it in fewer bits (--dpo-reference int4), or offload the optimizer's state"
            )
        return f". Reference: a copy of the first weights in {form}, {figures}"

    def begin(self, state: TrainState, run: Path, *, resumed: bool) -> None:
        if self._reference is None:
            return
        with Checkpointer(run / REFERENCE, asynchronous=False) as kept:
            if resumed:
                self._state = kept.restore(self._reference.step).state
                return
            given = state.model_state or None
            self._state = self._reference.begin(state.params, jax.random.key(0), given)
            kept.save(0, self._state)

    def __call__(self, state: TrainState, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        pairs = Pairs(
            chosen_BL=rows["chosen"],
            rejected_BL=rows["rejected"],
            chosen_mask_BT=rows["chosen_mask"],
            rejected_mask_BT=rows["rejected_mask"],
        )
        return self._trainer.score(States(actor=state, reference=self._state), pairs)


def _memory_of(step: Step) -> int | None:
    """Return the bytes that programs may hold on a device; None if nobody knows."""
    given = step.config.memory
    if given is not None and given != "device":
        return int(given)
    try:
        return device_bytes(step.mesh)
    except ValueError:
        return None


def settings_of(options: TrainOptions) -> DpoSettings:
    """Return the settings of the loss of a run on preferences."""
    return DpoSettings(
        length=options.text.tokens + 1,
        rows=options.text.batch,
        beta=options.dpo.dpo_beta,
        label_smoothing=options.dpo.dpo_label_smoothing,
        length_normalized=options.dpo.dpo_length_normalized,
    )


def check_preferences(options: TrainOptions) -> None:
    """Check that the other options of a run allow it to learn from preferences.

    Raises:
      ValueError: one does not.
    """
    lora, pipe, form = options.lora, options.pipeline.pipe, options.dpo.dpo_reference
    if form is not None and (lora.lora_rank is not None or lora.lora_init is not None):
        raise ValueError(
            f"--dpo-reference {form}: without effect, the reference is the model without its "
            "adapters; leave it out, or give --lora-base to store the base in fewer bits"
        )
    if options.rows.packing:
        raise ValueError(
            "--packing: the loss of a preference is of two whole responses, and a packed sequence "
            "has no sum for each of them; leave it out"
        )
    if options.model.dropout:
        raise ValueError(
            f"--dropout {options.model.dropout}: without effect, because the loss of preferences "
            "compares with the reference without dropout; leave it out"
        )
    if pipe > 1:
        raise ValueError(
            f"--pipe {pipe}: chosen and rejected rows go through the model together, which stages "
            "do not cut; leave it out"
        )
