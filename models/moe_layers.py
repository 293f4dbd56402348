"""A bank of experts and three ways to bring tokens to them, as modules of flax.nnx.

Shape letters: B batch, L positions, D width, F hidden, E experts, K = `top_k` experts of each
token, C places that an expert has for the tokens of one row, P = B L K pairs of a token and an
expert. A row is one sequence of the batch. Places and the balancing loss are counted in each row by
itself, so results do not depend on how a batch is split over devices. GShard calls this a group.

Sources: Shazeer et al., arXiv 1701.06538 (mixtures of experts); Lepikhin et al., GShard, arXiv
2006.16668 (dispatch and combine); Fedus et al., Switch Transformer, arXiv 2101.03961 (capacity,
balancing loss); Jiang et al., Mixtral, arXiv 2401.04088 (SwiGLU experts, softmax over the top k).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name as named

NORMAL = nnx.initializers.normal(0.02)
Routing = Literal["capacity", "ragged", "dense"]
Product = Callable[[jax.Array, jax.Array], jax.Array]


class Experts(nnx.Module):
    """E perceptrons down(silu(gate(x)) * up(x)) with stacked kernels: [E, D, F] and [E, F, D].

    With `bias` each product has one: [E, F] and [E, D]. With `clamp` the perceptrons are those of
    gpt-oss: gate * sigmoid(1.702 gate) * (up + 1), gate at most `clamp`, up at most so large.
    """

    def __init__(
        self,
        experts: int,
        width: int,
        hidden: int,
        *,
        bias: bool = False,
        clamp: float | None = None,
        rngs: nnx.Rngs,
    ):
        self.clamp = clamp
        self.gate_proj = nnx.Param(NORMAL(rngs.params(), (experts, width, hidden)))
        self.up_proj = nnx.Param(NORMAL(rngs.params(), (experts, width, hidden)))
        self.down_proj = nnx.Param(NORMAL(rngs.params(), (experts, hidden, width)))
        self.gate_bias, self.up_bias, self.down_bias = (
            nnx.data(nnx.Param(jnp.zeros((experts, n))) if bias else None)
            for n in (hidden, hidden, width)
        )

    def __call__(self, x: jax.Array, product: Product) -> jax.Array:
        """Return the outputs of the experts; `product(x, kernel_EIO)` gives each its inputs."""
        gate = named(_affine(product, x, self.gate_proj, self.gate_bias), "gate_proj")
        up = named(_affine(product, x, self.up_proj, self.up_bias), "up_proj")
        if self.clamp is None:
            mixed = jax.nn.silu(gate) * up
        else:
            gate, up = jnp.minimum(gate, self.clamp), jnp.clip(up, -self.clamp, self.clamp)
            mixed = gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
        return named(_affine(product, mixed, self.down_proj, self.down_bias), "down_proj")


def _affine(
    product: Product, x: jax.Array, kernel_EIO: nnx.Param, bias_EO: nnx.Param | None
) -> jax.Array:
    y = product(x, kernel_EIO[...])
    if bias_EO is None:
        return y
    # As a kernel of one input, a bias comes to its expert's tokens as any kernel does.
    return y + product(jnp.ones_like(x[..., :1]), bias_EO[...][:, None, :])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Routes:
    """Where the router sends each token.

    Attributes:
      logits_BLE: the router's logits, float32, whose softmax is the experts' shares.
      experts_BLK: the K experts of each token, int32: those with the largest logits, or as
        `route_by_sigmoid` chooses. Of equal numbers the first expert's counts as larger.
      weights_BLK: their shares in the token's output, float32: the softmax of their logits, which
        is the softmax over all experts, divided by what it gives the K; or not divided; or times
        a constant.
    """

    logits_BLE: jax.Array
    experts_BLK: jax.Array
    weights_BLK: jax.Array

    @property
    def chosen_BLKE(self) -> jax.Array:
        """Whether each choice of a token is this expert, bool."""
        return self.experts_BLK[..., None] == jnp.arange(self.logits_BLE.shape[-1])

    @property
    def weights_BLE(self) -> jax.Array:
        """The share of each expert in the token's output, 0 if it is not one of the K; float32."""
        return jnp.where(self.chosen_BLKE, self.weights_BLK[..., None], 0).sum(axis=2)


Mix = Callable[
    [jax.Array, Experts, Routes, jax.Array | None], tuple[jax.Array, dict[str, jax.Array]]
]
"""(x_BLD, experts, routes, real_BL) -> (y_BLD, statistics). `real_BL` is 0 at padding."""


def route(
    x_BLD: jax.Array,
    kernel_DE: jax.Array,
    top_k: int,
    *,
    is_normalized: bool = True,
    bias_E: jax.Array | None = None,
) -> Routes:
    """Return the `top_k` experts of each token. The product adds up in float32.

    If weights are not normalized, they are the experts' part of the softmax over all of them.
    """
    logits_BLE = jnp.einsum("bld,de->ble", x_BLD, kernel_DE, preferred_element_type=jnp.float32)
    if bias_E is not None:
        logits_BLE += bias_E.astype(jnp.float32)
    logits_BLK, experts_BLK = jax.lax.top_k(logits_BLE, top_k)
    weights_BLK = jax.nn.softmax(logits_BLK, axis=-1)
    if not is_normalized:
        total_BL1 = jax.nn.logsumexp(logits_BLE, axis=-1, keepdims=True)
        weights_BLK = jnp.exp(logits_BLK - total_BL1)
    return Routes(logits_BLE=logits_BLE, experts_BLK=experts_BLK, weights_BLK=weights_BLK)


def route_by_sigmoid(
    x_BLD: jax.Array,
    kernel_DE: jax.Array,
    top_k: int,
    *,
    correction_E: jax.Array | None = None,
    groups: int = 1,
    top_groups: int = 1,
    is_normalized: bool = True,
) -> Routes:
    """Return the `top_k` experts of each token by the sigmoids of their logits, in float32.

    The logits of the routes are the logarithms of the sigmoids, so a softmax of them is the
    sigmoids divided by their sum.

    Args:
      x_BLD, kernel_DE, top_k: as for `route`.
      correction_E: is added to the sigmoids where experts are chosen; it has no gradient.
      groups, top_groups: experts are chosen in the groups whose two best have the largest sum.
      is_normalized: whether the sigmoids of the K are divided by their sum.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    logits_BLE = jnp.einsum("bld,de->ble", x_BLD, kernel_DE, preferred_element_type=jnp.float32)
    logits_BLE = jax.nn.log_sigmoid(logits_BLE)
    scores_BLE = jax.lax.stop_gradient(jnp.exp(logits_BLE))
    if correction_E is not None:
        scores_BLE += jax.lax.stop_gradient(correction_E.astype(jnp.float32))
    if groups > 1:
        grouped = scores_BLE.reshape(*scores_BLE.shape[:2], groups, -1)
        best_two = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
        chosen = jax.lax.top_k(best_two, top_groups)[1][..., None] == jnp.arange(groups)
        grouped = jnp.where(chosen.any(axis=2)[..., None], grouped, -jnp.inf)
        scores_BLE = grouped.reshape(scores_BLE.shape)
    experts_BLK = jax.lax.top_k(scores_BLE, top_k)[1]
    logits_BLK = jnp.take_along_axis(logits_BLE, experts_BLK, axis=-1)
    weights = jax.nn.softmax(logits_BLK, axis=-1) if is_normalized else jnp.exp(logits_BLK)
    return Routes(logits_BLE=logits_BLE, experts_BLK=experts_BLK, weights_BLK=weights)


def balance_loss(routes: Routes) -> jax.Array:
    """Return the load-balancing loss: the mean over rows of E * sum_e f_e p_e, a float32 scalar.

    f_e is the share of the row's pairs of token and expert that are expert e's, and has no
    gradient. p_e is the mean of the softmax over all experts. The loss is 1 if both are even, and E
    if all tokens take one expert. Hugging Face's Mixtral divides f_e by L and not by L * K, so its
    loss is K times this one; it also takes all rows and layers together.
    """
    num_experts = routes.logits_BLE.shape[-1]
    share_BE = routes.chosen_BLKE.astype(jnp.float32).mean(axis=(1, 2))
    probs_BE = jax.nn.softmax(routes.logits_BLE, axis=-1).mean(axis=1)
    return num_experts * (share_BE * probs_BE).sum(axis=-1).mean()


def make_mix(routing: Routing, capacity_factor: float) -> Mix:
    """Return the function that mixes the outputs of the experts.

    Args:
      routing: "capacity", "ragged" or "dense"; see `by_capacity`, `by_sorting` and `by_all`.
      capacity_factor: for capacity: the places of an expert over those that it needs if all experts
        are chosen equally often.

    Raises:
      ValueError: the routing is unknown, or the factor is not above 0.
    """
    if not capacity_factor > 0:
        raise ValueError(
            f"capacity_factor={capacity_factor}: it must be above 0; 1.25 leaves every expert a "
            "quarter more places than an even choice needs"
        )
    mixes = {
        "capacity": functools.partial(by_capacity, capacity_factor=capacity_factor),
        "ragged": by_sorting,
        "dense": by_all,
    }
    if routing not in mixes:
        raise ValueError(f"routing={routing!r}: take capacity, ragged or dense")
    return mixes[routing]


def by_capacity(
    x_BLD: jax.Array,
    experts: Experts,
    routes: Routes,
    real_BL: jax.Array | None,
    *,
    capacity_factor: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Bring tokens to places of their experts and back, by products with one-hot arrays.

    An expert has C = ceil(capacity_factor * K * L / E) places in a row, at most L. Tokens take them
    in the order of their positions, so no token sees a later one. A token that finds no place at an
    expert gets nothing from it. Its other weights stay as they are. Padding takes no place.

    Returns:
      y_BLD, and {"dropped": the share of the pairs that found no place}.

    Cost: two arrays of capacity_factor * K * L numbers for each token, so memory grows with the
    square of the length; each product with one costs 2 * capacity_factor * K * L * D operations for
    a token.
    """
    wanted_BLE, taken_BLEC = find_places(routes, real_BL, capacity_factor)
    dispatch_BLEC = taken_BLEC.astype(x_BLD.dtype)
    combine_BLEC = dispatch_BLEC * routes.weights_BLE.astype(x_BLD.dtype)[..., None]
    x_EBCD = jnp.einsum("blec,bld->ebcd", dispatch_BLEC, x_BLD)
    y_EBCD = experts(x_EBCD, _each_its_own)
    y_BLD = jnp.einsum("blec,ebcd->bld", combine_BLEC, y_EBCD)
    # Not 1 - taken / wanted, which would be 6e-8 where nothing is dropped.
    num_dropped = (wanted_BLE & ~taken_BLEC.any(axis=-1)).sum(dtype=jnp.float32)
    num_wanted = wanted_BLE.sum(dtype=jnp.float32)
    return y_BLD, {"dropped": num_dropped / jnp.maximum(num_wanted, 1)}


def find_places(
    routes: Routes, real_BL: jax.Array | None, capacity_factor: float
) -> tuple[jax.Array, jax.Array]:
    """Return which experts each token wants, bool[B, L, E], and which places it takes of them.

    The places are bool[B, L, E, C], at most one True for each token and expert.
    """
    length, num_experts = routes.logits_BLE.shape[1:]
    top_k = routes.experts_BLK.shape[-1]
    num_places = math.ceil(min(length, capacity_factor * top_k * length / num_experts))
    wanted_BLE = routes.chosen_BLKE.any(axis=2)
    if real_BL is not None:
        wanted_BLE &= (real_BL != 0)[..., None]
    place_BLE = jnp.cumsum(wanted_BLE, axis=1, dtype=jnp.int32) - 1
    at_BLEC = place_BLE[..., None] == jnp.arange(num_places)
    return wanted_BLE, wanted_BLE[..., None] & at_BLEC


def by_sorting(
    x_BLD: jax.Array, experts: Experts, routes: Routes, real_BL: jax.Array | None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sort the pairs by expert and give each expert its run of them: `jax.lax.ragged_dot`.

    Nothing is dropped, and no expert computes for a token that did not choose it where the backend
    has a kernel for ragged products. XLA's CPU backend has none and lets every expert compute all
    pairs.
    """
    del real_BL  # Nothing is scarce here: padding takes nothing from other tokens.
    batch, length, top_k = routes.experts_BLK.shape
    experts_P = routes.experts_BLK.reshape(-1)
    order_P = jnp.argsort(experts_P, stable=True)
    sizes_E = routes.chosen_BLKE.sum(axis=(0, 1, 2), dtype=jnp.int32)
    # Each token K times, and then a permutation: its backward adds nothing up in a random order.
    x_PD = jnp.repeat(x_BLD.reshape(batch * length, -1), top_k, axis=0)[order_P]
    y_PD = experts(x_PD, lambda x, kernel: jax.lax.ragged_dot(x, kernel, sizes_E))
    y_BLKD = y_PD[jnp.argsort(order_P)].reshape(batch, length, top_k, -1)
    return jnp.einsum("blkd,blk->bld", y_BLKD, routes.weights_BLK.astype(y_BLKD.dtype)), {}


def by_all(
    x_BLD: jax.Array, experts: Experts, routes: Routes, real_BL: jax.Array | None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Let every expert compute every token: E / K times the work. It is the reference."""
    del real_BL
    x_EBLD = jnp.broadcast_to(x_BLD, (routes.logits_BLE.shape[-1], *x_BLD.shape))
    y_EBLD = experts(x_EBLD, _each_its_own)
    return jnp.einsum("ebld,ble->bld", y_EBLD, routes.weights_BLE.astype(y_EBLD.dtype)), {}


def _each_its_own(x_EBCI: jax.Array, kernel_EIO: jax.Array) -> jax.Array:
    """Multiply the inputs of each expert with its kernel."""
    return jnp.einsum("ebci,eio->ebco", x_EBCI, kernel_EIO)


def check_experts(experts: int, top_k: int) -> None:
    """Check the numbers of experts, of the model and of a token.

    Raises:
      ValueError: `top_k` is not from 1 to `experts`.
    """
    if not 1 <= top_k <= experts:
        raise ValueError(
            f"top_k={top_k}, experts={experts}: a token takes from 1 to {experts} experts; "
            "lower top_k or raise experts"
        )
