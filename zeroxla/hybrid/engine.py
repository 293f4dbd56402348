"""`HybridEngine` generates from the training state, in a layout that it makes and frees."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np

from zeroxla.hybrid.calls import MakeCache
from zeroxla.hybrid.check_calls import checked_calls
from zeroxla.hybrid.compile_cache import CompiledPrograms
from zeroxla.hybrid.find_calls import CallOptions
from zeroxla.hybrid.generate_programs import GeneratePrograms
from zeroxla.hybrid.model import LanguageModel, plan_shortcomings
from zeroxla.hybrid.named_call import Call
from zeroxla.hybrid.phase_memory import PhaseReport
from zeroxla.hybrid.phase_report import phase_report
from zeroxla.hybrid.prompts import (
    Generated,
    LengthLimits,
    check_finite,
)
from zeroxla.hybrid.request import Request
from zeroxla.hybrid.reshard import StoredModel, tensor_mesh
from zeroxla.hybrid.row_scores import RowScores
from zeroxla.hybrid.sampling import Sampling
from zeroxla.hybrid.shape_buckets import ShapeBuckets
from zeroxla.hybrid.tensor_copy import TensorCopy
from zeroxla.hybrid.token_stream import StreamedTokens, TokenStream, items_of
from zeroxla.split.tensor_plan import TensorPlan
from zeroxla.step.notices import warn
from zeroxla.step.state import TrainState, check_is_state
from zeroxla.step.step import Step


class HybridEngine(RowScores):
    """Generates from the state of a training step.

    `generate` gathers the state's leaves into a tensor-parallel layout: `tensor` devices of a node
    share a copy of the model, and the prompts are split over these groups of devices. It fills a
    cache of keys and values, draws token by token in one compiled loop, and frees the copy. The
    layout is read from the model's own trace; see `zeroxla.split.tensor_plan`.

    Attributes:
      mesh: the step's devices as the mesh (node, tensor, data); with stages, (pipe, node, tensor,
        data). Stages hold copies of the model like nodes. Axes that split the work on one row in
        training mean nothing here: `tensor` may be another than theirs.
      plan: which dim of which leaf is split, and why others are not; `print(engine.plan)`.
      max_length: the most tokens of a prompt and its continuation together.
      vocabulary: the number of different tokens.
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
        call: Call | None = None,
        make_cache: MakeCache | None = None,
        sample_length: int | None = None,
    ) -> None:
        """Plan the layout; nothing is computed with the model's weights.

        Args:
          step: the step of a flax module whose call takes tokens int32[B, L] and returns logits
            [B, L, V]. It must have seen a batch (`step.init` or `step.abstract_state` was called).
          tensor: the number of devices that share a copy of the model; divides the devices of a
            node.
          release: free the copy after each call. False keeps it until the state changes.
          max_length: the most tokens of a prompt and its continuation together. None takes the
            model's context (its attribute `length`, `max_length`, `max_position_embeddings`, ...).
          cache_dtype: the dtype of cached keys and values. None takes the compute dtype.
          prefill_tokens: the number of tokens of each prompt that are read at a time. More tokens
            are faster, but their attention scores, one for each place of the cache, take memory.
            Caches of one token a call, such as those of Flax's own attention, read 1.
          call: calls the module where the names of its arguments do not say how; see
            `zeroxla.hybrid.named_call.Call`. None finds out by tracing.
          make_cache: `make_cache(rows, places, dtype) -> cache`, any pytree of arrays, for a module
            that takes its cache as an argument. None takes the module's method `init_cache`.
          sample_length: the length of the rows on which the call is traced. Whole rows and caches
            then have a multiple of so many places. None tries 4, 8, 16 and so on.

        Raises:
          ValueError: `tensor` divides neither devices nor heads, the context is not known, no
            call of the model returns logits, its logits do not depend on tokens as a causal model's
            do, or the step has not seen a batch.
        """
        for name, number in (("prefill_tokens", prefill_tokens), ("sample_length", sample_length)):
            if number is not None and number < 1:
                raise ValueError(f"{name}={number} must be 1 or more")
        self._step = step
        self.mesh = tensor_mesh(step.mesh, tensor)
        stored = StoredModel.of(step)
        limits = LengthLimits.of(max_length, (step.adapted.base or step.adapted).context)
        options = CallOptions(
            call=call,
            make_cache=make_cache,
            cache_dtype=cache_dtype,
            sample_length=sample_length,
            limit=limits.max_length,
        )
        with step.programs.tracing():
            found = LanguageModel.of(step, stored, options)
            calls = checked_calls(found)
            self._model = dataclasses.replace(found, calls=calls)
            self.vocabulary = self._model.vocabulary
            self.plan: TensorPlan = self._model.plan(tensor)
        limits = limits.in_multiples(self._model.multiple)
        self._programs = GeneratePrograms(
            model=self._model, plan=self.plan, mesh=self.mesh, prefill_tokens=prefill_tokens
        )
        self.max_length = limits.max_length
        self._buckets = ShapeBuckets(limits=limits, copies=self._programs.copies)
        self._request = functools.partial(
            Request.of, vocabulary=self.vocabulary, buckets=self._buckets
        )
        self._compiled = CompiledPrograms(self._programs)
        self._copy = TensorCopy(self._programs, stored, release=release)
        warn([*calls.shortcomings(), *plan_shortcomings(self.plan)], stacklevel=3)

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
        eos: int | Sequence[int] | None = None,
        pad: int = 0,
    ) -> Generated:
        """Continue prompts with tokens that the model draws.

        Rows are independent. A row's tokens follow from its prompt, its place among the prompts,
        the key and the state. The other rows, the mesh and `tensor` change nothing but rounding.

        Args:
          state: the state of the engine's step; it is not changed.
          prompts: rows of token numbers of any lengths, one token or more each; the same rows in
            every process. They are split over the groups of `tensor` devices.
          key: a PRNG key; not used with temperature 0.
          max_new_tokens: the most tokens drawn for a row.
          temperature: divides the logits; 0 takes the likeliest token.
          top_k: the number of likeliest tokens to draw from; None draws from all.
          top_p: draw from the fewest likeliest tokens that reach this probability (among those that
            top_k left).
          eos: the token that ends a row, or several; None if there is none.
          pad: the token that the result has after a row's end; of the vocabulary.

        Returns:
          A `Generated`.

        Raises:
          ValueError: prompts are malformed or longer than the context, an option is out of range,
            the state belongs to another model, or logits are not finite.

        Cost: each device holds, beside the state, 1/tensor of the model in its compute dtype and
        its part of the cache; for a moment also its shards of parameters that are on disk. One
        compilation for each bucket of lengths (powers of two) and each number of rows.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        options = {"max_new_tokens": max_new_tokens, "sampling": sampling, "eos": eos, "pad": pad}
        request = self._request(prompts, key=key, **options)
        self._copy.check(state)
        with self._copy.of(state.params) as (leaves, reshard_s):
            start = time.perf_counter()
            whole = self._compiled.generate(request, leaves, state.model_state)
            generate_s = time.perf_counter() - start
        found = {name: x[: request.num_rows] for name, x in whole.items()}
        check_finite(found["finite"])
        return Generated(
            tokens=found["tokens"][:, :max_new_tokens],
            lengths=found["lengths"],
            logprobs=found["logprobs"][:, :max_new_tokens],
            reshard_s=reshard_s,
            generate_s=generate_s,
        )

    def stream(
        self,
        state: TrainState,
        prompts: Sequence[Sequence[int]] | np.ndarray,
        *,
        key: jax.Array,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        eos: int | Sequence[int] | None = None,
        pad: int = 0,
        every: int = 1,
    ) -> TokenStream:
        """Continue prompts, and yield the tokens as they are drawn: those that `generate` returns.

        The copy of the model is made for the first item, and then the state is not needed any more:
        a training step may take it, and the stream goes on with the parameters that it began with.

        Args:
          state, prompts, key, max_new_tokens, temperature, top_k, top_p, eos, pad: as for
            `generate`. Every one of several processes takes all items, or ends the stream after the
            same one.
          every: the number of steps that the devices take between two looks of the host. Items
            then come so many at a time.

        Returns:
          An iterator of `StreamedTokens`, one for each step in which a row draws a token. Use it in
          a `with` block, or `close` it, to end it early.

        Raises:
          ValueError: as `generate`, at once; but for logits that are not finite, before the items
            of their step.

        Cost: as `generate`; two compilations in the place of one. The programs are called and
        their results read once for `every` steps.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        options = {"max_new_tokens": max_new_tokens, "sampling": sampling, "eos": eos, "pad": pad}
        request = self._request(prompts, key=key, **options)
        if every < 1:
            raise ValueError(f"every={every} must be 1 or more")
        self._copy.check(state)
        self._compiled.check_alike(request)
        return TokenStream(self._stream(state, request, every))

    def _stream(
        self, state: TrainState, request: Request, every: int
    ) -> Generator[StreamedTokens, None, None]:
        check_is_state(state)  # again, as a training step may have taken it
        with self._copy.of(state.params) as (leaves, _):
            model_state = self._compiled.copied(state.model_state)
            del state  # which may be given away from now on
            for found in self._compiled.stream(request, leaves, model_state, every):
                yield from items_of(found, request.num_rows)

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
        """Lower the program that `generate` would run, for `zeroxla.inspect`.

        Its arguments are the parts of the model and the prompts; its temporaries are the cache and
        activations.

        Args:
          num_prompts, prompt_length: the number of prompts, and the length of the longest.
          max_new_tokens, temperature, top_k, top_p: as for `generate`.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        return self.trace(num_prompts, prompt_length, max_new_tokens, sampling).lower()

    def trace(
        self, num_prompts: int, prompt_length: int, max_new_tokens: int, sampling: Sampling
    ) -> jax.stages.Traced:
        """Trace the program that `lower` lowers; this needs no devices."""
        shape = self._buckets.decode_shape(num_prompts, prompt_length, max_new_tokens, sampling)
        return self._compiled.trace_generate(shape, sampling)

    def phases(self, num_prompts: int | None = None, length: int | None = None) -> PhaseReport:
        """Report one device's memory in training and in generating.

        Use it through `zeroxla.inspect.memory`.

        Args:
          num_prompts, length: the number of prompts in the cache, and the number of tokens of each
            with its continuation. None leaves the cache out.

        Raises:
          ValueError: only one of the two is given.
        """
        if (num_prompts is None) != (length is None):
            raise ValueError(
                f"num_prompts={num_prompts} and length={length}: a cache has both; give both, or "
                "neither"
            )
        cache: Any = ()
        if num_prompts is not None and length is not None:
            places = self._model.whole_length(self._buckets.limits.checked(length))
            cache = self._programs.cache_shapes(self._buckets.device_rows(num_prompts), places)
        return phase_report(self._step, self._model, self.plan, cache)

    def free(self) -> None:
        """Free a copy that was kept (`release=False`)."""
        self._copy.free()
