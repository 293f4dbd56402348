"""Names of the units of a fetch plan, for people."""

from __future__ import annotations

from zeroxla.fetch.segments import FetchPlan, LayerLoop, Remat, Straight

OF_A_LOOP = " of a loop"
"""The end of the name of a unit that is gathered in each turn of a loop."""


def unit_names(plan: FetchPlan, prefix: str = "") -> dict:
    """Return the name of each leaf's unit: "0", "1", ..., and "1.0 of a loop" inside loops."""
    names: dict = {}
    unit_of = {v: i for i, unit in enumerate(plan.units) for v in unit}
    number = 0
    seen: dict[int, str] = {}
    for seg in plan.segments:
        for leaf in seg.leaves if isinstance(seg, Straight) else ():
            if unit_of[leaf] not in seen:
                seen[unit_of[leaf]] = f"{prefix}{number}"
                number += 1
            names.setdefault(leaf, seen[unit_of[leaf]])
        if isinstance(seg, LayerLoop | Remat):
            inner = unit_names(seg.body, f"{prefix}{number}.")
            names.update((leaf, f"{prefix}{number}") for leaf in seg.leaves if leaf not in names)
            number += 1
            if isinstance(seg, Remat):
                names = {**inner, **names}
            else:
                pairs = zip(seg.body.leaves, seg.stacked.values(), strict=True)
                for sliced, (leaf, _) in pairs:
                    names.setdefault(leaf, inner[sliced] + OF_A_LOOP if sliced in inner else "")
    return names
