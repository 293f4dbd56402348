"""Frames: whose bytes they are is proved, and nothing of a frame is used before."""

import concurrent.futures
import socket

import pytest

from zeroxla.step.islands.membership.frames import FrameError, FrameReader, FrameWriter, greet

TOKEN = "between islands"


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
