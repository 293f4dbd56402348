"""Writes docs/families/, a page for each family of public models, from the families' own data.

python scripts/family_pages.py          # writes them
python scripts/family_pages.py --check  # ends with status 1 if one is not up to date
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "families"
RECORDED = ROOT / "tests" / "fixtures" / "families"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tools.chatglm import CONFIG  # noqa: E402

from zeroxla.checkpoint.weights.tensor_names import abstract, format_of, param_shapes  # noqa: E402
from zeroxla.models import from_hugging_face  # noqa: E402
from zeroxla.models.format import Format  # noqa: E402

SIZES = frozenset(
    {"family", "vocab", "layers", "width", "heads", "kv_heads", "head_width", "hidden"}
    | {"length", "eps", "source"}
)
"""Fields of every decoder, which tell no family from another."""


FAMILIES: dict[str, dict[str, Any]] = tomllib.loads(
    (ROOT / "scripts" / "families.toml").read_text()
)
"""What the pages say beside the data, by `model_type`; see the head of the file."""

COMMANDS = """\
    zeroxla train --init FOLDER --data chat.jsonl --lora-rank 16 --lora-base int4 --run RUN
    zeroxla generate RUN --chat
    zeroxla export RUN --output OUT"""


def page(model_type: str) -> str:
    """Return the page of a family as it should be."""
    family, config = FAMILIES[model_type], config_of(model_type)
    model = abstract(from_hugging_face(config))
    format = format_of(model)
    assert format is not None
    parts = [
        f"# {family['title']}",
        f"`model_type` is `{model_type}`, `architectures` is `{format.architecture}`.\n"
        f"Public models: {family['public']}.",
        family["about"],
        "## Use",
    ]
    if model_type != "bert":
        parts.append(COMMANDS)
    parts += [
        "```python\n"
        "model = zeroxla.models.from_hugging_face(folder)\n"
        "step = zeroxla.make_step(model, mesh, optimizer)\n"
        "step.abstract_state(batch)\n"
        "state = zeroxla.from_pretrained(model, folder, step)\n"
        "...\n"
        'zeroxla.export_params(state, "out", model=model, like=folder)\n'
        "```",
        *switches(model),
        "## The config",
        keys(format),
        "## The tensors",
        tensors(format, model),
        "## What is checked",
        checked(model_type),
    ]
    if limits := family.get("limits"):
        parts += ["## Limits", limits]
    parts.append("All families: [families](../families.md).")
    return "\n\n".join(parts) + "\n"


def config_of(model_type: str) -> dict[str, Any]:
    """Return the config of a family's recording."""
    if model_type == "chatglm":
        return CONFIG
    name = FAMILIES[model_type]["recorded"][0]
    return json.loads((RECORDED / name / "config.json").read_text())


def switches(model: Any) -> list[str]:
    """Return the section on what the model computes, for a `Decoder`."""
    config = getattr(model, "config", None)
    if not dataclasses.is_dataclass(config) or not hasattr(config, "arrangement"):
        return []
    rows = ["| field | value |", "|---|---|"]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        usual = None if field.default is dataclasses.MISSING else field.default
        if field.name not in SIZES and value not in (usual, (), False):
            rows.append(f"| `{field.name}` | `{shown(value)}` |")
    said = (
        "The fields of [`DecoderConfig`](../models.md#decoder) that differ from their defaults, in "
        "the tiny model of the tests:"
    )
    return ["## What it computes", said, "\n".join(rows)]


def shown(value: Any) -> str:
    """Return a value without the fields of dataclasses that have none."""
    if dataclasses.is_dataclass(value):
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        inside = ", ".join(f"{name}={shown(x)}" for name, x in fields if x is not None)
        return f"{type(value).__name__}({inside})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def keys(format: Format) -> str:
    """Return the table of the keys that are read, and the values that are computed."""
    rows = ["| key | gives | if it is absent |", "|---|---|---|"]
    for field, key in format.fields.items():
        absent = "an error" if key.default is None else coded(key.default)
        if key.default is None and key.null is not None:
            absent = "follows from other fields"
        rows.append(f"| `{key.name}` | `{field}` | {absent} |")
    rows += [
        f"| `{name}` | {' or '.join(map(coded, values))}; other values are refused | the first |"
        for name, values in format.choices.items()
    ]
    return "\n".join(rows)


def coded(value: Any) -> str:
    """Return a value as JSON, in code."""
    return f"`{json.dumps(value)}`"


def tensors(format: Format, model: Any) -> str:
    """Return the table of the leaves that the model has, and their tensors."""
    rows = ["| leaf | tensor | |", "|---|---|---|"]
    fused = {leaf: part for part in format.fused for leaf in part.leaves}
    there = {"/".join(path) for path in param_shapes(model)}
    for leaf, name in format.tensors.items():
        if leaf.replace(format.layer, format.stack) not in there:
            continue
        notes = ["transposed"] if leaf in format.transposed else []
        if leaf in fused:
            notes.append(f"one of {len(fused[leaf].leaves)} in this tensor")
        rows.append(f"| `{leaf}` | `{name}` | {', '.join(notes)} |")
    return (
        f"In a scan the leaves of a block begin with `{format.stack}` and have a leading dim of\n"
        f"layers; written out they begin with `{format.layer}`.\n\n" + "\n".join(rows)
    )


def checked(model_type: str) -> str:
    """Return what the tests compare."""
    names = ", ".join(f"`{name}`" for name in FAMILIES[model_type]["recorded"])
    lines = [
        f"The tests have tiny models ({names}) and what Transformers computes with them, in",
        "`tests/fixtures/families/`:",
        "",
        "* Logits, loss, and the gradient of every tensor are equal within 1e-5.",
        "* Import and export give every tensor back bit by bit.",
    ]
    if model_type != "bert":
        lines += [
            "* 12 greedy tokens are equal, and a `HybridEngine` generates them, too.",
            "* With `tensor=2` loss and gradients are equal.",
            "* Adapters learn on a base of 4 bits, and then generate the merged model's tokens.",
        ]
    return "\n".join(lines)


def index() -> str:
    """Return the list of all pages."""
    rows = ["| family | public models |", "|---|---|"]
    rows += [
        f"| [{f['title']}]({name}.md) | {_line(f['public'])} |" for name, f in FAMILIES.items()
    ]
    return (
        "# A page for each family\n\n"
        "Written by `scripts/family_pages.py` from `models/families/`. What they share is in\n"
        "[families](../families.md).\n\n" + "\n".join(rows) + "\n"
    )


def _line(text: str) -> str:
    return text.replace("\n", " ")


def main() -> int:
    """Write or check the pages; return the exit status."""
    wanted = {f"{name}.md": page(name) for name in FAMILIES} | {"index.md": index()}
    stale = 0
    for name, text in wanted.items():
        file = PAGES / name
        if file.is_file() and file.read_text() == text:
            continue
        stale = 1
        if "--check" in sys.argv:
            print(f"{file} is not up to date; run python scripts/family_pages.py", file=sys.stderr)
        else:
            PAGES.mkdir(exist_ok=True)
            file.write_text(text)
            print(f"wrote {file}")
    return stale if "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
