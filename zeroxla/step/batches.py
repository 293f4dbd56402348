"""`StepBatches`: checks the batches that a step is given, and puts them where its programs read
them."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from zeroxla.mesh.batches import placed_batch, plain_batch, process_shard, put_batch
from zeroxla.program.paths import paths_of
from zeroxla.program.shapes import shapes_of, shapes_on
from zeroxla.step.axes.split_batch import BY_ROWS
from zeroxla.step.checks import check_batch, check_tokens
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState, check_is_state
from zeroxla.step.state_shapes import StateShapes


class StepBatches:
    """The batches of a step.

    They are split over (node, device) by rows. Where axes split the work on one row, a device is
    given the parts of an array that its loss reads, if it reads the array in parts alone.

    Args:
      programs: the step's programs.
      shapes: knows for which model and leaves they are traced.
    """

    def __init__(self, programs: Programs, shapes: StateShapes) -> None:
        self._programs, self._shapes = programs, shapes
        self._known: dict[Any, Any] = {}
        self._placements: Any = None  # of the leaves for which they are known

    def checked(self, batch: Any, *, train: bool = True) -> Any:
        """Return a batch as a pytree of arrays or shapes. See `check_batch` for the errors."""
        config = self._programs.config
        own = (config.num_micro_batches, config.micro_batch) if train else (1, None)
        batch = check_batch(batch, self._programs.mesh, *own)
        check_tokens(batch, self._programs.adapted.vocabulary)
        return batch

    def shardings(self, batch: Any, *, train: bool = True) -> Any:
        """Return how each array of a checked batch is placed on the mesh: a pytree of shardings.

        Args:
          batch: the batch, or its shapes.
          train: whether it is a batch to train on; otherwise one to evaluate.

        Cost: with axes that split the work on one row, the first batch of each shape is traced, and
        its plans are searched; the step then uses these.
        """
        programs, batch = self._programs, shapes_of(batch)
        if programs.axes is None:
            return jax.tree.map(lambda _: NamedSharding(programs.mesh, BY_ROWS), batch)
        if self._shapes.traced is None:
            self._shapes.decide(jax.random.key(0), self.checked(batch))
        traced = self._shapes.traced
        assert traced is not None, "it has been decided"
        if traced.placements != self._placements:
            self._known, self._placements = {}, traced.placements
        leaves, tree = jax.tree.flatten(batch)
        known = train, tree, tuple((x.shape, x.dtype) for x in leaves)
        if known not in self._known:
            layout = programs.layout_of(traced.params, traced.placements)
            with programs.tracing():
                split = programs.split(layout, traced.model_state, batch, traced.key, train=train)
            specs = split.specs()
            self._known[known] = jax.tree.map(lambda s: NamedSharding(programs.mesh, s), specs)
        return self._known[known]

    def shapes(self, batch: Any) -> Any:
        """Return the shapes of a batch to train on, with the shardings that it has on the mesh."""
        batch = self.checked(batch)
        return shapes_on(batch, self.shardings(batch))

    @property
    def last(self) -> Any:
        """The shapes of the batch that the step has seen last.

        Raises:
          ValueError: it has seen none.
        """
        return shapes_of(self._shapes.last_batch)

    def beside(self, state: TrainState, batch: Any, *, train: bool = True) -> Any:
        """Check a state and a batch; return the batch on the mesh."""
        check_is_state(state)
        batch = self.checked(batch, train=train)
        self._shapes.check(state, batch)
        return self.put(batch, train=train)

    def put(self, batch: Any, *, train: bool = True) -> Any:
        """Put a checked batch on the mesh. See `put_batch` for the errors."""
        return put_batch(batch, self._programs.mesh, self.shardings(batch, train=train))

    def place(self, rows: Any, *, train: bool = True) -> Any:
        """Make a batch of the rows that each process has read. See `Step.place`."""
        mesh = self._programs.mesh
        _, count = process_shard(mesh)
        rows = jax.tree.map(np.asarray, plain_batch(rows))
        check_tokens(rows, self._programs.adapted.vocabulary)

        def whole(x: np.ndarray) -> jax.ShapeDtypeStruct:
            shape = (x.shape[0] * count, *x.shape[1:]) if x.shape else ()
            return jax.ShapeDtypeStruct(shape, x.dtype)

        shapes = self.checked(jax.tree.map(whole, rows), train=train)
        return placed_batch(rows, mesh, self.shardings(shapes, train=train))


class BatchKinds:
    """Says once that a program was compiled again, for a batch of other keys or shapes."""

    def __init__(self) -> None:
        self._first: dict[str, dict[str, str]] = {}
        self._has_warned = False

    def notice(self, program: str, batch: Any, *, stacklevel: int) -> None:
        """Compare a batch with the first one of its program, and warn if they differ; once in all.

        Args:
          program: "step" or "evaluation".
          batch: the batch, on the mesh.
          stacklevel: see `warnings.warn`; it counts this method as 1.
        """
        if self._has_warned:
            return
        now = {
            "/".join(path) or "batch": f"{x.dtype}[{','.join(map(str, x.shape))}]"
            for path, x in paths_of(batch)
        }
        before = self._first.setdefault(program, now)
        changed = [
            f"{name} {before.get(name, '(absent)')} -> {now.get(name, '(absent)')}"
            for name in dict.fromkeys((*before, *now))
            if before.get(name) != now.get(name)
        ]
        if changed:
            self._has_warned = True
            warnings.warn(
                f"the {program} was compiled again, for a batch of other keys or shapes: "
                f"{'; '.join(changed)}. Each new kind of batch costs a compilation: pad rows to "
                "few lengths, and drop or fill the last batch. (This is said once.)",
                stacklevel=stacklevel,
            )
