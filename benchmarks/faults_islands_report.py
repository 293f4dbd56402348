"""The targets and the tables of faults_islands.py."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from common import Check, report, table
from faults_islands_figures import (
    PHASES,
    Found,
    closed_twice,
    differing,
    interpolated,
    medians,
    not_told,
    over_credited,
    restarts,
    shrinking,
)
from faults_islands_task import DELAY, EVERY, FRAGMENTS

MOST_LOST, MOST_LOSS = 0.10, 0.01
PARTS = {
    "imported": "Python and imports",
    "joined": "the coordinator's answer",
    "caught_up": "new parameters, and the others' state",
    "step": "the first step, with what it compiles",
    "all": "all",
}


def write(calm: Found, found: Found, options: Mapping[str, Any]) -> int:
    """Print and write the result; return the exit status.

    Args:
      calm, found: the undisturbed run and the disturbed one.
      options: of the command.
    """
    counted, loss = calm.loss(), found.loss()
    alike = interpolated([(n, x) for _, n, x in calm.losses], loss[0])
    hashes = {name: differing(run.hashes) for name, run in _both(calm, found)}
    older = {name: shrinking(run.hashes) for name, run in _both(calm, found)}
    twice = {name: closed_twice(run.rounds) for name, run in _both(calm, found)}
    over = {
        name: over_credited(run.rounds, run.steps, run.rows, run.fragments)
        for name, run in _both(calm, found)
    }
    checks = [
        Check(
            name="share of the undisturbed run's tokens that count that was lost",
            value=1 - found.counted / calm.counted,
            limit=MOST_LOST,
        ),
        Check(
            name="share of the undisturbed run's steps that was not taken",
            value=1 - found.taken / calm.taken,
            limit=MOST_LOST,
        ),
        Check(
            name="runs without a validation loss of parameters that have been trained",
            value=sum(len(run.losses) < 2 for run in (calm, found)),
            limit=0,
        ),
        Check(
            name="final validation loss above the undisturbed run's, share of it",
            value=loss[1] / counted[1] - 1,
            limit=MOST_LOSS,
        ),
        Check(
            name="the same against the undisturbed run at the same number of tokens",
            value=loss[1] / alike - 1,
            limit=MOST_LOSS,
        ),
        Check(
            name="fragments and versions for which two islands had different outer parameters",
            value=sum(map(len, hashes.values())),
            limit=0,
        ),
        Check(
            name="times that a process went back to an older version",
            value=sum(map(len, older.values())),
            limit=0,
        ),
        Check(
            name="rounds that were closed twice",
            value=sum(map(len, twice.values())),
            limit=0,
        ),
        Check(
            name="islands and fragments with more rows credited than trained on",
            value=sum(map(len, over.values())),
            limit=0,
        ),
        Check(
            name="phases in which no island was killed",
            value=len(set(PHASES) - {e["phase"] for e in found.events if e["what"] == "killed"}),
            limit=0,
        ),
        Check(
            name="processes of islands that ended other than by the kills of this program",
            value=sum(len(_failures(run)) for _, run in _both(calm, found)),
            limit=0,
        ),
    ]
    body = "\n\n".join(
        (
            _about(found, options),
            _main_table(calm, found, alike),
            _text(found),
            _restart_table(found),
            "![What happened](faults_islands.png)",
        )
    )
    figures = {
        "options": {name: str(value) for name, value in options.items() if name != "work"},
        "undisturbed": _figures(calm),
        "disturbed": _figures(found),
        "loss of the undisturbed run at the tokens of the disturbed one": alike,
        "other outer parameters": hashes,
        "older versions": older,
        "closed twice": twice,
        "more credited than trained on": over,
        "not told of": not_told(found.rounds),
        "failures": _failures(calm) + _failures(found),
        "restarts": restarts(found.events),
    }
    return report("faults_islands", "Islands under faults", body, figures, checks)


def _both(calm: Found, found: Found) -> tuple[tuple[str, Found], tuple[str, Found]]:
    return ("undisturbed", calm), ("disturbed", found)


def _failures(found: Found) -> list[dict[str, Any]]:
    """Return the ends of islands' processes that nobody brought about, with what they printed."""
    told = {(e["slot"], e["life"]) for e in found.events if e["what"] in ("killed", "settled")}
    return [
        {
            **e,
            "printed": [
                x["line"]
                for x in found.events
                if x["what"] == "printed" and (x.get("slot"), x.get("life")) == key
            ][-30:],
        }
        for e in found.events
        if e["what"] == "ended" and "life" in e and (key := (e["slot"], e["life"])) not in told
    ]


def _about(found: Found, options: Mapping[str, Any]) -> str:
    kills = collections.Counter(e["phase"] for e in found.events if e["what"] == "killed")
    cuts = [e for e in found.events if e["what"] == "disturbance" and e["kind"] == "cut"]
    deaths = [e for e in found.events if e["what"] == "disturbance" and e["kind"] == "coordinator"]
    by_phase = ", ".join(f"{num} while {phase}" for phase, num in sorted(kills.items()))
    return (
        f"{options['islands']} islands of one simulated device train a GPT for {found.seconds:.0f} "
        "s, twice. Each is a process on a host of its own: network namespaces joined by a switch. "
        f"A step takes {options['step_s']} s, and an island sleeps for most of them. So a "
        "dead island makes no other one faster. Differences travel in 4 bits with error feedback, "
        f"in {FRAGMENTS} fragments, each after {EVERY} steps, merged {DELAY} steps later. A round "
        f"waits {options['deadline']:.0f} s for an island that is late.\n\n"
        f"In the disturbed run islands were killed with SIGKILL {sum(kills.values())} times: "
        f"{by_phase}. Each was started again at once, as a new process without a checkpoint. "
        f"Cables were pulled out for {_lengths(cuts)} s. The coordinator was killed with SIGKILL "
        f"{len(deaths)} times, and started again with its file {_lengths(deaths)} s later."
    )


def _lengths(events: Sequence[Mapping[str, Any]]) -> str:
    return " and ".join(f"{event['seconds']:.1f}" for event in events)


def _main_table(calm: Found, found: Found, alike: float) -> str:
    (calm_at, calm_loss), (at, loss) = calm.loss(), found.loss()
    rows = [
        [
            "tokens of steps that count",
            f"{calm.counted:,.0f}",
            f"{found.counted:,.0f}",
            f"{found.counted / calm.counted:.1%}",
        ],
        [
            "tokens of all steps taken",
            f"{calm.taken:,.0f}",
            f"{found.taken:,.0f}",
            f"{found.taken / calm.taken:.1%}",
        ],
        ["rounds closed", len(calm.rounds), len(found.rounds), ""],
        [
            "validation loss at the end",
            f"{calm_loss:.4f}",
            f"{loss:.4f}",
            f"{loss / calm_loss:.2%}",
        ],
        ["tokens that count in it", f"{calm_at:,.0f}", f"{at:,.0f}", ""],
        [
            "validation loss at the disturbed run's tokens",
            f"{alike:.4f}",
            f"{loss:.4f}",
            f"{loss / alike:.2%}",
        ],
    ]
    return table(["", "undisturbed", "disturbed", "of the undisturbed"], rows)


def _text(found: Found) -> str:
    lost = not_told(found.rounds)
    return (
        "A token counts when a closed round has credited it: a round credits the rows that an "
        "island has trained on since it took part last with this fragment, and the sum is divided "
        "by the number of fragments. The validation loss is computed with the outer parameters, on "
        "the same held-out text. Rounds that no coordinator told of, because it was killed before "
        f"it could, count nothing here: {len(lost)}.\n\n"
        f"{len(found.hashes)} hashes of outer parameters, and of the outer optimizer's state, were "
        "compared between all processes of the disturbed run.\n\n"
        "A published run of 32 replicas kept 97.7 % through 62 faults."
    )


def _restart_table(found: Found) -> str:
    rows = restarts(found.events)
    if not rows:
        return "No process came to its first step after a kill."
    middle, cpu = medians(rows), medians(restarts(found.events, clock="cpu"))
    lines = [
        [
            text,
            f"{middle[name]:.2f}",
            f"{max(row[name] for row in rows):.2f}",
            f"{cpu[name]:.2f}" if name in cpu else "",
        ]
        for name, text in PARTS.items()
    ]
    header = ["from the kill to the first step", "median s", "longest s", "median s on a core"]
    return f"{len(rows)} restarts:\n\n{table(header, lines)}"


def _figures(found: Found) -> dict[str, Any]:
    quiet = ("step", "snapshot", "cpu")
    return {
        "seconds": found.seconds,
        "tokens that count": found.counted,
        "tokens of all steps": found.taken,
        "losses": found.losses,
        "events": [e for e in found.events if e["what"] not in quiet],
    }
