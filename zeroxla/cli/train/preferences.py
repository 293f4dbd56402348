"""`zeroxla train --data preferences.jsonl`: a language model on preferences (DPO)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from zeroxla.cli.data.mixture import RowStream
from zeroxla.cli.data.preferences import (
    PreferenceEncoder,
    TokenPreference,
    preference_batches,
    validation_preference_batches,
)
from zeroxla.cli.train.island import seed_of
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.train.rows import RowFilesTask
from zeroxla.rlhf.dpo_loss import DpoSettings, pair_shapes, preference_loss
from zeroxla.rlhf.dpo_trainer import Dpo
from zeroxla.rlhf.pairs import Pairs
from zeroxla.rlhf.policy import Policy
from zeroxla.rlhf.states import States
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step

if TYPE_CHECKING:
    import grain


class PreferencesTask(RowFilesTask):
    """A language model that learns to prefer responses; see `Task`. Arguments: as of
    `RowFilesTask`."""

    data = "preferences"
    numbers: tuple[str, ...] = ("margin",)
    metrics: tuple[str, ...] = ("accuracy",)
    guess = math.log(2)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.unit = "pair"
        self.guess_name = "loss without a preference (log 2)"
        self.settings = settings_of(self.options)
        self.loss = preference_loss(self.settings)
        self.num_counted = 2 * self.options.text.batch * self.options.text.tokens

    def training(self, index: int, count: int, slot: int = 0) -> grain.IterDataset:
        return preference_batches(
            self._stream(seed_of(self.options.training.seed, slot)),
            batch=self.options.text.batch,
            shard_index=index,
            shard_count=count,
        )

    def scorer(self, step: Step) -> PreferenceScorer:
        return PreferenceScorer(
            self.settings, Policy(step=step, adapters=self.model), self.options.dpo.dpo_tensor
        )

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

    Args:
      settings: the settings of the loss.
      policy: the policy in training. The reference is the policy without its adapters.
      tensor: number of devices that share a copy of the reference while it scores.

    Raises:
      ValueError: as `Dpo`.
    """

    def __init__(self, settings: DpoSettings, policy: Policy, tensor: int) -> None:
        self.shapes = pair_shapes(settings)
        self._trainer = Dpo(settings, actor=policy, tensor=tensor)

    def __call__(self, state: TrainState, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        pairs = Pairs(
            chosen_BL=rows["chosen"],
            rejected_BL=rows["rejected"],
            chosen_mask_BT=rows["chosen_mask"],
            rejected_mask_BT=rows["rejected_mask"],
        )
        return self._trainer.score(States(actor=state), pairs)


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
    lora, pipe = options.lora, options.pipeline.pipe
    if lora.lora_rank is None and lora.lora_init is None:
        raise ValueError(
            "--data has preferences, which are compared with a reference: the model without its "
            "adapters. Without adapters train would need a second model; give --lora-rank 16, or "
            "train in Python with zeroxla.rlhf.dpo"
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
