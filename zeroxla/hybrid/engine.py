"""`HybridEngine`: generates from the training state, in a layout that comes and goes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from zeroxla.hybrid.compile_cache import Compiled, Copy
from zeroxla.hybrid.decode import DecodeShape
from zeroxla.hybrid.generate_programs import Generation
from zeroxla.hybrid.model import Model
from zeroxla.hybrid.phase_memory import PhaseReport
from zeroxla.hybrid.phase_report import phase_report
from zeroxla.hybrid.prompts import Generated, LengthLimits, as_rows, left_padded
from zeroxla.hybrid.reshard import StoredModel, tensor_mesh
from zeroxla.hybrid.sampling import Sampling
from zeroxla.mesh.axes import PIPE
from zeroxla.split.tensor_plan import TensorPlan
from zeroxla.step.checks import check_is_state, check_key
from zeroxla.step.notices import warn
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step


class HybridEngine:
    """Generates from the state of a training step.

    `generate` gathers the state's leaves into a tensor-parallel layout, over `tensor` devices of a
    node, splits the prompts over the other devices, fills a cache of keys and values and draws
    token by token in one compiled loop; then the layout's memory is given back. The layout is found
    in the model's own trace: see `zeroxla.hybrid.tensor_parallel`.

    Attributes:
      mesh: the step's devices as (node, tensor, data).
      plan: which dim of which leaf is split, and why not; `print(engine.plan)`.
    """

    def __init__(
        self,
        step: Step,
        *,
        tensor: int = 1,
        release: bool = True,
        max_length: int | None = None,
        cache_dtype: Any = None,
        prefill_tokens: int = 64,
    ) -> None:
        """Plan the layout; nothing is computed with the model's weights.

        Args:
          step: of a flax module whose call takes tokens int32[B, L] and returns logits [B, L, V];
            it must have seen a batch (after `init`, or `abstract_state`).
          tensor: devices that share a copy of the model; divides the devices of a node.
          release: free the layout after each call; else it stays until the state changes.
          max_length: the most tokens of a prompt and its continuation; the model's own context if
            None (its attribute `length`, `max_length`, `max_position_embeddings`, ...).
          cache_dtype: of cached keys and values; that in which the model computes if None.
          prefill_tokens: how many tokens of each prompt are read at a time: more are faster, and
            their scores of attention, with each place of the cache, take more memory.

        Raises:
          ValueError: `tensor` divides neither devices nor heads, the context is not known, the
            model does not return logits, or the step has not seen a batch.
          NotImplementedError: the step has stages.
        """
        if step.mesh.shape.get(PIPE, 1) > 1:
            raise NotImplementedError(
                f"the step has pipe={step.mesh.shape[PIPE]} stages, and generation needs all "
                "layers on a device; restore a checkpoint on a mesh with pipe=1 to generate"
            )
        if prefill_tokens < 1:
            raise ValueError(f"prefill_tokens={prefill_tokens} must be 1 or more")
        self._step = step
        self.mesh = tensor_mesh(step.mesh, tensor)
        stored = StoredModel.of(step)
        self._model = Model.of(step, stored, cache_dtype)
        calls = self._model.calls
        self._limits = LengthLimits.of(max_length, calls.adapted.context)
        self.plan: TensorPlan = self._model.plan(tensor)
        generation = Generation(
            model=self._model, plan=self.plan, mesh=self.mesh, prefill_tokens=prefill_tokens
        )
        self._compiled = Compiled(generation)
        self._copy = Copy(generation, stored, release=release)
        warn([*calls.shortcomings(), *self.plan.shortcomings()], stacklevel=3)

    def generate(
        self,
        state: TrainState,
        prompts: Sequence[Sequence[int]] | np.ndarray,
        *,
        key: jax.Array,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        eos: int | None = None,
        pad: int = 0,
    ) -> Generated:
        """Continue prompts with tokens that the model draws.

        Rows are independent: a row's tokens follow from its prompt, its place among the prompts,
        the key and the state, not from the other rows, the mesh or `tensor`, but for rounding.

        Args:
          state: of the engine's step; it stays as it is.
          prompts: rows of token numbers of any lengths, one token or more each; the same ones in
            each process. Split over the devices beside `tensor`.
          key: a PRNG key; not used with temperature 0.
          max_new_tokens: the most tokens drawn for a row.
          temperature: divides the logits; 0 takes the likeliest token.
          top_k: draw from so many of the likeliest tokens only.
          top_p: draw from as many of the likeliest as reach this probability (of what top_k left).
          eos: the token that ends a row; None if there is none.
          pad: the token that follows a row's end in what is returned.

        Returns:
          A `Generated`.

        Raises:
          ValueError: bad prompts, prompts longer than the context, options out of range, a state of
            another model, or logits that are not finite.

        Cost: the model in its compute dtype, 1/tensor of it on each device, and the cache, beside
        the state; for a moment the shards of parameters on disk, too. One compilation for each
        bucket of lengths (powers of two) and number of rows.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        rows = as_rows(prompts)
        shape = self._shape(len(rows), max(map(len, rows)), max_new_tokens, sampling)
        key = check_key(key)
        self._check_state(state)
        options = {
            "new": np.int32(max_new_tokens),
            "eos": np.int32(-1 if eos is None else eos),
            "pad": np.int32(pad),
            "numbers": sampling.numbers,
        }
        batch = left_padded(rows, shape.rows * self._compiled.generation.copies, shape.prompt)
        with self._copy.of(state) as (leaves, reshard_s):
            start = time.perf_counter()
            whole = self._compiled.generate(shape, leaves, state.model_state, batch, key, options)
            generate_s = time.perf_counter() - start
        found = {name: x[: len(rows)] for name, x in whole.items()}
        if not found["finite"].all():
            bad = np.flatnonzero(~found["finite"]).tolist()
            raise ValueError(
                f"the logits of the rows {bad} are not finite (-inf, for tokens that are ruled "
                "out, would be); the state's parameters hold NaN or infinity, or the compute dtype "
                "overflows: look at the `finite` metric of its training"
            )
        return Generated(
            tokens=found["tokens"][:, :max_new_tokens],
            lengths=found["lengths"],
            logprobs=found["logprobs"][:, :max_new_tokens],
            reshard_s=reshard_s,
            generate_s=generate_s,
        )

    def logprobs(self, state: TrainState, tokens: Any) -> np.ndarray:
        """Return the log-probability of each token after the first, given those before it.

        Args:
          state: of the engine's step.
          tokens: int[B, L], padded on the right, if at all: causal models do not see it.

        Returns:
          float32[B, L - 1], of temperature 1. What stands at padding means nothing.

        Raises:
          ValueError: `tokens` is not such an array, or longer than the context.
        """
        return self._rows(state, tokens, "logprobs")[:, : np.shape(tokens)[1] - 1]

    def logits(self, state: TrainState, tokens: Any) -> np.ndarray:
        """Return the logits of each position's next token, float32[B, L, V]; else as `logprobs`."""
        return self._rows(state, tokens, "logits")[:, : np.shape(tokens)[1]]

    def values(self, state: TrainState, tokens: Any) -> np.ndarray:
        """Return the first logit at each token, float32[B, L]; else as `logprobs`.

        That is what a critic or a reward model says, for which any language model will do.
        """
        return self._rows(state, tokens, "values")[:, : np.shape(tokens)[1]]

    def _rows(self, state: TrainState, tokens: Any, name: str) -> np.ndarray:
        """Return what a function of whole rows returns, of tokens padded to a bucket."""
        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or tokens.shape[1] < 2 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"tokens have the shape {tokens.shape} and dtype {tokens.dtype}; pass whole "
                "numbers [B, L] with L of 2 or more"
            )
        self._check_state(state)
        rows, length = tokens.shape
        shape = self._padded(rows, length)
        whole = np.zeros(shape, np.int32)
        whole[:rows, :length] = tokens
        with self._copy.of(state) as (leaves, _):
            return self._compiled.rows(name, leaves, state.model_state, whole)[:rows]

    def _shape(
        self, num_rows: int, longest: int, max_new_tokens: int, sampling: Sampling
    ) -> DecodeShape:
        """Return what is compiled for a call.

        Raises:
          ValueError: there is nothing to generate, or more than the context holds.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be 1 or more")
        prompt, new = self._limits.buckets(longest, max_new_tokens)
        return DecodeShape(
            rows=self._rows_of_a_device(num_rows),
            prompt=prompt,
            new=new,
            greedy=sampling.is_greedy,
            filtered=sampling.is_filtered,
        )

    def _rows_of_a_device(self, rows: int) -> int:
        return -(-rows // self._compiled.generation.copies)

    def _padded(self, rows: int, length: int) -> tuple[int, int]:
        """Return the shape that is compiled for whole rows."""
        copies = self._compiled.generation.copies
        return self._rows_of_a_device(rows) * copies, self._limits.bucket(length)

    def lower(
        self,
        num_prompts: int,
        prompt_length: int,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
    ) -> jax.stages.Lowered:
        """Lower the program with which `generate` continues so many prompts of up to that length,
        for `zeroxla.inspect`: its arguments are the model's parts and the prompts, its temporaries
        the cache and activations."""
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        return self.trace(num_prompts, prompt_length, max_new_tokens, sampling).lower()

    def trace(
        self, num_prompts: int, prompt_length: int, max_new_tokens: int, sampling: Sampling
    ) -> jax.stages.Traced:
        """Trace what `lower` lowers; that needs no devices."""
        shape = self._shape(num_prompts, prompt_length, max_new_tokens, sampling)
        return self._compiled.trace_generate(shape, sampling)

    def lower_logprobs(self, num_rows: int, length: int) -> jax.stages.Lowered:
        """Lower the program of `logprobs` for so many rows of that length, as `lower` does."""
        return self._compiled.lower_rows("logprobs", self._padded(num_rows, length))

    def phases(self, num_prompts: int | None = None, length: int | None = None) -> PhaseReport:
        """Return what a device holds in training and in generating; see `zeroxla.inspect.memory`.

        Args:
          num_prompts, length: of the cache; see there.

        Raises:
          ValueError: only one of them is given.
        """
        if (num_prompts is None) != (length is None):
            raise ValueError(
                f"num_prompts={num_prompts} and length={length}: a cache has both; give both, or "
                "neither"
            )
        cache: Any = ()
        if num_prompts is not None and length is not None and self._model.calls.has_cache:
            rows = self._rows_of_a_device(num_prompts)
            program = self._model.cached(self.plan, rows, self._limits.checked(length), 1)
            cache = program.cache_shapes(self._compiled.generation.sharing)
        return phase_report(self._step, self._model, self.plan, cache)

    def free(self) -> None:
        """Free a layout that was kept (`release=False`)."""
        self._copy.free()

    def _check_state(self, state: TrainState) -> None:
        check_is_state(state)
        if state.placements[0] != self._copy.stored.placements:
            raise ValueError(
                "the state is stored otherwise than the engine's step stores it; make the engine "
                "from the step that this state belongs to"
            )
