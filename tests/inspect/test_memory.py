"""Memory of compiled programs and bytes of live arrays, against bytes counted by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from tools.inspect import LEAF, SPLIT_TREE_BYTES, make_mesh, split_tree

from zeroxla.inspect import array_bytes_per_device, format_bytes, memory


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (7, "7 B"),
        (5.25, "5.2 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (8_020_000, "8.02 MB"),
        (999_600, "1 MB"),
        (35e9, "35 GB"),
        (1.4e12, "1.4 TB"),
    ],
)
def test_bytes_are_written_in_decimal_units(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_memory_report_counts_shards_and_donated_outputs_once():
    mesh = make_mesh(2, 4)
    split = NamedSharding(mesh, LEAF)
    step = jax.jit(lambda w: w + 1, in_shardings=split, out_shardings=split, donate_argnums=0)
    lowered = step.lower(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    report = memory(lowered.compile())
    shard_bytes = 64 * 64 * 4 // 8
    assert report.argument_bytes == report.output_bytes == report.alias_bytes == shard_bytes
    assert report.total_bytes == shard_bytes + report.temp_bytes
    assert report.to_dict()["total_bytes"] == report.total_bytes
    assert "2,048" in str(report)
    with pytest.raises(ValueError, match=r"not Lowered; call \.compile\(\)"):
        memory(lowered)


def test_live_bytes_count_every_shard_once():
    mesh = make_mesh(2, 4)
    tree = split_tree(mesh)
    held = array_bytes_per_device(tree)
    assert held == dict.fromkeys(jax.devices(), SPLIT_TREE_BYTES)
    one = jax.device_put(jnp.zeros(100, jnp.int32), jax.devices()[3])
    tied = {"tree": tree, "again": tree["head"], "host": np.zeros(9), "rate": 0.1, "one": one}
    held = array_bytes_per_device(tied)
    assert held.pop(jax.devices()[3]) == SPLIT_TREE_BYTES + 400
    assert set(held.values()) == {SPLIT_TREE_BYTES}
