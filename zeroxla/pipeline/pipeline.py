"""`Pipeline`: a model that a mesh with an axis `pipe` cuts into stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.frontend import Adapted, adapt
from zeroxla.frontend.staged import StagedModel
from zeroxla.pipeline.cut_model import CutModel
from zeroxla.pipeline.layer_list import LayerList
from zeroxla.pipeline.profile import Profile
from zeroxla.pipeline.schedule import Schedule
from zeroxla.pipeline.stage_gradients import PipelineDifferentiator
from zeroxla.pipeline.traced_model import TracedModel
from zeroxla.wire.leaves import Layout
from zeroxla.wire.resolve import Wiring


class Pipeline(StagedModel):
    """A model of layers that run one after another.

    On a mesh without an axis `pipe`, or with one of length 1, it is trained like any other model.

    Args:
      layers: flax.linen modules, functions of rngs that return nnx modules, functions of the
        array(s) that the layer before returned, and `TiedLayer`s. A layer is called with the result
        of the layer before, an array or a tuple of arrays; the first one with `inputs(batch)`. If
        it has a parameter `train` or `deterministic`, this is passed too.
      loss: `loss(outputs, batch) -> scalar | (scalar, metrics)`, where `outputs` is the result of
        the last layer.
      inputs: returns the first layer's input from a batch. None passes the batch itself.
      partition: "parameters", "uniform" or "type:REGEX"; "profile", which balances the time that
        the compiled layers' FLOPs and bytes take, or a `Profile`; or boundaries, such as
        [0, 19, 22].
      schedule: "1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "dualpipev", or a `Schedule`.
      memory: for 1F1B, "fast", or "low" for fewer stashed inputs and longer ticks. None means
        "fast".
      chunks: for "interleaved", the number of stages of each rank. None means 2.
      stash: what a stage keeps of a micro-batch until its backward. "inputs" are few, and backward
        runs the stage again. With "activations" it does not.
      allow_empty: accept stages without layers, if there are fewer layers than stages.
      remat: recompute the activations of every so many layers in backward (DeepSpeed's
        activation_checkpoint_interval). None keeps a stage's activations, for one micro-batch.

    Raises:
      ValueError: a layer is of an unknown kind, or an option has no such value.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        loss: Callable[[Any, Any], Any],
        *,
        inputs: Callable[[Any], Any] | None = None,
        partition: str | Sequence[int] | Profile = "parameters",
        schedule: str | Schedule = "1f1b",
        memory: str | None = None,
        chunks: int | None = None,
        stash: Literal["inputs", "activations"] = "inputs",
        allow_empty: bool = False,
        remat: int | None = None,
    ) -> None:
        self._cut_model = CutModel(
            model=LayerList(layers, loss, inputs, remat),
            partition=partition,
            schedule=schedule,
            memory=memory,
            chunks=chunks,
            stash=stash,
            allow_empty=allow_empty,
        )
        if remat is not None and remat < 1:
            raise ValueError(f"remat={remat}; give a number of layers, or None")

    @classmethod
    def from_model(
        cls,
        model: Any,
        loss: Callable[..., Any] | None = None,
        *,
        partition: str | Sequence[int] | Profile = "parameters",
        schedule: str | Schedule = "1f1b",
        memory: str | None = None,
        chunks: int | None = None,
        stash: Literal["inputs", "activations"] = "inputs",
        allow_empty: bool = False,
    ) -> Pipeline:
        """Make a pipeline of an unmodified model, which is cut from the trace of its loss.

        A layer is a block, where the model repeats one, or else a module with parameters of its
        own, in the order in which they are first used. Blocks may be scanned over or written out;
        those that are written out, and equal, run as a loop. What an earlier layer made for a later
        one travels through the stages between them. Parameters keep their names. The model's own
        recomputation (`nn.remat`) holds.

        Args:
          model, loss: as for `make_step`.
          partition, schedule, memory, chunks, stash, allow_empty: as for `Pipeline`.

        >>> from zeroxla.models import GPT
        >>> pipeline = Pipeline.from_model(GPT.tiny())
        """
        made = cls.__new__(cls)
        made._cut_model = CutModel(
            model=TracedModel(adapt(model, loss)),
            partition=partition,
            schedule=schedule,
            memory=memory,
            chunks=chunks,
            stash=stash,
            allow_empty=allow_empty,
        )
        return made

    @property
    def adapted(self) -> Adapted:
        """The whole model as pure functions."""
        return self._cut_model.model.adapted

    def differentiator(
        self,
        *,
        num_ranks: int,
        layout: Layout,
        wiring: Wiring,
        unit_elements: int | None,
        limits: FetchLimits,
        microbatches: int,
        weights: str,
        losses: Mapping[bool, Callable[..., Any]] | None = None,
    ) -> PipelineDifferentiator:
        """Return the program that computes losses and gradients in stages; see `StagedModel`."""
        return PipelineDifferentiator(
            model=self._cut_model,
            num_ranks=num_ranks,
            layout=layout,
            wiring=wiring,
            unit_elements=unit_elements,
            limits=limits,
            microbatches=microbatches,
            weights=weights,
            losses=losses,
        )

    def schedule(self, num_ranks: int, microbatches: int, *, train: bool) -> Schedule:
        """Return which stage does what in which tick, in a step or in an evaluation.

        Raises:
          ValueError: the schedule that was given is for other numbers.
        """
        return self._cut_model.schedule_for(num_ranks, microbatches, train=train)

    @property
    def runs_forward_again(self) -> bool:
        """Whether a backward runs its stage's forward again."""
        return self._cut_model.stash == "inputs"
