"""What a device holds while a state that comes from its host is updated, and what a host moves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import Offload, ZeroConfig
from zeroxla.mesh.machines import Machines
from zeroxla.models import GPT
from zeroxla.offload.memory_kinds import to_host
from zeroxla.planning.gpu_topology import H200, WheelsMissingError, target_mesh
from zeroxla.planning.host_update import HostUpdate
from zeroxla.planning.make import plan_step
from zeroxla.planning.target import Target
from zeroxla.program.compat import compiler_options
from zeroxla.program.live.splits import splits_of
from zeroxla.program.trace import trace

pytestmark = pytest.mark.usefixtures("quick_compilation")

FLAT, STAGES = {"node": 2, "device": 4}, {"pipe": 2, "node": 1, "device": 2}
WIDE = {"width": 256, "layers": 96, "heads": 4}


def tokens(rows=8):
    return {"tokens": jax.ShapeDtypeStruct((rows, 17), jnp.int32)}


def step_on(mesh, offload, optimizer=None, **model):
    gpt = GPT.tiny(**model)
    staged = "pipe" in mesh.shape
    return zeroxla.make_step(
        zeroxla.Pipeline.from_model(gpt) if staged else gpt,
        mesh,
        optimizer or optax.adamw(1e-3),
        config=ZeroConfig(persistence_threshold=0, offload=offload),
        microbatches=4 if staged else None,
        weights="tick" if staged else "step",
    )


def planned(mesh_shape, offload, optimizer=None, **model):
    """Return a plan's memory, and the bytes of a device's shard of each leaf."""
    target = Target.find(mesh_shape, device="h200", link="100gbit", machines=None)
    step = step_on(target.abstract_mesh(), offload, optimizer, **model)
    memory = plan_step(step, tokens(), target).memory
    leaves = jax.tree.leaves(step.abstract_state(tokens()).params)
    return memory, [4 * np.prod(x.sharding.shard_shape(x.shape)) for x in leaves]


# sub-groups


@pytest.mark.parametrize(
    ("params", "mesh_shape"),
    thinned([("host", FLAT)], slow=[("none", STAGES), ("none", FLAT), ("host", STAGES)], rows=True),
    ids=["host-", "none-stages", "none-", "host-stages"],
)
def test_one_sub_group_has_all_that_is_offloaded_and_the_new_arrays_of_one_leaf(mesh_shape, params):
    offload = Offload(optimizer="host", params=params)
    memory, leaves = planned(mesh_shape, offload, width=64, layers=4)
    arrays = 2 if params == "none" else 3
    assert memory.offloaded_bytes == arrays * sum(leaves)
    assert memory.sub_group_bytes == memory.offloaded_bytes + arrays * max(leaves)


@pytest.mark.slow
@pytest.mark.parametrize("buffers", thinned([3], slow=[1, 2]))
def test_as_many_sub_groups_are_there_as_there_are_buffers(buffers):
    def of(buffers, layers=1):
        # Each sub-group is the two moments of one layer of 64 x 256, 8192 bytes a device each.
        offload = Offload(optimizer="host", sub_group=2 * 2048 * layers, buffers=buffers)
        return planned(FLAT, offload, width=64, layers=8)[0].sub_group_bytes

    found = of(buffers)
    assert found == 2 * 8192 * (buffers + 1)
    assert of(buffers, layers=2) == 2 * found


def test_an_update_that_stays_on_the_device_has_none():
    memory, _ = planned(FLAT, Offload(), width=64)
    assert (memory.sub_group_bytes, memory.peak_in_update) == (0, False)


def test_of_an_update_on_the_host_the_steps_of_parameters_come():
    offload = Offload(optimizer="host", update="host")
    memory, leaves = planned(FLAT, offload, width=64)
    assert memory.sub_group_bytes == sum(leaves)


# the peak


def test_the_larger_of_two_moments_is_the_peak():
    for layers, in_update in ((2, False), (96, True)):
        memory, leaves = planned(FLAT, Offload(optimizer="host"), **{**WIDE, "layers": layers})
        assert memory.peak_in_update == in_update
        parts = memory.parts()
        assert sum(parts.values()) == memory.total_bytes
        if in_update:
            assert memory.temporary_bytes == sum(leaves) + memory.sub_group_bytes
            assert parts["sub-groups of the update"] == memory.sub_group_bytes
            assert memory.activation_bytes == memory.gathered_bytes == 0
        assert ("sub-groups of the update" in str(memory)) == in_update
        assert ("while it updates, sub-groups" in str(memory)) != in_update


def test_frozen_leaves_have_no_gradients_in_the_update():
    target = Target.find(FLAT, device="h200", link="100gbit", machines=None)
    config = ZeroConfig(
        persistence_threshold=0, frozen=("wte", "wpe"), offload=Offload(optimizer="host")
    )
    step = zeroxla.make_step(
        GPT.tiny(**WIDE), target.abstract_mesh(), optax.adamw(1e-3), config=config
    )
    memory = plan_step(step, tokens(), target).memory
    assert memory.peak_in_update
    assert memory.gradient_bytes < memory.parameter_bytes


# the update on the host


def test_an_array_that_every_device_has_whole_moves_to_each(mesh24):
    def update(split, whole):
        return to_host(split), to_host(whole)

    def shape(spec):
        return jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=NamedSharding(mesh24, spec))

    shapes = [shape(PartitionSpec(("device", "node"))), shape(PartitionSpec())]
    program = trace(update, *shapes)[0]
    found = HostUpdate.of(program, splits_of(program, shapes))
    assert found.moved_bytes == 16 * 4 * 4 // 8 + 16 * 4 * 4


@pytest.mark.parametrize("mesh_shape", thinned([FLAT], slow=[STAGES]), ids=["", "stages"])
def test_every_device_moves_its_part(mesh_shape):
    target = Target.find(mesh_shape, device="h200", link="100gbit", machines=None)
    offload = Offload(optimizer="host", update="host")
    found = plan_step(step_on(target.abstract_mesh(), offload, width=64), tokens(), target)
    # A gradient goes, a step of the parameter comes; beside them a few scalars of each sub-group.
    moved = found.simulation.on_host.moved_bytes
    assert moved == pytest.approx(found.memory.offloaded_bytes, rel=0.01)


# the compilers

CASES = [
    (FLAT, {}),
    (FLAT, {"sub_group": 7_000_000}),  # whole leaves
    (FLAT, {"sub_group": 3_200_000}),  # layers
    (FLAT, {"sub_group": 3_200_000, "buffers": 1}),
    (STAGES, {}),
    (STAGES, {"sub_group": 14_000_000}),  # its peak is before the update
]

PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from zeroxla.planning.compile_check import prepare_cpu
prepare_cpu(8)
import test_streamed_update as test
for mesh_shape, options in test.CASES:
    print(test.on_cpu(mesh_shape, options))
"""


def on_cpu(mesh_shape, options):
    """Return what a plan says over what the CPU's compiler says. To it the host's memory is the
    device's, but it moves arrays as on a GPU."""
    sizes = mesh_shape["node"], mesh_shape["device"]
    count = np.prod(list(mesh_shape.values()))
    mesh = zeroxla.make_mesh(
        pipe=mesh_shape.get("pipe", 1),
        nodes=sizes[0],
        devices_per_node=sizes[1],
        devices=jax.devices()[:count],
    )
    step = step_on(mesh, Offload(optimizer="host", **options), **WIDE, remat=True)
    machines = Machines.load()
    links = dict.fromkeys(("pipe", "node", "device", "host"), machines.find_link("memory"))
    target = Target(device=machines.find_device("cpu"), links=links, mesh_shape=mesh_shape)
    memory = plan_step(step, tokens(), target).memory
    compiled = step.lower(step.abstract_state(tokens()), tokens()).compile()
    held = zeroxla.inspect.memory(compiled).total_bytes
    return (memory.total_bytes + memory.offloaded_bytes) / held


@pytest.mark.slow
def test_the_update_is_within_a_quarter_of_the_cpus_compiler():
    """7 % below it to 20 % above it, in a process that schedules for memory."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(folder=folders[0])],
        env=environment | {"PYTHONPATH": folders[1]},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    ratios = [float(line) for line in run.stdout.split()]
    assert len(ratios) == len(CASES)
    assert all(0.9 < ratio < 1.25 for ratio in ratios), ratios


def on_gpu(step, mesh_shape, description):
    """Return the bytes of a device's own memory, as XLA's compiler for GPUs plans them.

    JAX gives the devices of a description no memories, so the step is traced for an abstract mesh,
    and what that lowers to is compiled for the described devices.
    """
    from jax._src import compiler
    from jax._src.lib import _jax

    devices = target_mesh(description, mesh_shape).devices
    with step.programs.tracing():
        jitted = jax.jit(step.programs.train, donate_argnums=0)
        traced = jitted.trace(step.abstract_state(tokens()), tokens())
        lowered = traced.lower(lowering_platforms=("cuda",))
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=devices.size,
        device_assignment=np.arange(devices.size)[None],
        env_options_overrides=compiler_options("gpu", prefetch=True),
    )
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = True
    found = devices.flat[0].client.compile(
        lowered._lowering.stablehlo(), _jax.DeviceList(tuple(devices.flat)), options
    )
    held = found.get_compiled_memory_stats()
    sizes = held.argument_size_in_bytes, held.temp_size_in_bytes, held.output_size_in_bytes
    return sum(sizes) - held.alias_size_in_bytes


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh_shape", "options"), [*CASES, (FLAT, {"params": "host"}), (STAGES, {"params": "host"})]
)
def test_the_update_is_near_that_of_gpus_with_little_more_memory(tmp_path, mesh_shape, options):
    """Where there is room the compiler brings the first sub-groups before the gradients are there.

    With room for a twelfth more than the plan, the plan is 11 % below it (layers, one buffer) to
    27 % above it (one sub-group, of which arrays then come late).
    """
    target = Target.find(mesh_shape, device="h200", link="100gbit", machines=None)
    offload = Offload(**{"optimizer": "host", **options})
    step = step_on(target.abstract_mesh(), offload, **WIDE, remat=True)
    memory = plan_step(step, tokens(), target).memory
    text, size = H200.read_text(), int(memory.total_bytes * 13 / 12)
    description = tmp_path / "small.txtpb"
    whole = re.search(r"device_memory_size: \d+", text)
    assert whole is not None
    description.write_text(text.replace(whole[0], f"device_memory_size: {size}"))
    try:
        target_mesh(description, mesh_shape)
    except WheelsMissingError as error:
        pytest.skip(str(error))
    held = on_gpu(step, mesh_shape, description)
    print(f"plan over compiler: {memory.total_bytes / held:.3f}")
    assert 0.85 < memory.total_bytes / held < 1.3
