"""Every feature of a training run, as a list: how it is turned on, and what must then hold.

`fields` names the options that a feature covers; `test_pairs.py` compares them with the options
that there are, so that a new one must enter here. `REFUSED` and `WITHOUT_EFFECT` list the pairs
that are not simply equal to the reference, with the words that say so.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from compose.jobs import Run, own_loss

from zeroxla import Feedback, Rewrite, WireFormat
from zeroxla.offload.memory_kinds import place_of
from zeroxla.program.paths import paths_of

INT8 = WireFormat(bits=8, block=64)
INT4 = WireFormat(bits=4, block=64)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Feature:
    """One feature.

    Attributes:
      name: its name in the table.
      slots: the slots of a `Job` that it sets, each with its value.
      fields: the options that it covers, such as "ZeroConfig.hpz_size".
      holds: takes a run, and returns whether the feature was on.
      in_program: whether the step's program differs if the feature is on.
      error: the largest relative error that it may bring into two steps' change of the parameters;
        about three times what it brings to the first model. 0 if it rounds nothing.
    """

    name: str
    slots: dict[str, Any]
    fields: tuple[str, ...] = ()
    holds: Callable[[Run], bool] = lambda run: True
    in_program: bool = True
    error: float = 0.0

    def changes(self, other: Feature) -> bool:
        """Return whether a program with `other` differs if this feature is on too."""
        is_part = all(other.slots.get(slot) == value for slot, value in self.slots.items())
        return self.in_program and not is_part

    def meets(self, other: Feature) -> bool:
        """Return whether both can be turned on: they set no slot to different values."""
        return all(other.slots.get(slot, value) == value for slot, value in self.slots.items())


def _config(name: str, **fields: Any) -> dict[str, Any]:
    """Return arguments of a `Feature` that sets fields of `ZeroConfig` and covers them."""
    return {
        "name": name,
        "slots": {f"config.{field}": value for field, value in fields.items()},
        "fields": tuple(f"ZeroConfig.{field}" for field in fields),
    }


def _leaves(run: Run, part: str) -> list[Any]:
    return jax.tree.leaves(getattr(run.state, part))


def _kernel_stays(run: Run) -> bool:
    before, after = (jax.tree_util.tree_leaves_with_path(x) for x in (run.start, run.after))
    return all(
        np.array_equal(x, y)
        for (path, x), (_, y) in zip(before, after, strict=True)
        if re.search("bias|norm", jax.tree_util.keystr(path))
    )


FEATURES = [
    # Models.
    Feature(name="unrolled layers", slots={"model": "linen, unrolled"}),
    Feature(name="attention and loss in blocks", slots={"model": "linen, in blocks"}),
    Feature(name="nnx", slots={"model": "nnx"}),
    Feature(  # the same computation as without it
        name="functions",
        slots={"model": "functions"},
        fields=("make_step.model",),
        in_program=False,
    ),
    Feature(
        name="batch statistics",
        slots={"model": "batch statistics"},
        holds=lambda run: len(jax.tree.leaves(run.state.model_state)) == 2,
    ),
    Feature(
        name="own loss",
        slots={"make_step.loss": own_loss},
        fields=("make_step.loss", "Pipeline.from_model.loss"),
    ),
    Feature(
        name="LoRA",
        slots={"lora.targets": "(attn|mlp).*kernel|proj/kernel", "lora.rank": 4},
        holds=lambda run: "lora" in run.state.params,
    ),
    Feature(
        name="DoRA",
        slots={
            "lora.targets": "(attn|mlp).*kernel|proj/kernel",
            "lora.rank": 4,
            "lora.rank_stabilized": True,
            "lora.dora": True,
        },
        holds=lambda run: any(path[-1] == "m" for path, _ in paths_of(run.state.params["lora"])),
    ),
    Feature(
        name="LoRA, int8 base",
        slots={
            "lora.targets": "(attn|mlp).*kernel|proj/kernel",
            "lora.rank": 4,
            "lora.frozen": "int8",
        },
        holds=lambda run: "lora" in run.state.params,
    ),
    Feature(
        **_config("frozen", frozen="bias|norm"),
        holds=_kernel_stays,
    ),
    # Dtypes.
    Feature(
        **_config("bfloat16", compute_dtype="bfloat16", gather_dtype="bfloat16"),
        holds=lambda run: "u16" in run.dtypes,
        error=0.03,
    ),
    Feature(
        **_config("float16", compute_dtype="float16", init_loss_scale=2.0**12, loss_scale_window=9),
        holds=lambda run: float(run.state.loss_scale.scale) == 2.0**12,
        error=0.005,
    ),
    Feature(
        **_config("reduce_dtype", reduce_dtype="bfloat16"),
        holds=lambda run: "u16" in run.dtypes,
        error=0.006,
    ),
    # Wires.
    Feature(
        **_config(
            "8-bit weights", weight_wire=INT8, quantize_threshold=256, unquantized="embed|wpe"
        ),
        holds=lambda run: "u8" in run.dtypes,
        error=0.01,
    ),
    Feature(
        **_config("4-bit gradients", gradient_wire=INT4, quantize_threshold=256),
        holds=lambda run: "u8" in run.dtypes,
        error=0.15,
    ),
    Feature(
        **_config("two formats", gradient_wire=INT8, inter_node_gradient_wire=INT4),
        holds=lambda run: "u8" in run.dtypes,
        error=0.1,
    ),
    Feature(**_config("hpZ", hpz_size="node"), holds=lambda run: run.secondary_bytes > 0),
    Feature(
        **_config("secondary as wires", hpz_size="node", secondary="wire", weight_wire=INT8),
        holds=lambda run: run.secondary_bytes > 0,
        error=0.01,
    ),
    Feature(
        **_config("gather once", hpz_size="node", inter_node_gather="step"),
        holds=lambda run: run.step.programs.wiring.gathers_once,
    ),
    Feature(
        name="reduce once",  # The only micro-batch of a step would have nothing to wait for.
        slots={"config.inter_node_reduce": "step", "config.accumulate": 2},
        fields=("ZeroConfig.inter_node_reduce",),
        holds=lambda run: run.step.programs.wiring.collectives.reduces.stops_at_node,
    ),
    Feature(
        **_config(
            "weight differences", hpz_size="node", weight_differences=INT8, quantize_threshold=256
        ),
        holds=lambda run: any(x is not None for x in jax.tree.leaves(run.state.wire_state.copies)),
        error=0.01,
    ),
    Feature(
        **_config(
            "error feedback",
            error_feedback=Feedback(),
            inter_node_reduce="step",
            gradient_wire=INT8,
        ),
        holds=lambda run: len(jax.tree.leaves(run.state.wire_state.errors)) > 0,
        error=0.01,
    ),
    # Gathers.
    Feature(
        **_config("small units", unit_elements=500),
    ),
    Feature(
        **_config("prefetch", prefetch_bucket=10**6),
    ),
    Feature(
        **_config("reuse", max_live_parameters=10**6, max_reuse_distance=10**6),
    ),
    Feature(
        **_config("persistence", persistence_threshold=100, model_persistence_cap=300),
        holds=lambda run: any(leaf.persistent for leaf in run.step.programs.layout(run.state)),
    ),
    # Micro-batches.
    Feature(
        **_config("accumulate", accumulate=2, micro_batch=2),
        holds=lambda run: run.step.config.accumulate == 2,
    ),
    Feature(
        name="microbatches=",
        slots={"make_step.microbatches": 2},
        fields=("make_step.microbatches",),
        holds=lambda run: run.step.with_config(run.step.config).config.accumulate == 2,
    ),
    # Rewrites.
    Feature(
        **_config("rewrite", rewrite=Rewrite(attention_block=4, loss_chunk=3)),
        holds=lambda run: len(run.step.programs.rewrites.rewritten) > 0,
    ),
    # Memory.
    Feature(
        name="memory",
        slots={"config.memory": True},  # a little less than what the step takes without it
        fields=("ZeroConfig.memory",),
        holds=lambda run: run.step.describe().memory.best.keeping is not None,
    ),
    Feature(
        name="memory decides",
        slots={
            "config.memory": True,
            "config.accumulate": "auto",
            "config.hpz_size": "auto",
        },
        holds=lambda run: set(run.decided) == {"accumulate", "hpz_size"},
    ),
    # Optimizers.
    Feature(name="optimizer with a state", slots={"optimizer": "momentum"}),
    Feature(
        name="optimizer of matrices",
        slots={"optimizer": "matrices", "config.owners": True},
        fields=("ZeroConfig.owners",),
        holds=lambda run: run.step.programs.describe_owners(run.state).rows != (),
    ),
    Feature(name="optimizer that reads the loss", slots={"optimizer": "plateau"}),
    Feature(
        name="optimizer of the config",
        slots={"config.optimizer": True},
        in_program=False,
        fields=("ZeroConfig.optimizer", "make_step.optimizer"),
    ),
    # Offload.
    Feature(
        name="optimizer on the host",
        slots={"offload.optimizer": "host", "optimizer": "momentum"},
        fields=("ZeroConfig.offload", "Offload.optimizer"),
        holds=lambda run: "host" in {place_of(x) for x in _leaves(run, "opt_state")},
    ),
    Feature(
        name="update on the host",
        slots={"offload.optimizer": "host", "offload.update": "host", "optimizer": "momentum"},
        fields=("Offload.update",),
        holds=lambda run: "host" in {place_of(x) for x in _leaves(run, "opt_state")},
    ),
    Feature(
        name="parameters on the host",
        slots={"offload.params": "host", "offload.ratio": 0.9},
        fields=("Offload.params", "Offload.ratio"),
        holds=lambda run: "host" in {place_of(x) for x in _leaves(run, "params")},
    ),
    Feature(
        name="optimizer on disk",
        slots={"offload.optimizer": "disk", "offload.path": True, "optimizer": "momentum"},
        fields=("Offload.path",),
        holds=lambda run: "disk" in {place_of(x) for x in _leaves(run, "opt_state")},
    ),
    Feature(
        name="parameters on disk",
        slots={
            "offload.params": "disk",
            "offload.path": True,
            "offload.sub_group": 500,
            "offload.buffers": 3,
        },
        fields=("Offload.sub_group", "Offload.buffers"),
        holds=lambda run: "disk" in {place_of(x) for x in _leaves(run, "params")},
    ),
    Feature(
        name="secondary on the host",
        slots={"offload.secondary": "host", "config.hpz_size": "node"},
        fields=("Offload.secondary",),
        holds=lambda run: run.step.programs.wiring.collectives.gathers.secondary_on_host,
    ),
    # Pipelines.
    Feature(
        name="pipeline",
        slots={"pipeline.schedule": "1f1b", "mesh.pipe": 2, "make_step.weights": "step"},
        fields=("Pipeline.schedule", "make_step.weights"),
        holds=lambda run: run.step.programs.pipeline is not None,
    ),
    Feature(
        name="pipeline, tick",
        slots={
            "pipeline.schedule": "zb-h1",
            "pipeline.partition": "uniform",
            "mesh.pipe": 2,
            "make_step.weights": "tick",
        },
        fields=("Pipeline.partition",),
        holds=lambda run: run.step.programs.pipeline is not None,
    ),
    Feature(
        name="pipeline, low memory",
        slots={
            "pipeline.memory": "low",
            "pipeline.allow_empty": True,
            "mesh.pipe": 2,
            "make_step.weights": "tick",
        },
        fields=("Pipeline.memory", "Pipeline.allow_empty"),
        holds=lambda run: run.step.programs.pipeline is not None,
    ),
    Feature(
        name="pipeline, chunks",
        slots={
            "pipeline.schedule": "interleaved",
            "pipeline.chunks": 2,
            "pipeline.stash": "activations",
            "mesh.pipe": 2,
            "make_step.weights": "tick",
        },
        fields=("Pipeline.chunks", "Pipeline.stash"),
        holds=lambda run: (
            run.step.programs.pipeline.schedule(2, 1, train=True).num_chunks == 2
            and not run.step.programs.pipeline.runs_forward_again
        ),
    ),
    # Axes that split the work on one row.
    Feature(
        name="tensor",
        slots={"mesh.tensor": 2},
        holds=lambda run: any(p.parts for p in run.state.placements[0]),
    ),
    Feature(
        name="context",
        slots={"mesh.context": 2},
        holds=lambda run: run.step.programs.axes is not None,
    ),
    # What happens to a state.
    Feature(name="checkpoint", slots={"uses.checkpoint": True}, in_program=False),
    Feature(name="other options", slots={"uses.other options": True}, in_program=False),
    Feature(name="generate", slots={"uses.generate": True}, in_program=False),
]
BY_NAME = {feature.name: feature for feature in FEATURES}

ELSEWHERE = {
    "make_step.mesh": "every job has one",
    "make_step.config": "every job has one",
    "make_step.axis_names": "other names in the model's trace, see step/test_axis_names.py",
    "ZeroConfig.remat": "what a budget makes of the model's own, see tests/step/test_memory.py",
    "Offload.activations": "one choice of a budget, see tests/step/test_memory.py",
    "ZeroConfig.splits": "says what the axes split, see tests/step/test_axes_pins.py",
    "ZeroConfig.outer": "what islands do with a step's state, see tests/step/islands",
    "Offload.pin": "True is its only value",
    "Pipeline.layers": "tests/pipeline: lists of layers",
    "Pipeline.loss": "tests/pipeline: lists of layers",
    "Pipeline.inputs": "tests/pipeline: lists of layers",
    "Pipeline.remat": "tests/pipeline: lists of layers",
    "Pipeline.from_model.model": "every pipeline has one",
}
"""The options that no feature is about, with the reason."""

PIPELINES = ("pipeline", "pipeline, tick", "pipeline, low memory", "pipeline, chunks")


def _each(first: Any, second: Any, text: str) -> Iterator[tuple[frozenset[str], str]]:
    """Yield an entry for every pair of two groups of names."""
    first, second = ((x,) if isinstance(x, str) else x for x in (first, second))
    for pair in itertools.product(first, second):
        yield frozenset(pair), text


REFUSED: dict[frozenset[str], str] = dict(
    itertools.chain(
        _each(PIPELINES, "parameters on disk", "of a pipeline is not supported"),
        _each(PIPELINES, ("memory", "memory decides"), "of a pipeline is not supported"),
        _each(
            ("memory", "memory decides"),
            ("parameters on disk", "optimizer on disk"),
            "with a state on disk",
        ),
        _each("memory decides", ("tensor", "context"), "accumulate='auto' with axes"),
        _each("memory decides", "microbatches=", "accumulate='auto' contradict"),
        _each("pipeline, tick", "pipeline, low memory", "has no effect on schedule 'zb-h1'"),
        _each("pipeline, chunks", "pipeline, low memory", "no effect on schedule 'interleaved'"),
        _each("update on the host", "parameters on disk", "the host updates what is in its memory"),
        _each(
            "weight differences",
            "secondary on the host",
            "the kept copy is the secondary shard there",
        ),
        _each("functions", "own loss", "give one loss: put it in the pair"),
        _each("functions", "generate", "generation needs its logits; pass a flax module"),
    )
)
"""The pairs that are refused: the names, and a regular expression that the error matches."""

WITHOUT_EFFECT: dict[frozenset[str], str] = dict(
    itertools.chain(
        _each(
            "pipeline",
            ("hpZ", "secondary as wires", "gather once", "secondary on the host"),
            'no effect in a pipeline with weights="step"',
        ),
        _each(
            "pipeline",
            ("small units", "prefetch", "reuse"),
            'no effect in a pipeline with weights="step"',
        ),
        _each(
            "reuse",
            ("hpZ", "secondary as wires", "secondary on the host"),
            "without effect: with max_live_parameters=",
        ),
        _each("batch statistics", "generate", "tensor=2 splits none of the model's leaves"),
    )
)
"""The pairs in which one feature has no effect. Each has the words of the warning that says so."""

SAME_PROGRAM: dict[tuple[str, str], str] = {
    ("frozen", "LoRA"): "adapters freeze their base anyway",
    ("frozen", "DoRA"): "adapters freeze their base anyway",
    ("frozen", "LoRA, int8 base"): "adapters freeze their base anyway",
    ("gather once", "weight differences"): "differences cross nodes once anyway",
    ("8-bit weights", "secondary as wires"): "it has 8-bit weights",
    ("persistence", "pipeline"): "a stage keeps every leaf for the step anyway",
    ("memory decides", "memory"): "the budget may choose what a step does anyway",
    ("accumulate", "microbatches="): "the same number in another place",
    ("microbatches=", "accumulate"): "the same number in another place",
    ("accumulate", "reduce once"): "it accumulates too",
    ("microbatches=", "reduce once"): "it accumulates too",
    ("optimizer with a state", "parameters on disk"): "the update is a program of its own",
    ("optimizer of matrices", "parameters on disk"): "the update is a program of its own",
}
"""The features that leave the program of a job with the second one as it is, with the reason."""


def pairs() -> Iterator[tuple[Feature, Feature]]:
    """Yield every pair of features that can be turned on together."""
    for one, other in itertools.combinations(FEATURES, 2):
        if one.meets(other):
            yield one, other
