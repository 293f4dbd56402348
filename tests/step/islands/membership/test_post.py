"""Bytes between processes: to whom they are sent, and nothing of strangers."""

import concurrent.futures
import contextlib
import socket
import threading
import time

import pytest

from zeroxla.step.islands.membership.post import ASK, Address, Post

TOKEN = "between islands"


@pytest.fixture
def make():
    """Make posts that are closed at the end."""
    with contextlib.ExitStack() as stack:

        def one(member, token=TOKEN, **options):
            options = {"max_bytes": 1 << 24, **options}
            post = Post(member, token, "127.0.0.1", **options)
            stack.callback(post.close)
            return post

        yield one


def address(post, member=None):
    return Address(host="127.0.0.1", port=post.port, member=member or post.member)


def never():
    return False


def test_processes_send_to_each_other_at_the_same_time(make):
    posts = [make(i) for i in (1, 2, 3)]
    size = 1 << 22  # more than a connection holds: all send before they take

    def run(i):
        others = [post for post in posts if post is not posts[i]]
        for name in ("a", "b"):
            for other in others:
                body = bytes([10 * posts[i].member + other.member]) * size
                posts[i].send(address(other), name, body, timeout=10)
        return [
            posts[i].take(other.member, name, timeout=10, is_over=never)
            for name in ("a", "b")
            for other in others
        ]

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for i, found in enumerate(pool.map(run, range(3))):
            mine = posts[i].member
            senders = [post.member for post in posts if post.member != mine]
            assert [x[0] for x in found] == [10 * sender + mine for sender in senders] * 2
            assert {len(x) for x in found} == {size}
    assert posts[0].num_sent == 4 * size


def test_a_connection_that_is_lost_is_made_again(make):
    one, two = make(1), make(2)
    one.send(address(two), "first", b"1", timeout=5)
    assert two.take(1, "first", timeout=5, is_over=never) == b"1"
    one._links[2][0].shutdown(socket.SHUT_RDWR)
    one.send(address(two), "second", b"2", timeout=5)
    assert two.take(1, "second", timeout=5, is_over=never) == b"2"


def test_who_is_not_there_is_named(make):
    one, two = make(1), make(2)
    with pytest.raises(ConnectionError, match="another process listens there by now"):
        one.send(address(two, member=9), "x", b"", timeout=5)
    two.close()
    with pytest.raises(ConnectionError, match=rf"127.0.0.1:{two.port}: "):
        one.send(address(two), "x", b"", timeout=5)
    with pytest.raises(TimeoutError, match="'y' has not come for 0 s"):
        one.take(2, "y", timeout=0.2, is_over=never)
    assert one.take(2, "y", timeout=5, is_over=lambda: True) is None


def test_another_token_is_let_in_nowhere(make):
    one, stranger = make(1), make(2, "another")
    with pytest.raises(ConnectionError):
        stranger.send(address(one), "x", b"evil", timeout=5)
    with pytest.raises(TimeoutError):
        one.take(2, "x", timeout=0.2, is_over=never)


def test_a_frame_that_is_too_long_ends_the_connection(make):
    one, two = make(1, max_bytes=100), make(2)
    with contextlib.suppress(ConnectionError):
        two.send(address(one), "x", bytes(101), timeout=5)
    with pytest.raises(TimeoutError):
        one.take(2, "x", timeout=0.3, is_over=never)
    two.send(address(one), "y", bytes(100), timeout=5)
    assert one.take(2, "y", timeout=5, is_over=never) == bytes(100)


def test_stale_names_are_dropped_now_and_later(make):
    one, two = make(1), make(2)
    for name in ("1/a", "2/a"):
        two.send(address(one), name, b"x", timeout=5)
    assert one.take(2, "2/a", timeout=5, is_over=never) == b"x"
    one.forget(lambda name: name.startswith("1/"))
    two.send(address(one), "1/b", b"x", timeout=5)
    two.send(address(one), "2/b", b"x", timeout=5)
    assert one.take(2, "2/b", timeout=5, is_over=never) == b"x"
    assert one._arrived == {}


def test_questions_say_where_the_answer_goes(make):
    one, two, odd = make(1), make(2), make(3)
    two.send(address(one), ASK + "fragment/1", str(two.port).encode(), timeout=5)
    question = one.questions.get(timeout=5)
    assert (question.name, question.asker) == ("fragment/1", address(two))
    odd.send(address(one), ASK + "x", b"not a port", timeout=5)
    two.send(address(one), ASK + "fragment/2", b"7000 10.0.0.9", timeout=5)
    question = one.questions.get(timeout=5)
    assert question.asker == Address(host="10.0.0.9", port=7000, member=2)


def test_strangers_hold_up_nobody(make):
    one, two = make(1), make(2)
    place = ("127.0.0.1", one.port)
    silent = [socket.create_connection(place) for _ in range(8)]
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200)):
        with contextlib.suppress(OSError), socket.create_connection(place) as connection:
            connection.sendall(said)
    begin = time.monotonic()
    two.send(address(one), "x", b"1", timeout=5)
    assert one.take(2, "x", timeout=5, is_over=never) == b"1"
    assert time.monotonic() - begin < 3
    for connection in silent:
        connection.close()


def test_an_address_that_is_taken_is_named(make):
    one = make(1)
    with pytest.raises(ValueError, match=r"cannot listen at 127.0.0.1:\d+ \(.*with a free port"):
        make(2, port=one.port)
    with pytest.raises(ValueError, match="token is empty, and everybody could join"):
        make(2, "")


def test_threads_end_with_the_post(make):
    before = threading.active_count()
    one, two = make(1), make(2)
    one.send(address(two), "x", b"", timeout=5)
    one.close()
    two.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= before
