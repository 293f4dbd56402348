"""The checks that every model goes through, on 2 nodes of 2 simulated devices."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable

import jax
import numpy as np

import zeroxla
from gauntlet_parts.model_run import NUM_DEVICES, Run, optimizer
from gauntlet_parts.outcome import NotApplicable, Wrong
from gauntlet_parts.reference import by_path, real_parts, worst_leaf
from zeroxla.step.state import host_leaf

GRADIENT_BOUND = 5e-6


def zero3(run: Run) -> str:
    """Compare loss, gradients and the loss after a step with the reference.

    The gradients are the optimizer's momentum after its first step.
    """
    loss, gradients, after = run.expected
    state, found_loss = run.after_a_step
    near("loss", found_loss, loss, 1e-5)
    momentum = whole(state)[1]
    found = {name: momentum[f"0/trace/{name}"] for name in gradients}
    detail = same_gradients(found, gradients, rounding=lambda: run.gradient_rounding)
    check_state_moves(by_path(run.start().model_state), by_path(state.model_state))
    _, metrics = run.plain(jax.tree.map(lambda x: x.copy(), state), run.built.batch)
    if not run.built.reads_state:
        try:
            near("loss after a step", float(metrics["loss"]), after, 1e-4)
        except Wrong as error:
            raise Wrong(
                f"{error}; last bits of its parameters change that by {run.rounding:.0e} of it"
            ) from error
    return detail


def check_state_moves(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> None:
    """Check that running statistics, and what flax overwrites with gradients, change in a step.

    Raises:
      Wrong: all leaves of such a collection are as before.
    """
    for collection in ("batch_stats", "_overwrite_with_gradient"):
        names = [name for name in before if name.startswith(collection)]
        if names and all((before[name] == after[name]).all() for name in names):
            raise Wrong(f"the {len(names)} leaves of {collection} did not change in a step")


def zeropp(run: Run) -> str:
    """Take two steps of ZeRO++; the losses must be near the reference's."""
    config = zeroxla.ZeroConfig.zeropp(persistence_threshold=0)
    step = run.step(zeroxla.make_mesh(nodes=2, devices_per_node=2), config=config)
    step.abstract_state(run.built.batch)
    start = run.start()
    state = step.init_from(start.params, jax.random.key(0), model_state=start.model_state)
    loss, _, after = run.expected
    state, first = step(state, run.built.batch)
    _, second = step(state, run.built.batch)
    pairs = [("loss", first, loss), ("loss after a step", second, after)]
    pairs = pairs[:1] if run.built.reads_state else pairs
    for what, found, want in pairs:
        near(what, float(found["loss"]), want, 0.05, 0.05)
    if int(second["skipped"]):
        raise Wrong(f"{int(second['skipped'])} of 2 steps were skipped")
    off = max(abs(float(found["loss"]) - want) for _, found, want in pairs)
    return f"loss within {off:.1e}"


def lora(run: Run) -> str:
    """Train adapters: they change, the base does not, and the first loss is the model's own."""
    step, detail = adapted(run)
    state = step.init(jax.random.key(0), run.built.batch)
    before = zeroxla.full_params(state)
    state, metrics = step(state, run.built.batch)
    near("first loss", float(metrics["loss"]), run.expected[0], 1e-5)
    after = zeroxla.full_params(state)
    changed = [
        n for n, x in by_path(after["base"]).items() if (by_path(before["base"])[n] != x).any()
    ]
    if changed:
        raise Wrong(f"the frozen base changed: {', '.join(changed[:4])}")
    old, new = by_path(before["lora"]), by_path(after["lora"])
    if all((old[name] == x).all() for name, x in new.items()):
        raise Wrong("no adapter changed in a step")
    _, metrics = step(state, run.built.batch)
    if not float(metrics["loss"]) < 1.1 * run.expected[0] + 0.1:
        raise Wrong(f"the loss went from {run.expected[0]:.5g} to {float(metrics['loss']):.5g}")
    return detail


def adapted(run: Run) -> tuple[zeroxla.Step, str]:
    """Return a step of the model with adapters on the leaves of `targets`, and a detail.

    Where not all of them are dense, zeroxla says which leaves are, and these are taken.

    Raises:
      NotApplicable: no leaf has two dims or more.
      ValueError: no leaf is dense.
    """
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=2)
    names = [name for name, x in run.reference.names(run.reference.params).items() if x.ndim > 1]
    if not names:
        raise NotApplicable("no leaf has two dims")

    def of(targets: str) -> zeroxla.Step:
        model = zeroxla.lora(run.built.model, targets=targets, rank=2)
        step = run.step(mesh, model=model)
        step.abstract_state(run.built.batch)
        return step

    try:
        return of(run.built.targets), f"all leaves named {run.built.targets}"
    except ValueError as error:
        _, _, dense = str(error).partition("the dense leaves of the model are ")
        listed = [name for name in dense.split(", ") if name in names]
        if not listed:
            raise
        targets = "|".join(f"^{re.escape(name)}$" for name in listed)
        return of(targets), f"on {len(listed)} leaves that are dense; all together: {error}"


def pipeline(run: Run, stages: int = 2) -> str:
    """Cut the model in stages; compare loss and gradients with the reference.

    A stage has the devices that are left, and there are as many micro-batches as stages: so the
    rows of one device and micro-batch are always the same.
    """
    if isinstance(run.built.model, tuple):
        model = zeroxla.Pipeline.from_model(run.built.model)
    else:
        model = zeroxla.Pipeline.from_model(run.built.model, run.built.loss)
    mesh = zeroxla.make_mesh(pipe=stages, nodes=1, devices_per_node=NUM_DEVICES // stages)
    step = zeroxla.make_step(
        model,
        mesh,
        optimizer(run.built),
        config=zeroxla.ZeroConfig(persistence_threshold=0),
        microbatches=stages,
    )
    state = step.init(jax.random.key(0), run.built.batch)
    loss, gradients, _ = run.expected
    found_loss, found = step.grad(state, run.built.batch)
    near("loss", float(found_loss), loss, 1e-5)
    found = real_parts(by_path(found))
    return same_gradients(found, gradients, rounding=lambda: run.gradient_rounding)


def axis(run: Run, name: str) -> str:
    """Split the work on a row over 2 devices; compare loss and gradients with the reference.

    Two nodes of two devices have half as many ranks for rows as in `zero3`, and take two
    micro-batches: so the rows of one rank and micro-batch are the same.
    """
    config = zeroxla.ZeroConfig(persistence_threshold=0, accumulate=2)
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=2, **{name: 2})
    step = run.step(mesh, config=config)
    step.abstract_state(run.built.batch)
    start = run.start()
    state = step.init_from(start.params, jax.random.key(0), model_state=start.model_state)
    loss, gradients, _ = run.expected
    found_loss, found = step.grad(state, run.built.batch)
    near("loss", float(found_loss), loss, 1e-5)
    found = real_parts(by_path(found))
    return same_gradients(found, gradients, rounding=lambda: run.gradient_rounding)


def plan(run: Run) -> str:
    """Plan the model for 2 nodes of 8 devices; the number of parameters must be right."""
    batch = jax.tree.map(lambda x: np.resize(x, (16, *x.shape[1:])), run.built.batch)
    mesh = {"node": 2, "device": 8}
    found = zeroxla.plan(run.built.model, mesh, batch, loss=run.built.loss, **run.built.options)
    leaves = real_parts(run.reference.names(run.reference.params)).values()
    count = sum(x.size for x in leaves)
    if found.num_parameters != count:
        raise Wrong(f"{found.num_parameters} parameters, and the model has {count}")
    if not str(found).strip():
        raise Wrong("the plan prints nothing")
    return f"{count:,} parameters"


def checkpoint(run: Run) -> str:
    """Save after a step on 2 x 2 devices, restore on 1 x 3: every array must be the same."""
    state, _ = run.after_a_step
    step = run.step(zeroxla.make_mesh(nodes=1, devices_per_node=3))
    step.abstract_state(run.built.batch)
    with tempfile.TemporaryDirectory() as folder:
        with zeroxla.Checkpointer(folder) as checkpointer:
            checkpointer.save(1, state, {"next": 1})
        with zeroxla.Checkpointer(folder) as checkpointer:
            restored = checkpointer.restore(step)
    for part, old, new in zip(
        ("parameters", "optimizer state"), whole(state), whole(restored.state), strict=True
    ):
        same_bits(part, old, new)
    same_bits("model state", by_path(state.model_state), by_path(restored.state.model_state))
    return "bit equal"


def whole(state: zeroxla.TrainState) -> list[dict[str, np.ndarray]]:
    """Return the parameters and the optimizer state in natural shapes."""
    parts = []
    for tree, placements in zip((state.params, state.opt_state), state.placements, strict=True):
        leaves, structure = jax.tree.flatten(tree)
        naturals = [host_leaf(x, p) for x, p in zip(leaves, placements, strict=True)]
        parts.append(by_path(structure.unflatten(naturals)))
    return parts


def same_bits(part: str, old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> None:
    if old.keys() != new.keys():
        raise Wrong(f"other leaves in the {part}: {sorted(old.keys() ^ new.keys())[:4]}")
    for name, x in old.items():
        if x.dtype != new[name].dtype or x.tobytes() != new[name].tobytes():
            raise Wrong(f"{name} of the {part} changed")


def same_gradients(
    found: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    *,
    rounding: Callable[[], float],
) -> str:
    """Compare gradients; return the largest error, relative to the largest gradient of a leaf.

    Args:
      found, expected: the gradients by name.
      rounding: returns how far other last bits of the parameters take the expected gradients. The
        text of an error says so.
    """
    if found.keys() != expected.keys():
        raise Wrong(f"gradients of other leaves: {sorted(found.keys() ^ expected.keys())[:4]}")
    leaf, error = worst_leaf(found, expected)
    if error > GRADIENT_BOUND:
        raise Wrong(
            f"the gradient of {leaf} is off by {error:.1e} (bound {GRADIENT_BOUND:.0e}); other "
            f"last bits of the parameters change a gradient by {rounding():.1e}"
        )
    return f"{error:.1e}"


def near(what: str, found: float, expected: float, relative: float, absolute: float = 0.0) -> None:
    if not abs(found - expected) <= relative * abs(expected) + absolute:
        raise Wrong(f"{what} is {found:.8g}, and the reference's is {expected:.8g}")
