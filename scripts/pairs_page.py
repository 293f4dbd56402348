"""Writes docs/pairs.md, "what works with what", from the list of features that the tests run.

python scripts/pairs_page.py          # writes it
python scripts/pairs_page.py --check  # ends with status 1 if it is not up to date
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "pairs.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

HEAD = """# What works with what

A test runs every pair of features on a tiny model: two training steps on 2 nodes of 2 simulated
devices each, twice as many with stages. It compares losses and parameters with the same model on
one device under `jax.grad`, and asks whether each feature was on and changed the step's program.
`make test-full` runs all pairs, `make test-slow` groups of up to seven features, in which every
feature occurs, and `make test` one of these groups.

`scripts/pairs_page.py` writes this page from the test's list, `tests/compose/features.py`. A sign
is what the test asserts. A new option must enter that list.

| sign | meaning |
|---|---|
| = | equal to the reference, to float32 rounding |
| ~ | equal to the reference within the rounding of the formats that are on |
| x | refused, by a text that names the reason: see below |
| o | one of the two has no effect, which a warning says: see below |
| · | both set the same option |

"""


def page() -> str:
    """Return the page as it should be."""
    from compose.features import FEATURES, REFUSED, SAME_PROGRAM, WITHOUT_EFFECT

    def sign(one: object, other: object) -> str:
        names = frozenset({one.name, other.name})
        if not one.meets(other):
            return "·"
        if names in REFUSED:
            return "x"
        if names in WITHOUT_EFFECT:
            return "o"
        return "~" if one.error or other.error else "="

    count = len(FEATURES)
    lines = [
        "| | " + " | ".join(str(i + 1) for i in range(count - 1)) + " |",
        "|---|" + "---|" * (count - 1),
    ]
    for i, one in enumerate(FEATURES):
        cells = [sign(one, FEATURES[j]) for j in range(i)]
        cells += [""] * (count - 1 - i)
        lines.append(f"| {i + 1} {one.name} | " + " | ".join(cells[: count - 1]) + " |")
    parts = ["\n".join(lines)]
    for title, entries, said in (
        ("Refused", REFUSED, "words of the text"),
        ("Without effect", WITHOUT_EFFECT, "words of the text"),
        ("Both hold, and the first leaves the program as it is", SAME_PROGRAM, "reason"),
    ):
        by_text: dict[str, list[str]] = {}
        for pair, text in entries.items():
            by_text.setdefault(text, []).append(
                " with ".join(pair if isinstance(pair, tuple) else sorted(pair))
            )
        rows = [f"| {'; '.join(sorted(pairs))} | {text} |" for text, pairs in by_text.items()]
        header = f"| pairs | {said} |\n|---|---|\n"
        parts.append(f"## {title}\n\n{header}" + "\n".join(rows))
    return HEAD + "\n\n".join(parts) + "\n"


def main() -> int:
    found = page()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text() != found)
    PAGE.write_text(found)
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
