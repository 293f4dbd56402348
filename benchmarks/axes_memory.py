"""The part `memory` of axes.py reads from the compiler how much memory a device needs with axes.

A sequence of 32k tokens of a GPT of 4 layers and width 256, with attention in blocks and the loss
in chunks, on one device and over `context=4`. And the leaves that a device gathers with `tensor=4`.
Nothing runs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from common import LENGTH, Check, gpt, table, token_shapes

import zeroxla
from zeroxla.models import GPT

TOKENS, LAYERS, WIDTH, HEADS = 32768, 4, 256, 8
VARIANTS: dict[str, dict[str, Any]] = {
    "scanned": {},
    "written out": {"scan": False},
    "scanned, computed again": {"remat": True},
    "scanned, around a ring": {"heads": 2},  # 4 devices do not divide them
}
CONTEXTS = (1, 2, 4)
DEVICE_BYTES = 2e9
"""The memory of a device on which the sequence does not fit alone."""
GATHERED = {"layers": 4, "width": 512}


def plan_of(context: int, options: dict[str, Any]) -> dict[str, int]:
    """Compile a step of one sequence; return its figures in bytes a device."""
    mesh = zeroxla.make_mesh(nodes=1, devices=jax.devices()[:context], context=context)
    shape = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, **options}
    model = GPT(vocab=256, length=TOKENS, **shape)
    step = zeroxla.make_step(model, mesh, optax.adamw(1e-3))
    batch = {"tokens": jax.ShapeDtypeStruct((1, TOKENS + 1), jnp.int32)}
    used = zeroxla.inspect.memory(step.lower(step.abstract_state(batch), batch).compile())
    return {"temporaries": used.temp_bytes, "all": used.total_bytes}


def gathered(scan: bool, tensor: int) -> int:
    """Return the elements of leaves that a device gathers in a step's forward: of a GPT on 8
    devices, from the compiled program."""
    mesh = zeroxla.make_mesh(nodes=1, tensor=tensor)
    model = gpt(scan=scan, **GATHERED)
    config = zeroxla.ZeroConfig(persistence_threshold=0)
    step = zeroxla.make_step(model, mesh, optax.adamw(1e-3), config=config)
    batch = token_shapes(mesh.size)
    compiled = step.lower(step.abstract_state(batch), batch).compile()
    rows = zeroxla.inspect.comms(compiled, mesh).select(phase="forward gather")
    return sum(row.elements * row.count for row in rows)


def measure() -> dict[str, Any]:
    """Return all figures."""
    return {
        "sequence": {
            name: {str(n): plan_of(n, options) for n in CONTEXTS}
            for name, options in VARIANTS.items()
        },
        "gathered": {
            kind: {str(n): gathered(scan, n) for n in (1, 4)}
            for kind, scan in (("scanned", True), ("written out", False))
        },
    }


def in_words(found: dict[str, Any]) -> str:
    """Return the tables as markdown."""
    longest, first = str(CONTEXTS[-1]), str(CONTEXTS[0])
    lines = []
    for name, sizes in found["sequence"].items():
        ratio = sizes[longest]["temporaries"] / sizes[first]["temporaries"]
        megabytes = (
            f"{sizes[str(n)]['temporaries'] / 1e6:.0f} ({sizes[str(n)]['all'] / 1e6:.0f})"
            for n in CONTEXTS
        )
        lines.append([name, *megabytes, f"{ratio:.2f}"])
    header = ["GPT", *(f"context={n}" for n in CONTEXTS), f"context={longest} over {first}"]
    leaves = [
        [name, *(f"{sizes[n] / 1e6:.2f}" for n in ("1", "4")), f"{sizes['4'] / sizes['1']:.3f}"]
        for name, sizes in found["gathered"].items()
    ]
    return (
        f"Temporaries of a device (in brackets all that it holds, the state included), MB, for one "
        f"sequence of {TOKENS} tokens, {LAYERS} layers of width {WIDTH}, {HEADS} heads (2 around a "
        f"ring), AdamW; attention in blocks of 512, the loss in chunks of 512, as the compiler "
        f"plans them.\n\n"
        f"{table(header, lines)}\n\n"
        f"Millions of elements of leaves that a device gathers in forward, on 8 devices, of a GPT "
        f"of {GATHERED['layers']} layers of width {GATHERED['width']} with {LENGTH} tokens, read "
        f"from the compiled programs.\n\n"
        f"{table(('GPT', 'tensor=1', 'tensor=4', 'ratio'), leaves)}"
    )


def make_checks(found: dict[str, Any]) -> list[Check]:
    """Compare with the targets."""
    longest, first = str(CONTEXTS[-1]), str(CONTEXTS[0])
    checks = []
    for name, sizes in found["sequence"].items():
        split, alone = sizes[longest], sizes[first]
        text = f"{name}: temporaries at context={longest} over those at {first}"
        ratio = split["temporaries"] / alone["temporaries"]
        checks.append(Check(name=text, value=ratio, limit=0.3))
    plain = found["sequence"]["scanned"]
    text = f"scanned: a device of {DEVICE_BYTES / 1e9:.0f} GB over what a sequence needs"
    fits = DEVICE_BYTES / plain[first]["all"]
    checks.append(Check(name=f"{text} alone, so that it does not fit", value=fits, limit=1.0))
    share = plain[longest]["all"] / DEVICE_BYTES
    text = (
        f"scanned: the bytes that a sequence needs at context={longest}, divided by the "
        f"{DEVICE_BYTES / 1e9:.0f} GB of a device"
    )
    checks.append(Check(name=text, value=share, limit=1.0))
    for name, sizes in found["gathered"].items():
        text = f"{name}: leaves gathered at tensor=4 over those at tensor=1"
        checks.append(Check(name=text, value=sizes["4"] / sizes["1"], limit=0.26))
    return checks
