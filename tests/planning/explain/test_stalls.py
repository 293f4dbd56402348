"""Five stalls, planted one by one: each is named, with its place, and its remedy removes it."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from tools.devices import made_device
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.mesh.machines import Link
from zeroxla.models import GPT
from zeroxla.models.losses import next_token_loss

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTH, ROWS = 64, 64
DEVICE = made_device(8e11, memory_bytes=1e9, bytes_per_s=1e12, efficiency=0.5)
LINK = Link(name="wire", bytes_per_s=2e9, latency_s=1e-6, of="device", source="a test")
SLOW = dataclasses.replace(LINK, bytes_per_s=6e8)


def tokens(rows=ROWS, length=LENGTH):
    return {"tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)}


def gpt(*, scan):
    return GPT(vocab=64, length=LENGTH, layers=6, width=128, heads=4, scan=scan)


def explained(model, *, rows=ROWS, length=LENGTH, optimizer=None, options=None, **arguments):
    config = ZeroConfig(**{"persistence_threshold": 0, **(options or {})})
    mesh = zeroxla.make_mesh(nodes=2)
    step = zeroxla.make_step(model, mesh, optimizer or optax.sgd(0.1), config=config)
    how = {"device": DEVICE, "link": LINK, "compiled": False, **arguments}
    return zeroxla.explain(step, tokens(rows, length), **how)


def remedied(stall, options=None):
    """The options with the changes that a stall's remedy asks for."""
    return {**(options or {}), **stall.remedy.changes}


@pytest.mark.parametrize("scan", thinned([True], slow=[False]), ids=["scanned", "unrolled"])
def test_a_healthy_step_has_no_stall(scan):
    report = explained(gpt(scan=scan))
    assert report.stalls == ()
    assert report.waited_s < 0.05 * report.time.seconds
    assert {line.bound for line in report.lines} == {"compute", "memory"}
    assert "No setting is missing" in str(report)


# 1. A gather that cannot run ahead


@pytest.mark.parametrize(
    ("scan", "unit"),
    thinned([(True, "unit 1.0 of a loop")], slow=[(False, "unit 1-6")], rows=True),
    ids=["scan", "unrolled"],
)
def test_a_gather_that_cannot_run_ahead(scan, unit):
    options = {"prefetch_bucket": 0}
    report = explained(gpt(scan=scan), options=options)
    # The first products of a scanned backward need no leaves, and hide its gather.
    for direction in ("forward",) if scan else ("forward", "backward"):
        (stall,) = [x for x in report.stalls if x.what.startswith(f"{direction} gather over node")]
        assert unit in stall.what
        assert "mlp/c_" in stall.what or "attn/c_" in stall.what
        assert stall.line.startswith("models/gpt_layers.py:")
        assert stall.remedy.text.startswith("prefetch_bucket=None: ")
        assert stall.remedy.changes == {"prefetch_bucket": None}
    healthy = explained(gpt(scan=scan), options=remedied(report.stalls[0], options))
    assert healthy.stalls == ()
    assert healthy.time.seconds < report.time.seconds


@pytest.mark.slow
def test_a_bucket_below_a_unit_leaves_no_room():
    options = {"prefetch_bucket": 1000}
    report = explained(gpt(scan=False), options=options)
    stall = report.stalls[0]
    (bucket,) = stall.remedy.changes.values()
    assert bucket >= 12 * 128**2
    assert explained(gpt(scan=False), options=remedied(stall, options)).stalls == ()


# 2. A reduce in the way


def test_a_reduce_in_the_way_of_each_micro_batch():
    options = {"accumulate": 16}
    report = explained(gpt(scan=True), rows=16 * ROWS, options=options, link=SLOW)
    (stall,) = [x for x in report.stalls if x.what.startswith("reduce over node: ")]
    assert "h/attn/" in stall.what
    assert "unit 1.0 of a loop" in stall.what
    assert stall.line.startswith("models/gpt_layers.py:")
    assert stall.remedy.changes == {"inter_node_reduce": "step"}
    options = remedied(stall, options)
    healthy = explained(gpt(scan=True), rows=16 * ROWS, options=options, link=SLOW)
    assert not [x for x in healthy.stalls if x.what.startswith("reduce ")]
    assert healthy.time.seconds < report.time.seconds


def test_a_reduce_in_the_way_of_the_next_layers():
    report = explained(gpt(scan=True), link=SLOW)
    (stall,) = report.stalls
    assert stall.what.startswith("reduce over node: h/")
    assert list(stall.remedy.changes) == ["inter_node_gradient_wire"]
    healthy = explained(gpt(scan=True), options=remedied(stall), link=SLOW)
    assert healthy.stalls == ()


# 3. An unfused attention


class HandWritten(nn.Module):
    """A block whose attention holds all scores."""

    width: int = 64

    @nn.compact
    def __call__(self, tokens_BL):
        x = nn.Embed(64, self.width)(tokens_BL)
        q, k, v = (nn.Dense(self.width, name=name)(x) for name in "qkv")
        scores = jnp.einsum("bqd,bkd->bqk", q, k) / 8
        seen = jnp.tril(jnp.ones(scores.shape[1:], bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        x = x + jnp.einsum("bqk,bkd->bqd", weights, v)  # the line
        return nn.Dense(64, name="head")(x)

    def loss(self, batch, *, train):
        return next_token_loss(self(batch["tokens"][:, :-1]), batch)


def line_of(marker):
    with open(__file__) as file:
        number = next(i for i, text in enumerate(file, 1) if text.rstrip().endswith(marker))
    return f"explain/test_stalls.py:{number}"


@functools.cache
def with_attention(length, *, rewrite):
    return explained(HandWritten(), rows=8, length=length, options={"rewrite": rewrite})


def test_an_unfused_attention():
    report = with_attention(2048, rewrite=None)
    (stall,) = [x for x in report.stalls if x.kind == "attention"]
    assert stall.line == line_of("# the line")
    assert "float32[1,2048,2048]" in stall.what
    # At least: scores written and read, and their derivatives.
    assert stall.seconds > 4 * 4 * 2048**2 / DEVICE.bytes_per_s
    assert stall.remedy.changes == {"rewrite": True}
    healthy = with_attention(2048, rewrite=True)
    assert not [x for x in healthy.stalls if x.kind == "attention"]
    assert not any("2048,2048" in x.text for x in healthy.lines)


def test_attention_that_is_shorter_than_a_block_is_no_stall():
    assert not [x for x in with_attention(256, rewrite=None).stalls if x.kind == "attention"]


# 4. A large residual


class Wide(nn.Module):
    """Layers with wide activations."""

    @nn.compact
    def __call__(self, tokens_BL):
        x = nn.Embed(64, 64)(tokens_BL)
        for i in range(4):
            wide = nn.Dense(2048, name=f"wide_{i}")(x)  # the wide one
            wide = jnp.sin(wide)
            x = x + nn.Dense(64, name=f"narrow_{i}")(wide)
        return nn.Dense(64, name="head")(x)

    def loss(self, batch, *, train):
        return next_token_loss(self(batch["tokens"][:, :-1]), batch)


SMALL = dataclasses.replace(DEVICE, memory_bytes=4e7)


def test_a_large_residual():
    report = explained(Wide(), rows=128, device=SMALL)
    residuals = [x for x in report.stalls if x.kind == "residual"]
    assert residuals
    stall = residuals[0]
    assert stall.line == line_of("# the wide one")
    assert "4 x float32[16,64,2048]" in stall.what
    assert stall.seconds == pytest.approx(2 * 4 * 4 * 16 * 64 * 2048 / DEVICE.bytes_per_s)
    (budget,) = stall.remedy.changes.values()
    assert stall.remedy.text.startswith(f"memory={budget}: ")
    healthy = explained(Wide(), rows=128, device=SMALL, options=remedied(stall))
    assert not [x for x in healthy.stalls if x.kind == "residual"]
    assert healthy.total_bytes <= budget < report.total_bytes


# 5. An optimizer that gathers


@functools.cache
def with_muon(*, owners):
    model = GPT(vocab=64, length=32, layers=2, width=128, heads=4, scan=False)
    return explained(
        model,
        rows=8,
        length=32,
        optimizer=optax.contrib.muon(0.02),
        options={"owners": owners},
        compiled=True,
    )


@pytest.mark.slow
def test_an_optimizer_that_gathers():
    report = with_muon(owners=False)
    stalls = [x for x in report.stalls if x.what.startswith("update over ")]
    assert stalls
    assert all(x.remedy.changes == {"owners": True} for x in stalls)
    assert any("kernel" in x.what for x in stalls)
    healthy = with_muon(owners=True)
    assert not [x for x in healthy.stalls if x.what.startswith("update over ")]
    assert healthy.time.seconds < report.time.seconds
