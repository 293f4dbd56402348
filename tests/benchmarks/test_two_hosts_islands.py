"""Rows with islands: the order of turns, what is left out, the targets, and a run of two hosts."""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from multihost.processes import environment

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import network
import tiny_islands_worker
import two_hosts_islands
import two_hosts_islands_report as found
import two_hosts_islands_rows as rows
from fleet import Steps, WorkerError, fleet
from peers import task
from peers.fleets import fleets
from two_hosts_islands_report import Line, Taken

WHY_NOT = network.missing()
PEERS = Path(__file__).resolve().parents[2] / ".venv-peers" / "bin" / "python"
EVERY = two_hosts_islands.LEAST_EVERY
TOKENS = jnp.zeros((1, task.LENGTH), jnp.int32)
SHAPES = jax.eval_shape(tiny_islands_worker.MODEL.init, jax.random.key(0), TOKENS)
SMALL = sum(x.size for x in jax.tree.leaves(SHAPES))
"""Elements of the small model."""


def on_two_hosts(test):
    reason = f"two hosts cannot be made here: {WHY_NOT}"
    return pytest.mark.slow(pytest.mark.skipif(WHY_NOT is not None, reason=reason)(test))


@pytest.fixture(scope="module")
def running():
    """Islands on two hosts after their first turn, which compiles: the hosts, and how to ask."""
    coordinator = [sys.executable, str(two_hosts_islands.COORDINATOR)]
    worker = [sys.executable, tiny_islands_worker.__file__, "--every", str(EVERY)]
    with (
        network.two_hosts() as hosts,
        fleet(hosts[:1], coordinator, env=environment()),
        fleet(hosts, worker, env=environment()) as running,
    ):
        for label in ("diloco", "streaming", rows.INSIDE):
            running.ask(label, rows.ROWS[label].warm_steps(EVERY))
        yield hosts, running.ask


def line_of(label, *, sent_bytes=0.0, step_s=1.0, exchanges=0, **options):
    steps = {"steps": 2, "losses": [5.6, 5.5], "num_different": options.pop("num_different", 0)}
    taken = Taken(step_s=step_s, sent_bytes=sent_bytes, **steps)
    line = Line(label=label, description="", baseline=rows.ALONE, exchanges=exchanges, **options)
    line.by_rate |= {"100mbit": taken, "10mbit": taken}
    return line


def lines_of(*, streaming_s=1.0, streaming_bytes=0.05e6, **options):
    """Lines with a baseline of one second."""
    every = {"first_loss": 5.7, "ideal_bytes": 1e5}
    made = (
        line_of(rows.ALONE, first_loss=5.7),
        line_of(rows.INSIDE, first_loss=5.7),
        line_of("diloco", sent_bytes=0.44e6, step_s=1.5, exchanges=1, **every),
        line_of(
            "streaming",
            sent_bytes=streaming_bytes,
            step_s=streaming_s,
            exchanges=10,
            **every,
            **options,
        ),
    )
    return {line.label: line for line in made}


def missed(lines, every=task.EVERY, ddp_bytes=64.9e6):
    checks = found.targets(lines, every=every, ddp_bytes=ddp_bytes)
    return [check.name for check in checks if not check.passed]


def test_what_meets_the_targets():
    assert missed(lines_of()) == []
    assert missed(lines_of(streaming_s=1.04)) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"streaming_s": 1.06}, "mean step"),
        ({"streaming_bytes": 0.08e6}, "over an all-reduce"),
        ({"streaming_bytes": 0.12e6}, "over PyTorch DDP's"),
        ({"num_different": 1}, "outer parameters differ"),
    ],
)
def test_what_misses_a_target(options, words):
    names = missed(lines_of(**options))
    assert names
    assert all(name.startswith("streaming") for name in names)
    assert any(words in name for name in names)


def test_a_loss_that_rises_misses_a_target():
    lines = lines_of()
    lines["diloco"].first_loss = 5.4
    assert missed(lines) == [
        "diloco: loss of the last steps, divided by the loss of the first step"
    ]


def test_bytes_of_fewer_steps_between_exchanges_have_a_wider_limit():
    assert missed(lines_of(streaming_bytes=0.5e6), every=10) == []


def test_without_peers_bytes_are_judged_by_arithmetic():
    names = [c.name for c in found.targets(lines_of(), every=task.EVERY, ddp_bytes=None)]
    assert not any("PyTorch" in name for name in names)
    assert found.all_reduce_bytes() == 4 * task.num_parameters()


def test_bytes_of_an_exchange():
    """Each host sends half of the differences and half of the means."""
    every, elements = 100, task.num_parameters()
    assert rows.ROWS["diloco"].ideal_bytes(every) * every == 4 * elements
    assert rows.ROWS["streaming"].ideal_bytes(every) * every == elements / 2
    assert rows.ROWS[rows.INSIDE].ideal_bytes(every) == 0


def test_turns_begin_with_no_exchange_under_way():
    assert rows.ROWS["diloco"].warm_steps(100) == 100
    assert rows.ROWS["streaming"].warm_steps(100) == 105
    assert rows.ROWS["streaming"].exchanges_in(100) == 10
    assert rows.ROWS["diloco"].exchanges_in(100) == 1
    assert rows.ROWS[rows.INSIDE].exchanges_in(100) == 0


def test_rows_go_back_and_forth_and_those_that_wait_go_once():
    turns = list(two_hosts_islands.order_of_turns(lines_of(), 2))
    forth = [rows.ALONE, rows.INSIDE, "diloco", "streaming"]
    assert turns == [*forth, "streaming", rows.INSIDE, rows.ALONE]


def test_a_row_whose_step_would_be_too_long_is_left_out_with_the_reason():
    step = Steps(seconds=[0.5], losses=[5.6], sent_bytes=65e6)
    assert found.too_long(step, "10mbit") is None  # 52 s
    assert found.too_long(step, "1mbit") == "a step would take 520 s"


def test_tables_have_what_was_left_out():
    lines = lines_of()
    left_out = line_of("zero3", sent_bytes=65e6, step_s=52.0, skipped={"1mbit": "too long"})
    del left_out.by_rate["10mbit"]
    lines["zero3"] = left_out
    text = found.tables(lines, 64.9e6)
    assert "| zero3 | 65.000 | 1.00154 | 52.000 | 52.000 |  |  |" in text
    assert "- zero3 at 1 Mbit/s: too long" in text
    assert found.body(lines, every=100, rounds=2, ddp_bytes=None).count("| streaming |") == 2


def test_the_picture_has_rows_with_gaps(tmp_path):
    lines = lines_of()
    del lines["diloco"].by_rate["10mbit"]
    found.draw(lines, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


class Hosts:
    """Two hosts that have sent 1000 bytes more whenever they are asked."""

    def __init__(self):
        self.sent = 0

    def sent_bytes(self):
        self.sent += 1000
        return self.sent


def answers_of(islands, checksums=("a", "a")):
    exchanges = [{"seconds": 0.5, "bytes": 10, "islands": n} for n in islands]
    return [
        {"seconds": [1.0, s], "losses": [5.6, 5.5], "exchanges": exchanges, "checksum": c}
        for s, c in zip((1.0, 2.0), checksums, strict=True)
    ]


def test_a_turn_is_as_long_as_the_slowest_host():
    line = line_of("diloco", exchanges=1)
    turn = two_hosts_islands.take([Hosts(), Hosts()], line, lambda steps: answers_of([2]), 2)
    assert (turn.step_s, turn.sent_bytes, turn.exchange_s) == (1.5, 500, [0.5])
    assert turn.num_different == 0


def test_hosts_with_other_outer_parameters_are_counted():
    line = line_of("diloco", exchanges=1)
    answers = answers_of([2], checksums=("a", "b"))
    turn = two_hosts_islands.take([Hosts(), Hosts()], line, lambda steps: answers, 2)
    assert turn.num_different == 1


@pytest.mark.parametrize("islands", [[], [1], [2, 2]])
def test_a_turn_without_its_exchanges_does_not_count(islands):
    line = line_of("diloco", exchanges=1)
    with pytest.raises(WorkerError, match="expected 1 of 2 islands"):
        two_hosts_islands.take([Hosts(), Hosts()], line, lambda steps: answers_of(islands), 2)


@on_two_hosts
@pytest.mark.parametrize("rate", [None, "20mbit"])
def test_islands_on_two_hosts(running, rate):
    """A small model: rows exchange what they should, and end with the same outer parameters."""
    hosts, ask = running
    two_hosts_islands.set_rate(hosts, rate)
    sent = {}
    for label in ("diloco", "streaming", rows.INSIDE):
        line = line_of(label, exchanges=rows.ROWS[label].exchanges_in(EVERY))
        turn = two_hosts_islands.take(hosts, line, partial(ask, label), EVERY)
        assert turn.num_different == 0
        assert len(turn.losses) == EVERY
        sent[label] = turn.sent_bytes * EVERY
    assert 4 * SMALL < sent["diloco"] < 1.15 * 4 * SMALL + 50e3
    assert 0.5 * SMALL < sent["streaming"] < 1.2 * 0.52 * SMALL + 100e3
    assert sent[rows.INSIDE] < 20e3


@on_two_hosts
@pytest.mark.skipif(not PEERS.exists(), reason="no .venv-peers; make peers-islands makes it")
def test_diloco_of_pytorch_on_two_hosts():
    """It sends nothing but exchanges, and learns."""
    every = 3
    with network.two_hosts() as hosts, fleets(hosts, str(PEERS), ["diloco"], every=every) as peers:
        turn = two_hosts_islands.take(
            hosts, line_of("PyTorch DiLoCo"), partial(peers.ask, "diloco"), every
        )
        assert turn.sent_bytes * every == pytest.approx(4 * task.num_parameters(), rel=0.05)
        later = peers.take("diloco", 4 * every)
    assert later.losses[-1] < turn.losses[0]
