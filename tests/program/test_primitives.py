"""The table of primitives: its names are JAX's own, and it has all collectives."""

import re
import sys
from pathlib import Path

import jax
import jax.experimental.pallas  # It makes pallas_call.
import pytest
from jax.extend.core import Primitive

import zeroxla
from zeroxla.planning.timeline import READS_DISK
from zeroxla.program import compat, primitives
from zeroxla.program.primitives import COLLECTIVES, SINCE, UNTIL
from zeroxla.split.products import RULES

SETS = {
    name: frozenset(names)
    for name, names in vars(primitives).items()
    if name.isupper() and name not in ("SINCE", "UNTIL")
}


def names_in(modules):
    """Return the names of the primitives that modules of JAX hold."""
    found = (x for module in modules for x in list(vars(module).values()))
    return {x.name for x in found if isinstance(x, Primitive)}


def names_of_jax():
    """Return the names of all primitives of the installed JAX."""
    loaded = [m for name, m in list(sys.modules.items()) if m and name.split(".")[0] == "jax"]
    return names_in(loaded)


def in_this_jax(name):
    """Return whether the table says that the installed JAX has a primitive."""
    last = UNTIL.get(name, jax.__version_info__)
    return SINCE.get(name, (0,)) <= jax.__version_info__[:3] and jax.__version_info__[:3] <= last


@pytest.mark.smoke
@pytest.mark.parametrize("which", sorted(SETS))
def test_names_are_those_of_the_installed_jax(which):
    assert {name for name in SETS[which] if in_this_jax(name)} == SETS[which] & names_of_jax()


def test_versions_are_those_of_names_in_the_table():
    everything = frozenset().union(*SETS.values())
    assert everything.issuperset({*SINCE, *UNTIL})


@pytest.mark.smoke
def test_no_collective_of_jax_is_missing():
    parallel = names_in([sys.modules["jax._src.lax.parallel"]])
    assert parallel - COLLECTIVES == {"axis_index"}


def test_rules_and_single_names_are_known_to_jax():
    known = names_of_jax() | SETS["ELEMENTWISE"]
    assert known.issuperset({*RULES, compat.COMPUTE_ON, READS_DISK})
    single = set()
    for file in Path(zeroxla.__file__).parent.rglob("*.py"):
        single |= set(re.findall(r'\b(?:eq|inner)\.name [!=]= "([^"]+)"', file.read_text()))
    assert {"scan", "dot_general", "device_put"} <= single <= known


def test_no_set_of_names_stands_elsewhere():
    """The names in `program/hlo` are HLO's own; some are those of a primitive, too."""
    known = names_of_jax()
    for file in Path(zeroxla.__file__).parent.rglob("*.py"):
        if file.name != "primitives.py" and file.parent.name != "hlo":
            for names in re.findall(r"(?:frozenset\(|[|]|= )\s*\{([^}:]*)\}", file.read_text()):
                assert len(known.intersection(re.findall(r'"([^"]+)"', names))) < 2, file
