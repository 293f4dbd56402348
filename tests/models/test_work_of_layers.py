"""Each unrolled layer costs the same, however many come before it.

Only GPT needs a barrier for that; XLA fuses Llama in another way.
"""

import jax
import jax.numpy as jnp
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla.frontend import adapt
from zeroxla.models import GPT, Llama

pytestmark = pytest.mark.usefixtures("quick_compilation")


def gpt(layers):
    return GPT.tiny(layers=layers, scan=False)


def llama(layers):
    return Llama.tiny(layers=layers, scan=False)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="XLA on JAX 0.10's CPU backend drops barriers"
)
@pytest.mark.parametrize(
    ("model", "layers"),
    thinned([], slow=[(gpt, (1, 3, 5)), (llama, (1, 3, 5))], rows=True),
    ids=["gpt", "llama"],
)
def test_compiled_gradient_grows_evenly_with_the_layers(model, layers):
    def flops(layers):
        adapted = adapt(model(layers))
        batch = {"tokens": jnp.zeros((2, 33), jnp.int32)}
        params, _ = jax.eval_shape(adapted.init, jax.random.key(0), batch)

        def loss(params):
            return adapted.loss(params, {}, batch, jax.random.key(0), train=True)[0]

        costs = jax.jit(jax.grad(loss)).lower(params).compile().cost_analysis()
        return costs["flops"]

    few, some, many = map(flops, layers)
    assert many - some < 1.005 * (some - few)
