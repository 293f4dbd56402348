"""An island that is another program than the others does not train, and is told why."""

import concurrent.futures

import jax
import optax
import pytest
from tools.islands import KEY, MODEL, TOKEN, batches, coordinator, make_step, part
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla.config.outer import Outer
from zeroxla.quantize import WireFormat

pytestmark = pytest.mark.usefixtures("quick_compilation")
OPTIONS = {
    "model": {"model": type(MODEL)(widths=(8,), classes=4)},
    "mesh": {"mesh": {"nodes": 2}},
    "outer options": {"outer": Outer(every=3, optimizer=optax.sgd(1.0))},
    "a wire": {"outer": Outer(every=2, optimizer=optax.sgd(1.0), wire=WireFormat(bits=4))},
    "outer optimizer": {"outer": Outer(every=2, optimizer=optax.sgd(0.5))},
    "parameters": {},
}


@pytest.mark.parametrize("what", thinned(["model", "parameters"], slow=list(OPTIONS)[1:-1]))
def test_an_island_with_something_else_is_refused(what):
    row = part(batches(1)[0], 0, 4)
    outer = Outer(every=2, optimizer=optax.sgd(1.0))

    def first(place):
        with zeroxla.Island(make_step(outer, 0, 4), place, TOKEN, timeout=10) as island:
            state = island.init(KEY, row)
            return island(state, row)[1]

    def other(place):
        options = {"outer": outer, **OPTIONS[what]}
        step = make_step(options.pop("outer"), 1, 4, **options)
        key = jax.random.key(1) if what == "parameters" else KEY
        with zeroxla.Island(step, place, TOKEN, timeout=10) as island:
            island.init(key, row)

    with coordinator(1) as there, concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(first, there.address).result()["islands"] == 1
        name = "outer options" if what == "a wire" else what
        with pytest.raises(ValueError, match=rf"other {name}.* than the others; {name}: .* there"):
            other(there.address)
