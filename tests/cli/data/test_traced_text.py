"""Traced text: the same strings as plain text gives, and where their characters are from."""

from __future__ import annotations

import itertools
import random

import pytest

from zeroxla.cli.data.traced_text import Traced, concat, origins, traced

PIECES = ["", " ", "ab", "</think>", "\n", " c", "b,", "ab</think>\n"]
WORDS = [None, "ab", ",", "</think>", "\n", "b"]


def random_text(draw):
    """Text of several origins: each character knows its place."""
    parts = [draw.choice(PIECES) for _ in range(draw.randint(1, 6))]
    places = itertools.count()
    return concat(Traced(c, [(0, 1, next(places))]) for part in parts for c in part)


def characters_of(text):
    """The origins of the characters, in their order."""
    return [origin for a, b, origin in getattr(text, "spans", ()) for _ in range(a, b)]


def flat(found):
    return [found] if isinstance(found, str) else list(found)


METHODS = {
    "strip": lambda t, w: t.strip(w),
    "lstrip": lambda t, w: t.lstrip(w),
    "rstrip": lambda t, w: t.rstrip(w),
    "split": lambda t, w: t.split(w),
    "split once": lambda t, w: t.split(w, 1),
    "rsplit": lambda t, w: t.rsplit(w),
    "rsplit once": lambda t, w: t.rsplit(w, 1),
    "partition": lambda t, w: t.partition(w or " "),
    "rpartition": lambda t, w: t.rpartition(w or " "),
    "splitlines": lambda t, w: t.splitlines(),
    "splitlines with ends": lambda t, w: t.splitlines(True),
    "removeprefix": lambda t, w: t.removeprefix(w or ""),
    "removesuffix": lambda t, w: t.removesuffix(w or ""),
    "slice": lambda t, w: t[1:-1],
    "first": lambda t, w: t[:1],
    "last": lambda t, w: t[-2:],
    "character": lambda t, w: t[-1] if t else "",
    "as it is": lambda t, w: str(t),
}


@pytest.mark.parametrize("name", METHODS)
def test_parts_are_those_of_plain_text_and_keep_the_origins(name):
    draw, method = random.Random(name), METHODS[name]
    for _ in range(300):
        text, word = random_text(draw), draw.choice(WORDS)
        found, want = method(text, word), method("".join(text), word)
        assert type(found) is type(want) or isinstance(found, str)
        assert flat(found) == flat(want)
        for part in flat(found):
            of_part = characters_of(part)
            assert "".join(text[i] for i in of_part) == part
            assert of_part == list(range(of_part[0], of_part[-1] + 1)) if part else not of_part
        together = list(itertools.chain.from_iterable(map(characters_of, flat(found))))
        assert together == sorted(set(together))


def test_what_is_put_together_keeps_the_origins():
    a, b = traced("a ", "A"), traced("b", "B")
    assert [(x, x.spans) for x in ("<" + a + ">", a + b, Traced(", ").join(["x", a, "y", b]))] == [
        ("<a >", [(1, 3, "A")]),
        ("a b", [(0, 2, "A"), (2, 3, "B")]),
        ("x, a , y, b", [(3, 5, "A"), (10, 11, "B")]),
    ]
    assert (a + b).replace(" ", "--").spans == [(0, 1, "A"), (3, 4, "B")]
    assert (a + b).replace("", "-") == "-a- -b-"
    with pytest.raises(TypeError, match=r"concatenate|unsupported"):
        a + 1
    with pytest.raises(IndexError):
        a[9]


def test_a_field_of_which_nothing_is_left_is_still_a_place():
    text = "<" + traced(" \n", "field").strip() + ">"
    assert (text, text.spans) == ("<>", [(1, 1, "field")])
    assert ("<" + traced("", "field") + ">").spans == [(1, 1, "field")]
    thought = traced("why</think>", "field").split("</think>")
    assert [x.spans for x in thought] == [[(0, 3, "field")], [(0, 0, "field")]]


def test_values_of_json_are_traced_at_any_depth():
    value = traced({"a": ["b", 1, {"c": None}]}, "field")
    assert value == {"a": ["b", 1, {"c": None}]}
    assert list(origins(value)) == ["field"] * 3
    assert list(origins(["a", 1])) == []
