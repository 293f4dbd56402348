"""Writes the gauntlet's results: tables for benchmarks/results, and a page for docs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common import RESULTS, Check, report, table

from gauntlet_parts.case import KINDS
from gauntlet_parts.outcome import FAILED, NOT_APPLICABLE, OK, REFUSED

PAGE = RESULTS.parent.parent / "docs" / "models_that_work.md"
NUM_MODELS = 40
TITLES = {
    "gradients": "training",
    "zeropp": "ZeRO++",
    "lora": "LoRA",
    "generation": "generation",
    "tensor": "tensor 2",
    "pipeline": "pipe 2",
    "pipeline of 4": "pipe 4",
    "tensor axis": "axis tensor=2",
    "context axis": "axis context=2",
    "plan": "plan",
    "checkpoint": "checkpoint",
}
MEANINGS = {
    "gradients": "against the unsharded model under `jax.grad` on one device: the loss, the "
    "gradients (within 5e-6 of the largest gradient of a leaf) and the loss after a step (within "
    "1e-4); leaves are split over 2 nodes of 2 devices",
    "zeropp": "two steps with `ZeroConfig.zeropp()`; the losses are within 5 % (and 0.05) of the "
    "unsharded model's",
    "lora": "every leaf named kernel, weight, w or embedding gets adapters; where zeroxla refuses "
    "some of these leaves, the dense ones do. The first loss equals the model's own, and a step "
    "changes no leaf of the base",
    "generation": "every token that `HybridEngine` draws greedily is the likeliest of a full pass "
    "of the unsharded model",
    "tensor": "the same with each copy of the model split over 2 devices",
    "pipeline": "`Pipeline.from_model` on two stages of two devices; loss and gradients are those "
    "of the unsharded model",
    "pipeline of 4": "the same on four stages of one device",
    "tensor axis": "a mesh with `tensor=2` on 2 nodes of 2 devices, in two micro-batches; loss and "
    "gradients are those of the unsharded model",
    "context axis": "the same with `context=2`",
    "plan": "`zeroxla.plan` for 16 devices; the number of parameters is right",
    "checkpoint": "a state saved on 2 x 2 devices and restored on 1 x 3 is the same, bit for bit",
}
MEASURED = ("gradients", "pipeline", "pipeline of 4", "tensor axis", "context axis")
"""The checks whose detail is the largest error of the gradients."""
CELLS = {REFUSED: "refused", FAILED: "FAILED", NOT_APPLICABLE: "-"}
HEADINGS = {
    "language model": "Language models",
    "encoder": "Encoders",
    "encoder-decoder": "Encoder-decoders",
    "images and sound": "Images and sound",
    "other": "Other models",
    "layer": "Layers of flax.linen and flax.nnx",
}
Results = Sequence[Mapping[str, Any]]


def write(found: Results, num_cases: int, folder: Path = RESULTS, page: Path = PAGE) -> int:
    """Write the results of models, and return the exit code.

    Args:
      found: the results of each model.
      num_cases: the number of models that there are.
      folder: of gauntlet.json and gauntlet.md.
      page: the file of the page for docs.
    """
    models = [x for x in found if x["kind"] != "layer"]
    failed = [(x, name) for x in found for name, c in x["checks"].items() if c["status"] == FAILED]
    checks = [
        Check(name="models short of 40", value=max(0, NUM_MODELS - len(models)), limit=0),
        Check(name="models without results", value=num_cases - len(found), limit=0),
        Check(name="failed checks", value=len(failed), limit=0),
        Check(name="largest error of a gradient", value=largest_error(found), limit=5e-6),
    ]
    packages = sorted({x["package"] for x in found} - {"jax", "flax", "linen", "nnx", "zeroxla"})
    code = report(
        "gauntlet",
        "The gauntlet: Flax models as they are",
        body(found),
        {"models": list(found)},
        checks,
        folder=folder,
        versions={name: known for name in packages if (known := version_of(name))},
    )
    page.write_text(page_of(found))
    return code


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def largest_error(found: Results) -> float:
    """Return the largest error of the gradients that passed."""
    checks = [c for x in found for n, c in x["checks"].items() if n in MEASURED]
    return max((float(c["detail"]) for c in checks if c["status"] == OK), default=0.0)


def of_kind(found: Results, kind: str) -> Results:
    return [x for x in found if x["kind"] == kind]


def body(found: Results) -> str:
    """Return the markdown of the committed table."""
    meanings = "\n".join(f"- **{TITLES[name]}**: {text}." for name, text in MEANINGS.items())
    parts = [
        f"{len(found)} models and layers, tiny, with random weights, unchanged, each in "
        f"float32 on 4 simulated devices.\n\n{meanings}\n\n"
        "A cell is the measured error, or yes. *refused*: zeroxla says in a sentence that it "
        "cannot do it, and why. *FAILED*: a crash, or a wrong result. The sentences follow the "
        "tables.",
        summary(found),
    ]
    for kind in KINDS:
        if some := of_kind(found, kind):
            rows = [[x["name"], *(cell(name, x["checks"]) for name in TITLES)] for x in some]
            parts.append(f"## {HEADINGS[kind]}\n\n{table(['', *TITLES.values()], rows)}")
    for status, heading in ((REFUSED, "Refused"), (FAILED, "Failed")):
        if listed := reasons(found, status, where=True):
            parts.append(f"## {heading}\n\n{listed}")
    return "\n\n".join(parts)


def cell(name: str, checks: Mapping[str, Any]) -> str:
    check = checks[name]
    if check["status"] != OK:
        return CELLS[check["status"]]
    return check["detail"] if name in MEASURED else "yes"


def summary(found: Results) -> str:
    """Return a table: of each kind and check, how many models passed of those it is meant for."""
    rows = []
    for kind in KINDS:
        if some := of_kind(found, kind):
            rows.append([f"{HEADINGS[kind]} ({len(some)})", *(passed(some, n) for n in TITLES)])
    return table(["passed", *TITLES.values()], rows)


def passed(found: Results, name: str) -> str:
    statuses = [x["checks"][name]["status"] for x in found]
    meant = [status for status in statuses if status != NOT_APPLICABLE]
    return f"{meant.count(OK)} of {len(meant)}" if meant else "-"


def reasons(found: Results, status: str, *, where: bool = False) -> str:
    """Return a list of the reasons of a status, each with its checks and models."""
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    samples: dict[str, Mapping[str, Any]] = {}
    for x in found:
        for name, check in x["checks"].items():
            if check["status"] == status:
                key = same_reason(check["detail"])
                samples.setdefault(key, check)
                groups[key][x["name"]].append(TITLES[name])
    lines = []
    for key, models in sorted(groups.items(), key=lambda item: -len(item[1])):
        by_checks: dict[str, list[str]] = defaultdict(list)
        for model, names in models.items():
            by_checks[", ".join(names)].append(model)
        who = "; ".join(f"{checks}: {', '.join(names)}" for checks, names in by_checks.items())
        text = f'- {who}. "{samples[key]["detail"]}"'
        if where and samples[key]["where"]:
            text += f" (`{samples[key]['where']}`)"
        lines.append(text)
    return "\n".join(lines)


def same_reason(detail: str) -> str:
    """Return a reason without the names, numbers and shapes of one model."""
    text = detail.partition("; the dense leaves of the model are")[0]
    text = re.sub(r"matches \S+", "matches a leaf", text)
    text = re.sub(r"\(\[.*?\]\)|\[[^]]*\]", "[]", text)
    text = re.sub(r"\w+(/\w+)+", "a leaf", text)
    text = re.sub(r"Flax\w+|\d[\d.e-]*", "N", text)
    return text[:160]


def page_of(found: Results) -> str:
    """Return the page of docs: by kind, what works, and the exceptions with their reasons."""
    num_models = sum(x["kind"] != "layer" for x in found)
    meanings = "\n".join(f"| {TITLES[name]} | {text} |" for name, text in MEANINGS.items())
    parts = [
        "# Models that work\n\n"
        "<!-- Written by benchmarks/gauntlet.py from benchmarks/results/gauntlet.json. -->\n\n"
        f"`make gauntlet` runs {num_models} models, from the package index or written as "
        f"public code is, and {len(found) - num_models} layers of Flax by themselves, through "
        "zeroxla: as they are, in "
        "tiny configurations with random weights, on 4 simulated devices. [The whole table]"
        "(../benchmarks/results/gauntlet.md) has the measured errors and the versions.\n\n"
        f"| check | what it means to pass |\n| --- | --- |\n{meanings}\n\n{summary(found)}",
    ]
    for kind in KINDS:
        if some := of_kind(found, kind):
            parts.append(f"## {HEADINGS[kind]}\n\n{section(some)}")
    return "\n\n".join(parts) + "\n"


def section(found: Results) -> str:
    """Return what works of a kind of models."""
    by_package: dict[str, list[str]] = defaultdict(list)
    for x in found:
        by_package[x["package"]].append(x["name"].removeprefix(f"{x['package']} "))
    lines = [f"{name}: {', '.join(models)}." for name, models in by_package.items()]
    everything = [
        x["name"]
        for x in found
        if all(c["status"] in (OK, NOT_APPLICABLE) for c in x["checks"].values())
    ]
    if len(everything) == len(found):
        lines.append("All pass every check.")
    elif everything:
        lines.append(f"These pass every check: {', '.join(everything)}.")
    for status, words in ((REFUSED, "zeroxla refuses, with the reason:"), (FAILED, "These fail:")):
        if listed := reasons(found, status):
            lines.append(f"{words}\n\n{listed}")
    return "\n\n".join(lines)
