"""Meshes: axes from devices and hosts, what is accepted of a user's own, simulated devices."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from zeroxla import make_mesh, simulate
from zeroxla.mesh.axes import as_auto, nodes_along, world_size


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, {"node": 1, "device": 8}),
        ({"nodes": 2}, {"node": 2, "device": 4}),
        ({"nodes": 2.0}, {"node": 2, "device": 4}),
        ({"pipe": 2}, {"pipe": 2, "node": 1, "device": 4}),
        ({"pipe": 2, "nodes": 2}, {"pipe": 2, "node": 2, "device": 2}),
    ],
)
def test_axes_follow_from_what_is_asked(options, shape):
    mesh = make_mesh(**options)
    assert dict(mesh.shape) == shape
    assert tuple(mesh.axis_names) == tuple(shape)  # The order, too.
    assert set(mesh.axis_types) == {AxisType.Auto}
    used = list(mesh.devices.flat)
    assert used == jax.devices()[: len(used)]
    assert world_size(mesh) == shape["node"] * shape["device"]


def test_devices_may_be_chosen(recwarn):
    mesh = make_mesh(nodes=2, devices=jax.devices()[4:])
    assert dict(mesh.shape) == {"node": 2, "device": 2}
    assert list(mesh.devices.flat) == jax.devices()[4:]
    assert not recwarn.list


@pytest.mark.parametrize(
    ("options", "shape", "idle"),
    [
        ({"devices_per_node": 2}, {"node": 1, "device": 2}, 6),
        ({"nodes": 3, "devices_per_node": 2}, {"node": 3, "device": 2}, 2),
        ({"pipe": 2, "devices_per_node": 3}, {"pipe": 2, "node": 1, "device": 3}, 2),
    ],
)
def test_idle_devices_are_counted_in_a_warning(options, shape, idle):
    with pytest.warns(UserWarning, match=f"leaves {idle} of 8 devices idle; pass devices="):
        mesh = make_mesh(**options)
    assert dict(mesh.shape) == shape
    assert list(mesh.devices.flat) == jax.devices()[: 8 - idle]


def devices_of(*processes):
    """Stand-ins for devices: their processes, in the order in which JAX lists them."""
    return [SimpleNamespace(process_index=p, id=i) for i, p in enumerate(processes)]


@pytest.fixture
def four_processes(monkeypatch):
    """Processes 0 and 2 on host a, 1 and 3 on host b."""
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr("zeroxla.mesh.make_mesh.nodes_of_processes", lambda: ["a", "b", "a", "b"])


def processes_of(mesh):
    return [[d.process_index for d in node] for node in mesh.devices]


@pytest.fixture
def two_devices_each(four_processes, monkeypatch):
    monkeypatch.setattr(
        "zeroxla.mesh.make_mesh.Mesh", lambda grid, *_, **__: SimpleNamespace(devices=grid)
    )
    monkeypatch.setattr(jax, "devices", lambda: devices_of(0, 0, 1, 1, 2, 2, 3, 3))


@pytest.mark.usefixtures("two_devices_each")
def test_hosts_are_nodes_whatever_the_order_of_processes():
    assert processes_of(make_mesh()) == [[0, 0, 2, 2], [1, 1, 3, 3]]
    # Of each host the first devices, not all of one host's.
    assert processes_of(make_mesh(devices_per_node=2)) == [[0, 0], [1, 1]]
    assert processes_of(make_mesh(nodes=4)) == [[0, 0], [2, 2], [1, 1], [3, 3]]
    # A node of several hosts.
    assert processes_of(make_mesh(nodes=1)) == [[0, 0, 2, 2, 1, 1, 3, 3]]


@pytest.mark.usefixtures("two_devices_each")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # A host is a stage, or two.
        ({"pipe": 2}, [[[0, 0, 2, 2]], [[1, 1, 3, 3]]]),
        ({"pipe": 2, "devices_per_node": 1}, [[[0]], [[1]]]),
        ({"pipe": 4}, [[[0, 0]], [[2, 2]], [[1, 1]], [[3, 3]]]),
        # Hosts are nodes, with a part of each stage.
        ({"pipe": 2, "nodes": 2}, [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]),
        ({"pipe": 4, "nodes": 2}, [[[0], [1]], [[0], [1]], [[2], [3]], [[2], [3]]]),
        # In the order that is given.
        (
            {"pipe": 2, "nodes": 2, "devices": devices_of(3, 2, 1, 0)},
            [[[3], [2]], [[1], [0]]],
        ),
    ],
)
def test_stages_are_of_whole_hosts_unless_these_are_nodes(options, expected):
    mesh = make_mesh(**options)
    assert [processes_of(SimpleNamespace(devices=stage)) for stage in mesh.devices] == expected


def placed(**options):
    """Return the names of the axes of a mesh of 16 devices, and the grid of their numbers."""
    devices = [SimpleNamespace(process_index=0, id=i) for i in range(16)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeroxla.mesh.make_mesh.Mesh", lambda grid, names, **_: (grid, names))
        grid, names = make_mesh(devices=devices, **options)
    return names, np.vectorize(lambda d: d.id)(grid)


def test_axes_that_split_work_lie_inside_a_node():
    """Devices that are next to each other share `tensor`, then `context`, then `expert`."""
    devices = [SimpleNamespace(process_index=0, id=i) for i in range(16)]
    names, ids = placed(nodes=2, tensor=2, context=2)
    assert names == ("node", "device", "context", "tensor")
    np.testing.assert_array_equal(ids, np.arange(16).reshape(2, 2, 2, 2))
    message = r"4 devices of a node do not divide by context=3 x tensor=2, whose axes lie inside"
    with pytest.raises(ValueError, match=message):
        make_mesh(nodes=2, devices_per_node=4, tensor=2, context=3, devices=devices)
    with pytest.raises(ValueError, match="expert"):
        make_mesh(nodes=1, expert=0, devices=devices)


def test_axes_fill_nodes_if_they_are_longer_than_one():
    """The outermost of them lies over the nodes, the others inside."""
    names, ids = placed(nodes=4, tensor=2, context=4)
    assert names == ("node", "device", "context", "tensor")
    np.testing.assert_array_equal(ids, np.arange(16).reshape(2, 1, 4, 2))
    lengths = dict(zip(names, ids.shape, strict=True))
    assert [nodes_along(lengths, 4, axis) for axis in names] == [2, 1, 2, 1]
    devices = [SimpleNamespace(process_index=0, id=i) for i in range(16)]
    message = "context=16 are the devices of 4 nodes, and nodes=2 do not divide by 4"
    with pytest.raises(ValueError, match=message):
        make_mesh(nodes=2, devices_per_node=4, context=16, devices=devices)


def test_more_hosts_than_stages(two_devices_each, monkeypatch):
    """Of four hosts two are a stage; of three stages nothing is said."""
    monkeypatch.setattr("zeroxla.mesh.make_mesh.nodes_of_processes", lambda: list("abcd"))
    found = [processes_of(SimpleNamespace(devices=x)) for x in make_mesh(pipe=2).devices]
    assert found == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]
    message = "4 hosts do not divide into 3 stages, nor pipe=3 over the hosts; pass nodes=4"
    with pytest.raises(ValueError, match=message):
        make_mesh(pipe=3)


@pytest.mark.usefixtures("four_processes")
def test_hosts_of_different_sizes_are_named(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: devices_of(0, 0, 1, 2, 2, 3))
    message = r"different numbers of devices \(\{'a': 4, 'b': 2\}\); start as many on each"
    with pytest.raises(ValueError, match=message):
        make_mesh()
    with pytest.raises(ValueError, match=message):
        make_mesh(nodes=2, devices_per_node=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, r"nodes=0 must be a whole number of 1 or more"),
        ({"nodes": "2"}, r"nodes='2' must be a whole number"),
        ({"nodes": 2.5}, r"nodes=2.5 must be a whole number"),
        ({"devices_per_node": -1}, r"devices_per_node=-1 must be"),
        ({"pipe": 0}, r"pipe=0 must be"),
        (
            {"nodes": 3},
            r"8 devices do not divide into nodes=3: 2 would be idle; use nodes=1 or 2 or 4 or 8, "
            r"or pass devices_per_node=2 to leave them out",
        ),
        (
            {"pipe": 2, "nodes": 3},
            r"do not divide into pipe=2 x nodes=3: 2 would be idle; use nodes=1 or 2 or 4",
        ),
        ({"pipe": 3}, r"into pipe=3 x nodes=1: 2 would be idle; use pipe=1 or 2 or 4 or 8, or"),
        (
            {"nodes": 4, "devices_per_node": 4},
            r"pipe=1 x nodes=4 x devices_per_node=4 needs 16 devices and there are 8; ask for "
            r"fewer, or .*zeroxla.simulate\(16\)",
        ),
        ({"nodes": 9}, r"needs 9 devices and there are 8"),
    ],
)
def test_impossible_meshes(options, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**options)


def mesh_of(shape, names, axis_type=AxisType.Auto):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, names, axis_types=(axis_type,) * len(names))


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((8,), ("data",), r"axes \('data',\) and needs \('node', 'device'\); unknown: "),
        ((2, 4), ("data", "model"), r"\('data', 'model'\).*unknown: \['data', 'model'\]"),
        ((2, 2, 2), ("node", "device", "model"), r"unknown: \['model'\]"),
    ],
)
def test_a_mesh_without_the_axes_is_an_error(shape, names, message):
    with pytest.raises(ValueError, match=message):
        as_auto(mesh_of(shape, names))


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ((8,), ("device",), {"node": 1, "device": 8}),
        ((8,), ("node",), {"node": 8, "device": 1}),
        ((1, 8), ("pipe", "device"), {"pipe": 1, "node": 1, "device": 8}),
    ],
)
def test_an_axis_that_is_not_there_has_the_length_1(shape, names, expected):
    mesh = as_auto(mesh_of(shape, names))
    assert dict(mesh.shape) == expected
    assert list(mesh.devices.flat) == jax.devices()[:8]


def test_a_mesh_of_stages_is_one_of_pipelines():
    mesh = make_mesh(pipe=2)
    with pytest.raises(ValueError, match="has pipe=2 and the model is not a pipeline"):
        as_auto(mesh)
    assert as_auto(mesh, pipeline=True).shape == mesh.shape


def test_explicit_axes_become_auto():
    mesh = as_auto(mesh_of((2, 4), ("node", "device"), AxisType.Explicit))
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert dict(mesh.shape) == {"node": 2, "device": 4}


def test_simulate_after_jax_started():
    simulate(8)  # What the tests run with already: nothing to do.
    with pytest.raises(RuntimeError, match=r"simulate\(4\) came after JAX had started with 8 cpu"):
        simulate(4)
    with pytest.raises(RuntimeError, match=r"simulate\(8, threads=9\) came after .* NPROC="):
        simulate(8, threads=9)
    with pytest.raises(ValueError, match="cannot simulate 0 devices; give 1 or more"):
        simulate(0)
    with pytest.raises(ValueError, match="7 threads are too few for 8 devices: "):
        simulate(8, threads=7)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("options", "threads"), [("", max(24, os.cpu_count() or 1)), (", threads=3", 3)]
)
def test_simulate_before_jax_starts(options: str, threads: int):
    program = (
        f"import os, zeroxla; zeroxla.simulate(3{options});"
        "import jax, jax.numpy as jnp;"
        "mesh = zeroxla.make_mesh(nodes=3);"
        "assert dict(mesh.shape) == {'node': 3, 'device': 1}, mesh;"
        f"assert int(os.environ['NPROC']) == {threads};"
        f"zeroxla.simulate(3{options});"
        "print(len(jax.devices()), jax.default_backend())"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "cpu"]
