"""`Job`: describes a training run of the tests of pairs, runs it, and finds what it has to give.

A feature turns slots of a job on. The reference is the same model on one device under `jax.grad`,
from tools/reference.py.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tools.matrix_optimizers import damped
from tools.reference import Reference

import zeroxla
from zeroxla import Checkpointer, HybridEngine, Offload, Pipeline, ZeroConfig
from zeroxla.frontend import adapt
from zeroxla.models import GPT, Llama
from zeroxla.models.losses import next_token_loss
from zeroxla.offload.array_bytes import shard_bytes

KEY = jax.random.key(2)
ROWS, LENGTH = 16, 8
BATCH = {"tokens": np.random.default_rng(0).integers(0, 64, (ROWS, LENGTH + 1), dtype=np.int32)}
STEPS = 2


class Normed(nn.Module):
    """A next-token model with batch statistics."""

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        x = nn.Embed(64, 32, name="embed")(tokens)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        x = nn.tanh(nn.Dense(64, name="attn")(x))
        return nn.Dense(64, name="head")(x)

    def loss(self, batch: Any, *, train: bool) -> jax.Array:
        tokens = batch["tokens"]
        return next_token_loss(self(tokens[:, :-1], train=train), batch)[0]


def _functions() -> Any:
    """The GPT as a pair of plain functions."""
    model = GPT.tiny(layers=2, width=32)

    def init(key: jax.Array, batch: Any) -> Any:
        return model.init({"params": key}, batch, train=False, method="loss")["params"]

    def loss(params: Any, batch: Any, key: jax.Array) -> Any:
        return model.apply({"params": params}, batch, train=True, method="loss")

    return init, loss


def own_loss(apply: Any, batch: Any, *, train: bool) -> jax.Array:
    """Return the loss of a user who gives `loss=`: twice that of the model."""
    inputs = batch["tokens"][:, :-1]
    try:
        logits = apply(inputs, train=train)
    except TypeError:  # Llama has no such argument
        logits = apply(inputs)
    return 2 * next_token_loss(logits, batch)[0]


MODELS = {
    "linen, scanned": lambda: GPT.tiny(layers=2, width=32),
    "linen, in blocks": lambda: GPT.tiny(layers=2, width=32, attention_block=4, loss_chunk=3),
    "linen, unrolled": lambda: GPT.tiny(layers=2, width=32, scan=False),
    "nnx": lambda: Llama.tiny(),
    "functions": _functions,
    "batch statistics": Normed,
}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "matrices": lambda: optax.chain(damped(), optax.sgd(0.1, momentum=0.9)),
    "plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    ),
}


@dataclasses.dataclass
class Job:
    """One training run.

    Attributes:
      config: fields of `ZeroConfig`.
      offload: fields of `Offload`.
      mesh: the arguments of `make_mesh`.
      pipeline: the arguments of `Pipeline.from_model`; None for no pipeline.
      lora: the arguments of `zeroxla.lora`; None for no adapters.
      make_step: further arguments of `make_step`.
      model, optimizer: names in `MODELS` and `OPTIMIZERS`.
      uses: functions that take the state after a step, and return that of the next one.
    """

    config: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"persistence_threshold": 0, "quantize_threshold": 256}
    )
    offload: dict[str, Any] = dataclasses.field(default_factory=dict)
    mesh: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"nodes": 2, "devices_per_node": 2}
    )
    pipeline: dict[str, Any] | None = None
    lora: dict[str, Any] | None = None
    make_step: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: str = "linen, scanned"
    optimizer: str = "sgd"
    uses: dict[str, Any] = dataclasses.field(default_factory=dict)

    def set(self, slot: str, value: Any) -> None:
        """Turn a slot on, such as `config.hpz_size` or `model`."""
        part, _, field = slot.partition(".")
        if not field:
            setattr(self, part, value)
            return
        if getattr(self, part) is None:
            setattr(self, part, {})
        getattr(self, part)[field] = value

    def adapters(self) -> Any:
        """The model, with its adapters if it has some."""
        model = MODELS[self.model]()
        return model if self.lora is None else zeroxla.lora(model, **self.lora)

    def make(self, folder: Path) -> Run:
        """Make the model and its step, without a state. `folder` gets the state on disk."""
        offload = {k: str(folder) if k == "path" else v for k, v in self.offload.items()}
        fields = dict(self.config)
        if "memory" in fields:
            fields["memory"] = 1 if self.pipeline or offload.get("path") else self._budget(folder)
        config = ZeroConfig(**fields, offload=Offload(**offload))
        model = whole = self.adapters()
        if self.pipeline is not None:
            loss = self.make_step.get("loss")
            model = Pipeline.from_model(whole, loss, **self.pipeline)
        options = {k: v for k, v in self.make_step.items() if k != "loss" or not self.pipeline}
        lengths = dict(self.mesh)
        axes = {"tensor", "context"} & set(lengths)
        if axes and "pipe" not in lengths:
            lengths["devices_per_node"] = 4  # the axis `device` keeps 4 / (tensor x context)
        elif len(axes) == 2:
            lengths |= {"nodes": 1, "devices_per_node": 4}
        names = ("pipe", "nodes", "devices_per_node")
        num_devices = math.prod(lengths.get(name, 1) for name in names)
        mesh = zeroxla.make_mesh(**lengths, devices=jax.devices()[:num_devices])
        optimizer = OPTIMIZERS[self.optimizer]()
        if "optimizer" in self.config:
            config, optimizer = dataclasses.replace(config, optimizer=optimizer), None
        step = zeroxla.make_step(model, mesh, optimizer, config=config, **options)
        return Run(job=self, whole=whole, step=step, folder=folder)

    def _budget(self, folder: Path) -> int:
        """A little less than what a device takes without a budget."""
        left = [("memory", True), ("accumulate", "auto"), ("hpz_size", "auto")]
        fields = dict(pair for pair in self.config.items() if pair not in left)
        step = dataclasses.replace(self, config=fields).make(folder).step
        state = step.abstract_state(BATCH)
        program = step.lower(state, BATCH).compile()
        on_host = shard_bytes((state.params, state.opt_state), place="host")
        return zeroxla.inspect.memory(program).total_bytes - on_host - 1

    def run(self, folder: Path) -> Run:
        """Take the steps, with the uses in between."""
        run = self.make(folder)
        step = run.step
        state = step.init(KEY, BATCH)
        run.start = zeroxla.full_params(state)
        for _ in range(STEPS):
            state, metrics = step(state, BATCH)
            run.losses.append(float(metrics["loss"]))
            for use in self.uses:
                state = USES[use](run, state)
        run.state = state
        return run


@dataclasses.dataclass
class Run:
    """A run that has been taken.

    Attributes:
      job: the job.
      whole: the model, with its adapters, and without stages.
      step: its step.
      folder: a folder of its own.
      start: the parameters before the first step.
      losses: the loss of each step.
      state: the state after the last step.
    """

    job: Job
    whole: Any
    step: Any
    folder: Path
    start: Any = None
    losses: list[float] = dataclasses.field(default_factory=list)
    state: Any = None

    @functools.cached_property
    def after(self) -> Any:
        """The parameters after the last step."""
        return zeroxla.full_params(self.state)

    @functools.cached_property
    def engine(self) -> HybridEngine:
        """An engine for the states of all steps."""
        return HybridEngine(self.step, tensor=2, max_length=16)

    @functools.cached_property
    def lowered(self) -> Any:
        return self.step.lower(self.step.abstract_state(BATCH), BATCH)

    @functools.cached_property
    def dtypes(self) -> set[str]:
        """The dtypes of collectives in the step's program."""
        rows = zeroxla.inspect.comms(self.lowered, self.step.mesh).rows
        return {name for row in rows for name in row.dtype.split("+")}

    @functools.cached_property
    def program(self) -> str:
        """A digest of the step's program."""
        return hashlib.sha256(self.lowered.as_text().encode()).hexdigest()

    @property
    def decided(self) -> dict[str, Any]:
        """The options that were left to a memory budget, with the values that it took."""
        return self.step.describe().memory.decided

    @property
    def secondary_bytes(self) -> int:
        """The bytes of secondary shards on one device."""
        programs = self.step.programs
        layout = programs.layout(self.state)
        layouts = programs.stage_layouts(layout, self.state.model_state, BATCH, self.state.key)
        return max(sum(map(programs.wiring.secondary_bytes, layout)) for layout in layouts)


def checkpoint(run: Run, state: Any) -> Any:
    """Write the state and read it back."""
    number = int(state.step)
    with Checkpointer(run.folder / "checkpoints") as checkpointer:
        checkpointer.save(number, state)
        return checkpointer.restore(run.step, number).state


def other_options(run: Run, state: Any) -> Any:
    """Evaluate with the options of a plain step, and go on."""
    other = run.step.with_config(ZeroConfig())
    assert np.isfinite(float(other.eval(state, BATCH)["loss"]))
    return state


def generate(run: Run, state: Any) -> Any:
    """Check that the mean log probability of a `HybridEngine` is minus the loss of the step."""
    engine = run.engine
    found = engine.logprobs(state, BATCH["tokens"])
    assert found.shape == (ROWS, LENGTH)
    loss = float(run.step.eval(state, BATCH)["loss"])
    factor = 2 if run.job.make_step.get("loss") is own_loss else 1
    assert abs(-factor * float(np.mean(found)) / loss - 1) < 0.03
    tokens = engine.generate(state, [[1, 2], [3]], key=KEY, max_new_tokens=2, temperature=0.0)
    assert tokens.tokens.shape[0] == 2
    return state


USES = {"checkpoint": checkpoint, "other options": other_options, "generate": generate}


def _train(job: Job, start: Any = None) -> tuple[list[float], Any, Any]:
    """Return the losses, and the parameters before and after the steps, on one device.

    Args:
      job: the job; what it says of wires, gathers and places means nothing here.
      start: the parameters to begin with; None makes them as the step does.
    """
    adapted = adapt(job.adapters(), job.make_step.get("loss"))
    frozen = job.config.get("frozen", ())
    frozen = (frozen,) if isinstance(frozen, str) else frozen
    has_statistics = job.model == "batch statistics"
    reference = Reference(
        init=adapted.init,
        loss=adapted.loss,
        world=4 if has_statistics else 1,
        accumulate=_accumulate(job) if has_statistics else 1,
        dtype=jnp.dtype(job.config.get("compute_dtype", "float32")),
        is_frozen=ZeroConfig(frozen=(*frozen, *adapted.frozen)).is_frozen,
    )
    params, model_state, key = reference.start(KEY, BATCH)
    params = params if start is None else start
    before = jax.tree.map(np.asarray, params)
    optimizer = OPTIMIZERS[job.optimizer]()
    opt_state = optimizer.init(reference.masked(params))
    step = reference.step(optimizer)
    losses = []
    for i in range(STEPS):
        params, opt_state, model_state, (loss, _, _) = step(
            params, opt_state, model_state, key, i, BATCH
        )
        losses.append(float(loss))
    return losses, before, jax.tree.map(np.asarray, params)


def _accumulate(job: Job) -> int:
    return job.make_step.get("microbatches") or job.config.get("accumulate", 1)


_remembered: dict[Any, Any] = {}


def reference_of(run: Run) -> tuple[list[float], Any, Any]:
    """Return what a run has to give: losses, and parameters before and after the steps.

    The base of adapters that is stored as wires is dequantized, and trained with float adapters.
    """
    job = run.job
    if job.config.get("accumulate") == "auto":
        job = dataclasses.replace(job, config=job.config | run.decided)
    if job.lora is not None and "frozen" in job.lora:
        lora = {name: value for name, value in job.lora.items() if name != "frozen"}
        start = {"base": run.whole.merge(run.start), "lora": run.start["lora"]}
        return _train(dataclasses.replace(job, lora=lora), start)
    key = (
        job.model,
        str(job.lora),
        job.make_step.get("loss"),
        job.optimizer,
        str(job.config.get("frozen")),
        job.config.get("compute_dtype"),
        _accumulate(job) if job.model == "batch statistics" else 1,
    )
    if key not in _remembered:
        _remembered[key] = _train(job)
    return _remembered[key]
