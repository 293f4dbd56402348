"""Islands over TCP: the same numbers as in one process, and nothing of strangers is taken."""

import concurrent.futures
import contextlib
import socket
import threading
import time

import jax
import numpy as np
import optax
import pytest
from tools.islands import KEY, MODEL, batches, copies, made, params, part, trained
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla.config.outer import Outer
from zeroxla.quantize import WireFormat
from zeroxla.step.islands.agreement import check_agreement
from zeroxla.step.islands.frames import FrameError, FrameReader, FrameWriter, greet
from zeroxla.step.islands.island import ExchangeError, Island
from zeroxla.step.islands.link import LocalLink
from zeroxla.step.islands.tcp_link import TcpLink

pytestmark = pytest.mark.usefixtures("quick_compilation")
TOKEN = "between islands"


def addresses(num):
    """Return so many free addresses of this machine."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num)]
        return [f"127.0.0.1:{x.getsockname()[1]}" for x in sockets]


def joined(num, tokens=None, places=None, **options):
    """Join islands, each in a thread; return links or errors."""
    places = places or addresses(num)
    options = {"timeout": 20.0, **options}

    def join(index):
        try:
            return TcpLink.join(index, places, (tokens or [TOKEN] * num)[index], **options)
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(num) as pool:
        return list(pool.map(join, range(num)))


def in_threads(function, links):
    with concurrent.futures.ThreadPoolExecutor(len(links)) as pool:
        return list(pool.map(function, links))


@pytest.mark.parametrize("num", [2, 3])
def test_each_island_gets_its_part(num):
    links = joined(num)
    size = 1 << 20  # more than a socket holds: both ends send before they read

    def run(link):
        parts = [bytes([10 * link.index + to]) * size for to in range(num)]
        return [link.swap(name, parts) for name in ("a", "b")]

    for i, (one, two) in enumerate(in_threads(run, links)):
        assert [x[0] for x in one] == [10 * source + i for source in range(num)]
        assert one == two
        assert {len(x) for x in one} == {size}
    for link in links:
        link.close()


def test_training_over_tcp_is_bit_equal():
    rows = batches(8)
    outer = Outer(every=2, fragments=2, delay=1, wire=WireFormat(bits=4, block=64))

    expected, _ = trained(made(outer, 2), rows)
    links = joined(2)
    found, _ = trained(made(outer, 2, links=links), rows)
    for mine, want in zip(found, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, params(mine), params(want))
        for a, b in zip(copies(mine), copies(want), strict=True):
            np.testing.assert_array_equal(a, b)
    for link in links:
        link.close()


def test_a_failed_exchange_loses_no_state():
    rows = batches(4)
    links = joined(2, timeout=5.0)
    islands = made(Outer(every=2), 2, links=links)

    def run(island):
        mine = [part(batch, island.link.index, 2) for batch in rows]
        state = island.init(KEY, mine[0])
        for batch in mine[:3]:
            state, _ = island(state, batch)
        if island.link.index == 1:
            island.link.close()
            return None
        with pytest.raises(ExchangeError, match=r"fragment 0 before step 5 failed: island 1 ") as e:
            island(state, mine[3])
        return e.value.state

    state, _ = in_threads(run, islands)
    assert int(state.inner.step) == state.num_steps == 4
    after, _ = islands[0].step(state.inner, part(rows[0], 0, 2))
    assert int(after.step) == 5
    links[0].close()


def test_another_token_joins_nothing():
    errors = joined(2, tokens=[TOKEN, "another"], timeout=1.5)
    assert all(isinstance(x, TimeoutError) and "or have another token" in str(x) for x in errors)


BAD = {
    "number": ((2, ["127.0.0.1:1", "127.0.0.1:2"], TOKEN), "island 2 of 2; they are 0 to 1"),
    "token": ((0, ["127.0.0.1:1", "127.0.0.1:2"], ""), "the islands' token is empty"),
    "address": ((0, ["here", "127.0.0.1:2"], TOKEN), "'here' is not an address"),
    "elsewhere": ((0, ["192.0.2.1:9", "127.0.0.1:2"], TOKEN), "cannot listen at 192.0.2.1:9"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_joined(name):
    arguments, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        TcpLink.join(*arguments, timeout=1.0)


def test_strangers_hold_up_nobody():
    places = addresses(2)
    host, port = places[0].split(":")

    def bother():
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200)):
            for _ in range(20):
                with contextlib.suppress(OSError):
                    connection = socket.create_connection((host, int(port)), timeout=0.1)
                    connection.sendall(said)
                    connection.close()
                    break
                time.sleep(0.02)

    silent = []

    def stay():
        while not silent:
            with contextlib.suppress(OSError):
                silent.append(socket.create_connection((host, int(port)), timeout=0.1))
                silent.append(socket.create_connection((host, int(port)), timeout=0.1))

    strangers = [threading.Thread(target=x, daemon=True) for x in (bother, stay)]
    for stranger in strangers:
        stranger.start()
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(TcpLink.join, 0, places, TOKEN, timeout=20.0)
        strangers[1].join()  # They have come, and say nothing.
        second = pool.submit(TcpLink.join, 1, places, TOKEN, timeout=20.0)
        links = [first.result(), second.result()]
    assert time.monotonic() - begin < 5
    strangers[0].join()
    for connection in silent:
        connection.close()
    assert in_threads(lambda link: link.swap("x", [b"1", b"2"]), links)[1] == [b"2", b"2"]
    for link in links:
        link.close()


def test_an_island_that_leaves_or_is_late_is_named():
    links = joined(3, timeout=3.0)
    links[2].close()
    for link in links[:2]:
        with pytest.raises(ConnectionError, match="island 2 "):
            in_threads(lambda link: link.swap("x", [b"1"] * 3), links[:2])
    for link in links[:2]:
        link.close()
    links = joined(2, timeout=3.0)
    links[0].timeout = 0.2
    with pytest.raises(TimeoutError, match="island 1 has not sent 'x' within 0 s"):
        links[0].swap("x", [b"1", b"2"])
    links[1].timeout = 3.0
    links[1].swap("x", [b"1", b"2"])
    with pytest.raises(ValueError, match=r"island \d sent \d bytes as 'y', and \d are due"):
        in_threads(lambda link: link.swap("y", [b"3" * (3 - 2 * link.index)] * 2), links)
    for link in links:
        link.close()


# frames


@pytest.fixture
def pair():
    """Two ends of a connection that have greeted each other."""
    ends = socket.socketpair()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        greetings = [pool.submit(greet, end, TOKEN, i, calls=bool(i)) for i, end in enumerate(ends)]
        (one, key), (two, same) = (x.result() for x in greetings)
    assert (one, two) == (1, 0)
    assert key == same
    yield (*ends, key)
    for end in ends:
        end.close()


def sent(pair, *frames):
    """Return what is sent for frames."""
    FrameWriter(pair[0], pair[2], 0).write(*frames[0])
    if len(frames) > 1:
        raise NotImplementedError
    pair[0].shutdown(socket.SHUT_WR)
    found = bytearray()
    while part := pair[1].recv(1 << 16):
        found += part
    return found


def read(data, key, max_bytes=1 << 20):
    ends = socket.socketpair()
    with ends[0], ends[1]:
        ends[0].sendall(data)
        ends[0].shutdown(socket.SHUT_WR)
        reader = FrameReader(ends[1], key, 0, max_bytes)
        return [reader.read()]


def test_a_frame_comes_as_it_was_sent(pair):
    assert read(sent(pair, ("3/0/parts", b"\x00\xffbytes")), pair[2]) == [
        ("3/0/parts", b"\x00\xffbytes")
    ]


def test_no_byte_of_a_frame_can_be_changed(pair):
    data = sent(pair, ("name", b"body"))
    for i in range(len(data)):
        changed = bytearray(data)
        changed[i] ^= 1
        with pytest.raises((FrameError, ConnectionError)):
            read(changed, pair[2])
    for i in range(len(data)):
        with pytest.raises(ConnectionError):
            read(data[:i], pair[2])


def test_a_frame_is_read_once_and_from_its_sender(pair):
    data = sent(pair, ("name", b"body"))
    ends = socket.socketpair()
    with ends[0], ends[1]:
        ends[0].sendall(data + data)
        reader = FrameReader(ends[1], pair[2], 0, 1 << 20)
        reader.read()
        with pytest.raises(FrameError, match="changed on the way"):
            reader.read()  # sent again by somebody who has listened
    ends = socket.socketpair()
    with ends[0], ends[1]:
        ends[0].sendall(data)
        with pytest.raises(FrameError):
            FrameReader(ends[1], pair[2], 1, 1 << 20).read()
    with pytest.raises(FrameError, match="is too long"):
        read(data, pair[2], max_bytes=3)


# agreement


def test_islands_that_differ_are_told_in_what():
    links = LocalLink.make(2)

    def run(link):
        facts = {"model": "a" * 1000, "mesh": "2 x 4", "options": f"every={link.index}"}
        with pytest.raises(ValueError, match="has other options than island"):
            check_agreement(link, facts)

    in_threads(run, links)


@pytest.mark.parametrize("what", ["model", "outer options", "outer optimizer", "parameters"])
def test_an_island_with_something_else_does_not_train(what):
    links = LocalLink.make(2)

    def run(link):
        other = link.index == 1
        outer = Outer(
            every=3 if other and what == "outer options" else 2,
            optimizer=optax.sgd(0.5 if other and what == "outer optimizer" else 1.0),
        )
        widths = (8,) if other and what == "model" else (16,)
        mesh = zeroxla.make_mesh(nodes=1, devices=jax.devices()[4 * link.index :][:4])
        config = zeroxla.ZeroConfig(outer=outer)
        model = type(MODEL)(widths=widths, classes=4)
        island = Island(zeroxla.make_step(model, mesh, optax.sgd(0.1), config=config), link)
        key = jax.random.key(int(other and what == "parameters"))
        with pytest.raises(ValueError, match=f"has other {what}"):
            island.init(key, part(batches(1)[0], link.index, 2))

    in_threads(run, links)
