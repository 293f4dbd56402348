"""Pictures: what is drawn adds up to the bytes of the report and of the arrays."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tools.inspect import (
    GPU_PROGRAM,
    LEAF,
    SPLIT_TREE_BYTES,
    gather_hops,
    lower,
    make_mesh,
    split_tree,
)

from zeroxla.inspect import comms, plot_comms, plot_placement


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: tuple
    key: jax.Array


def bars_by_column(axes):
    heights = {}
    for container in axes.containers:
        for bar in container:
            x = round(bar.get_x() + bar.get_width() / 2, 6)
            heights[x] = heights.get(x, 0) + bar.get_height()
    return [heights[x] for x in sorted(heights)]


def pieces_of(axes, name):
    """(left, width) of each device's filled part, as shares of its box."""
    patches = [p for p in axes.patches if str(p.get_label()).startswith(f"{name} on ")]
    boxes = sorted({round(p.get_x(), 6) for p in axes.patches if p.get_linewidth() == 0.6})
    return [
        (round((p.get_x() - max(b for b in boxes if b <= p.get_x() + 1e-6)) / 0.8, 4),
         round(p.get_width() / 0.8, 4))
        for p in patches
    ]  # fmt: skip


def test_placement_picture_shows_each_device_its_piece(tmp_path):
    mesh = make_mesh(2, 4)
    tree = split_tree(mesh)
    figure = plot_placement(tree, mesh, path=tmp_path / "placement.png")
    bars, grid = figure.axes
    assert bars_by_column(bars) == [SPLIT_TREE_BYTES] * 8
    # Device-major: shard index = device * 2 + node, columns run over node, then device.
    expected = [((device * 2 + node) / 8, 1 / 8) for node in range(2) for device in range(4)]
    assert pieces_of(grid, "block/kernel") == expected
    assert pieces_of(grid, "block/bias") == [(0, 1)] * 8
    texts = [text.get_text() for text in grid.texts]
    assert texts.count("262 kB, 1/8 on each device") == 2
    assert "1.02 kB, whole on each device" in texts
    assert (tmp_path / "placement.png").read_bytes().startswith(b"\x89PNG")


def test_placement_picture_of_a_state_draws_the_leaves_of_its_parameters():
    mesh = make_mesh(2, 4)
    params = split_tree(mesh)
    whole = NamedSharding(mesh, P())
    state = State(
        step=jax.device_put(jnp.zeros((), jnp.int32), whole),
        params=params,
        opt_state=(split_tree(mesh), split_tree(mesh)),
        key=jax.device_put(jax.random.key(0), whole),
    )
    figure = plot_placement(state, mesh, max_leaves=3)
    bars, grid = figure.axes
    assert bars_by_column(bars) == [3 * SPLIT_TREE_BYTES + 4] * 8
    legend = [text.get_text() for text in bars.get_legend().get_texts()]
    assert legend == ["params", "opt_state", "others"]
    names = [label.get_text() for label in grid.get_yticklabels()]
    assert names == ["block/kernel  256x256", "block/out  256x256", "embed/embedding  512x256"]
    assert "2 smaller leaves are not drawn" in figure.get_supxlabel()


def test_placement_picture_works_from_shapes_and_needs_shardings():
    mesh = make_mesh(2, 4)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), split_tree(mesh)
    )
    bars, _ = plot_placement({"params": shapes}, mesh).axes
    assert bars_by_column(bars) == [SPLIT_TREE_BYTES] * 8
    legend = [text.get_text() for text in bars.get_legend().get_texts()]
    assert legend == ["embed", "block", "head"] or legend == ["block", "embed", "head"]
    with pytest.raises(ValueError, match="no arrays with a sharding"):
        plot_placement({"a": np.zeros(3)}, mesh)


def test_comms_picture_stacks_the_bytes_of_the_report(tmp_path):
    report = comms(GPU_PROGRAM, make_mesh(2, 4))
    figure = plot_comms(report, path=tmp_path / "comms.png")
    received, sent = figure.axes
    assert sum(bars_by_column(received)) == report.total_bytes()
    # Stacked: the highest edge in each column is the sum of its segments.
    edges = [
        max(container[i].get_y() + container[i].get_height() for container in received.containers)
        for i in range(3)
    ]
    assert edges == bars_by_column(received)
    assert sum(bars_by_column(sent)) == report.cross_host_bytes()
    labels = [label.get_text().replace("\n", " ") for label in received.get_xticklabels()]
    assert labels == ["forward gather + backward gather", "reduce", "other"]
    assert (tmp_path / "comms.png").read_bytes().startswith(b"\x89PNG")


def test_comms_picture_on_one_node_has_no_host_panel():
    mesh = make_mesh(1, 8)
    report = comms(lower(gather_hops, mesh, LEAF, P(), (64, 8)), mesh)
    (received,) = plot_comms(report).axes
    assert bars_by_column(received) == [report.total_bytes()]


def test_comms_picture_of_a_single_device_is_empty():
    mesh = make_mesh(1, 1)
    report = comms(lower(gather_hops, mesh, LEAF, P(), (64, 8)), mesh)
    (received,) = plot_comms(report).axes
    assert report.rows == ()
    assert bars_by_column(received) == []
