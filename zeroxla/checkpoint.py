"""Checkpoints of a run: the training state and the data position, written whole or not at all.

A thin layer on Orbax's `CheckpointManager`, which writes into a temporary folder and renames it
when everything is on disk: a step that is listed is complete. Here saving is synchronous, because
the step donates its state: the next step overwrites the buffers that a background write would read.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp


class SaveError(RuntimeError):
    """A checkpoint could not be written; those before it are untouched."""


class Checkpoints:
    """The checkpoints of one run, newest kept.

    Args:
      folder: Made if missing.
      keep: How many to keep; older ones are deleted after a newer one is whole.
    """

    def __init__(self, folder: Path, *, keep: int):
        self._folder = folder.resolve()
        self._manager = ocp.CheckpointManager(
            self._folder,
            # Named here, so that the metadata can be read before anything was saved or restored.
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "position": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, enable_async_checkpointing=False, create=True
            ),
        )

    def latest(self) -> int | None:
        """Return the newest complete step, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Write the state after `step` steps and the data position that goes with it.

        Does nothing if that step is already saved.

        Args:
          step: Number of steps taken.
          state: Pytree of arrays, sharded ones included; typed PRNG keys allowed.
          position: JSON-able, `get_state()` of the data iterator.

        Raises:
          SaveError: The disk is full or the folder not writable. Earlier checkpoints stay whole.

        Cost: blocks until the bytes are on disk.
        """
        if step in self._manager.all_steps():
            return
        self._remove_leftovers()
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(position)
        )
        try:
            with _quiet_absl():
                self._manager.save(step, args=arguments, force=True)
        # Orbax passes on what its storage layer raises: OSError, ValueError for tensorstore's
        # errors (a full disk among them), RuntimeError from its threads.
        except Exception as error:
            self._remove_leftovers()
            kept = self.latest()
            raise SaveError(
                f"the checkpoint of step {step} could not be written to {self._folder}: "
                f"{_root_cause(error)}; "
                + (f"the one of step {kept} is whole" if kept is not None else "there is no other")
            ) from error

    def restore(self, like: Any) -> tuple[int, Any, dict[str, Any]]:
        """Read the newest checkpoint.

        Args:
          like: Pytree of arrays or `jax.ShapeDtypeStruct` with shardings, equal in structure,
            shapes and dtypes to what was saved; every shard is read straight to its device.

        Returns:
          (step, state, position).

        Raises:
          ValueError: There is no checkpoint, or it holds another structure or other shapes.
        """
        step = self.latest()
        if step is None:
            raise ValueError(f"{self._folder} holds no complete checkpoint; start the run anew")
        self._check_holds(step, like)
        targets = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(targets), position=ocp.args.JsonRestore()
        )
        with _quiet_absl():
            restored = self._manager.restore(step, args=arguments)
        return step, restored["state"], restored["position"]

    def _check_holds(self, step: int, like: Any) -> None:
        # Before Orbax finds out leaf by leaf: its error names no leaf, and comes from a thread.
        saved = {
            leaf.name: tuple(leaf.shape)
            for leaf in jax.tree.leaves(self._manager.item_metadata(step)["state"].tree)
        }
        wanted = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(like):
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            data = jax.eval_shape(jax.random.key_data, leaf) if is_key else leaf
            wanted[jax.tree_util.keystr(path, simple=True, separator=".")] = tuple(data.shape)
        for name in sorted(saved.keys() | wanted.keys()):
            there, here = saved.get(name, "missing"), wanted.get(name, "missing")
            if there != here:
                raise ValueError(
                    f"the checkpoint of step {step} in {self._folder} is of another model or "
                    f"optimizer: its {name} is {there}, and here it is {here}"
                )

    def _remove_leftovers(self) -> None:
        # Of writes that failed: they hold space. What a dying write adds later goes the next time.
        if jax.process_index() != 0:
            return
        for leftover in self._folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def close(self) -> None:
        """Release the manager's threads."""
        self._manager.close()


@contextlib.contextmanager
def _quiet_absl() -> Iterator[None]:
    # Orbax logs a failed write's traceback once per thread it passes through; the one error that
    # is raised says it all.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    # tensorstore appends a dump of its whole specification.
    return str(error).split(" [tensorstore_spec")[0].split(" [os_error_code")[0]
