"""DeepSpeed's optimizers and schedulers give DeepSpeed's numbers.

The references are its formulas in plain Python and NumPy, in float64; each names its file.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation  # noqa: F401

from zeroxla import ZeroConfig
from zeroxla.config.deepspeed import read

pytestmark = pytest.mark.usefixtures("quick_compilation")

# schedulers: deepspeed/runtime/lr_schedules.py, as a loop over its iterations


def deepspeed_gamma(params, i):
    steps = max(2, params.get("warmup_num_steps", 1000))
    if i < steps:
        if params.get("warmup_type", "log") == "log":
            return math.log(i + 1) / math.log(steps)
        return i / steps
    return None


def deepspeed_warmup(params, i, own):
    low, high = params.get("warmup_min_lr", 0.0), params.get("warmup_max_lr", own)
    gamma = deepspeed_gamma(params, i) if i >= 0 else 0.0
    return low + (high - low) * (1.0 if gamma is None else gamma)


def deepspeed_warmup_decay(params, i, own):
    low, high = params.get("warmup_min_lr", 0.0), params.get("warmup_max_lr", 0.001)
    gamma = deepspeed_gamma(params, i) if i >= 0 else 0.0
    if gamma is None:
        total, steps = params["total_num_steps"], max(2, params.get("warmup_num_steps", 1000))
        gamma = max(0.0, (total - i) / max(1.0, total - steps))
    return low + (high - low) * gamma


def deepspeed_warmup_cosine(params, i, own):
    if i < 0:
        return 0.0
    gamma = deepspeed_gamma(params, i)
    if gamma is not None:
        start = params.get("warmup_min_ratio", 0.0)
        return own * (start + gamma * (1 - start))
    steps = max(2, params.get("warmup_num_steps", 1000))
    along = min(1.0, (i - steps + 1) / max(1, params["total_num_steps"] - steps))
    end = params.get("cos_min_ratio", 0.0001)
    return own * max(0.0, end + (1 - end) * (1 + math.cos(math.pi * along)) / 2)


def deepspeed_scale(params, i):
    first = float(params.get("cycle_first_step_size", 2000))
    second = float(params.get("cycle_second_step_size", first))
    total, batch = first + second, i + 1
    x = 1.0 + batch / total - math.floor(1 + batch / total)
    ratio = first / total
    rising = x <= ratio
    scale = x / ratio if rising else (x - 1) / (ratio - 1)
    stairs = params.get("cycle_first_stair_count", 0)
    stairs = stairs if rising else params.get("cycle_second_stair_count", stairs)
    if stairs:
        place = batch % total
        place = place / first if place <= first else (total - place) / second
        scale = math.floor(place * stairs + 1e-9) / stairs
    return scale, total


def deepspeed_one_cycle(params, i, own):
    low, high = params["cycle_min_lr"], params["cycle_max_lr"]
    if i < 0:
        return low
    scale, total = deepspeed_scale(params, i)
    if i < total:
        return low + (high - low) * scale
    interval, rate = params.get("decay_step_size", 0), params.get("decay_lr_rate", 0.0)
    return low / (1 + rate * (i - total + 1) / interval) if interval and rate else low


def deepspeed_one_cycle_momentum(params, i):
    low, high = params.get("cycle_min_mom", 0.8), params.get("cycle_max_mom", 0.9)
    if i < 0:
        return low
    scale, total = deepspeed_scale(params, i)
    if i < total:
        return high - (high - low) * scale
    interval, rate = params.get("decay_step_size", 0), params.get("decay_mom_rate", 0.0)
    return high * (1 + rate * (i - total + 1) / interval) if interval and rate else high


def deepspeed_range_test(params, i, own):
    interval = (i + 1) / params.get("lr_range_test_step_size", 2000)
    if params.get("lr_range_test_staircase"):
        interval = math.floor(interval)
    low = params.get("lr_range_test_min_lr", 1e-3)
    return low * (1 + params.get("lr_range_test_step_rate", 1.0) * interval)


CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4}
SCHEDULERS = [
    ("WarmupLR", {}, deepspeed_warmup),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_max_lr": 0.3}, deepspeed_warmup),
    (
        "WarmupLR",
        {"warmup_min_lr": 1e-4, "warmup_max_lr": 0.1, "warmup_num_steps": 5},
        deepspeed_warmup,
    ),
    (
        "WarmupLR",
        {"warmup_min_lr": 1e-4, "warmup_num_steps": 5, "warmup_type": "linear"},
        deepspeed_warmup,
    ),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 4}, deepspeed_warmup_decay),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 9,
            "warmup_num_steps": 4,
            "warmup_min_lr": 1e-3,
            "warmup_max_lr": 0.1,
            "warmup_type": "linear",
        },
        deepspeed_warmup_decay,
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 9, "warmup_num_steps": 4, "warmup_min_ratio": 0.1},
        deepspeed_warmup_cosine,
    ),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 10,
            "warmup_num_steps": 3,
            "cos_min_ratio": 0.2,
            "warmup_type": "linear",
        },
        deepspeed_warmup_cosine,
    ),
    ("OneCycle", CYCLE, deepspeed_one_cycle),
    (
        "OneCycle",
        {**CYCLE, "cycle_second_step_size": 3, "decay_step_size": 2, "decay_lr_rate": 0.5},
        deepspeed_one_cycle,
    ),
    (
        "OneCycle",
        {
            **CYCLE,
            "cycle_second_step_size": 6,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 2,
        },
        deepspeed_one_cycle,
    ),
    ("OneCycle", {**CYCLE, "cycle_second_step_size": 0}, deepspeed_one_cycle),
    ("LRRangeTest", {}, deepspeed_range_test),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 1e-4,
            "lr_range_test_step_size": 3,
            "lr_range_test_step_rate": 5,
            "lr_range_test_staircase": True,
        },
        deepspeed_range_test,
    ),
]


def used_rates(optimizer, names, steps):
    """Return hyperparameters that each of some updates uses."""
    p = {"w": jnp.ones(2)}
    state, found = optimizer.init(p), []
    update = jax.jit(optimizer.update)
    for _ in range(steps):
        _, state = update(p, state, p)
        found.append([float(state.hyperparams[name]) for name in names])
    return np.array(found).T


@pytest.mark.parametrize(("name", "params", "formula"), SCHEDULERS)
def test_schedulers(name, params, formula):
    """The update with count k uses DeepSpeed's iteration k - 1."""
    written = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.02}},
        "scheduler": {"type": name, "params": {**params}},
    }
    if name == "OneCycle":
        written["scheduler"]["params"]["cycle_momentum"] = False
    [rates] = used_rates(ZeroConfig(**read(written).options).optimizer, ["learning_rate"], 14)
    expected = [formula(params, k - 1, 0.02) for k in range(14)]
    np.testing.assert_allclose(rates, expected, rtol=2e-6, atol=1e-9)
    assert len(set(expected)) > 1


def test_one_cycle_cycles_the_first_beta():
    params = {
        **CYCLE,
        "cycle_second_step_size": 3,
        "cycle_min_mom": 0.7,
        "cycle_max_mom": 0.95,
        "decay_step_size": 4,
        "decay_mom_rate": 0.01,
    }
    written = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "OneCycle", "params": params}}
    optimizer = ZeroConfig(**read(written).options).optimizer
    [betas] = used_rates(optimizer, ["b1"], 12)
    expected = [deepspeed_one_cycle_momentum(params, k - 1) for k in range(12)]
    np.testing.assert_allclose(betas, expected, rtol=2e-6)
    # The second beta is 0.99 then, and neither is Adam's own: one step of the formula says so.
    rates = [deepspeed_one_cycle(params, k - 1, 0) for k in range(4)]
    found = steps_of(optimizer, 4)
    np.testing.assert_allclose(found, numpy_adam(rates, expected, 0.99, 1e-8, 0.0), rtol=1e-4)


# optimizers: NumPy, float64


def leaf():
    return np.random.default_rng(0).normal(size=(4, 3))


def gradients(steps):
    random = np.random.default_rng(1)
    return [random.normal(size=(4, 3)) * 10.0 ** random.integers(-3, 1) for _ in range(steps)]


def steps_of(optimizer, steps, name="w"):
    """Return the leaf after some updates."""
    p = {name: jnp.asarray(leaf(), jnp.float32)}
    state, update = optimizer.init(p), jax.jit(optimizer.update)
    for g in gradients(steps):
        updates, state = update({name: jnp.asarray(g, jnp.float32)}, state, p)
        p = optax.apply_updates(p, updates)
    return np.asarray(p[name])


def numpy_adam(rates, b1s, b2, eps, decay, *, decoupled=True, correct=True, clip=None):
    """ops/adam/fused_adam.py and csrc/adam/multi_tensor_adam.cu."""
    p, m, v = leaf(), 0.0, 0.0
    for t, (rate, b1, g) in enumerate(zip(rates, b1s, gradients(len(rates))), 1):
        if clip is not None:
            g = g * min(1.0, clip / np.sqrt((g * g).sum()))
        g = g if decoupled else g + decay * p
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        c1, c2 = (1 - b1**t, 1 - b2**t) if correct else (1.0, 1.0)
        update = m / c1 / (np.sqrt(v / c2) + eps)
        p = p - rate * (update + (decay * p if decoupled else 0))
    return p


def constant_adam(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **options):
    return numpy_adam([lr] * 5, [betas[0]] * 5, betas[1], eps, weight_decay, **options)


def numpy_lamb(
    lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, max_coeff=10.0, min_coeff=0.01,
    eps_inside_sqrt=False, bias_correction=True,
):  # fmt: skip
    """csrc/lamb/fused_lamb_cuda_kernel.cu."""
    p, m, v = leaf(), 0.0, 0.0
    for t, g in enumerate(gradients(5), 1):
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        root = np.sqrt(v + eps) if eps_inside_sqrt else np.sqrt(v) + eps
        update = m / root + weight_decay * p
        ratio = np.sqrt((p * p).sum()) / np.sqrt((update * update).sum())
        rate = lr * (math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t) if bias_correction else 1)
        p = p - rate * min(max(ratio, min_coeff), max_coeff) * update
    return p


def numpy_lion(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0):
    """csrc/lion/multi_tensor_lion.cu."""
    p, m = leaf(), 0.0
    for g in gradients(5):
        c = betas[0] * m + (1 - betas[0]) * g
        p = p * (1 - lr * weight_decay) + np.where(c > 0, -lr, lr)
        m = betas[1] * m + (1 - betas[1]) * g
    return p


def numpy_adagrad(
    lr=1e-2, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10
):
    """torch.optim.Adagrad."""
    p, total = leaf(), initial_accumulator_value
    for t, g in enumerate(gradients(5)):
        g = g + weight_decay * p
        total = total + g * g
        p = p - lr / (1 + t * lr_decay) * g / (np.sqrt(total) + eps)
    return p


def numpy_sgd(lr=1e-3, momentum=0.0, weight_decay=0.0, nesterov=False):
    """torch.optim.SGD."""
    p, trace = leaf(), 0.0
    for g in gradients(5):
        g = g + weight_decay * p
        trace = momentum * trace + g
        p = p - lr * (g + momentum * trace if nesterov else trace)
    return p


ALL = {"lr": 0.03, "weight_decay": 0.1}
BETAS = {"betas": [0.8, 0.95], "eps": 1e-3}
COUPLED = {"decoupled": False}
OPTIMIZERS = [
    ("Adam", {}, constant_adam()),
    ("adam", {**ALL, **BETAS}, constant_adam(**ALL, **BETAS)),
    ("Adam", {**ALL, "adam_w_mode": False}, constant_adam(**ALL, **COUPLED)),
    ("Adam", {**ALL, "bias_correction": False}, constant_adam(**ALL, correct=False)),
    ("Adam", {"lr": 0.03, "torch_adam": True}, constant_adam(lr=0.03, weight_decay=0.01)),
    ("AdamW", {**ALL, "adam_w_mode": False}, constant_adam(**ALL)),
    ("Lamb", {}, numpy_lamb()),
    ("Lamb", {**ALL, **BETAS}, numpy_lamb(**ALL, **BETAS)),
    ("Lamb", {**ALL, "max_coeff": 0.2}, numpy_lamb(**ALL, max_coeff=0.2)),
    ("Lamb", {**ALL, "min_coeff": 3.0}, numpy_lamb(**ALL, min_coeff=3.0)),
    (
        "Lamb",
        {**ALL, "eps": 0.01, "eps_inside_sqrt": True, "bias_correction": False},
        numpy_lamb(**ALL, eps=0.01, eps_inside_sqrt=True, bias_correction=False),
    ),
    ("Lion", {}, numpy_lion()),
    ("Lion", {**ALL, "betas": [0.7, 0.9]}, numpy_lion(**ALL, betas=(0.7, 0.9))),
    ("Adagrad", {}, numpy_adagrad()),
    (
        "Adagrad",
        {**ALL, "lr_decay": 0.5, "initial_accumulator_value": 0.1, "eps": 0.1},
        numpy_adagrad(**ALL, lr_decay=0.5, initial_accumulator_value=0.1, eps=0.1),
    ),
    ("SGD", {}, numpy_sgd()),
    ("SGD", {**ALL, "momentum": 0.9}, numpy_sgd(**ALL, momentum=0.9)),
    (
        "SGD",
        {**ALL, "momentum": 0.9, "nesterov": True},
        numpy_sgd(**ALL, momentum=0.9, nesterov=True),
    ),
    # Leaves that are no hidden matrices: MuonWithAuxAdam's AdamW.
    (
        "Muon",
        {"adam_lr": 0.02, "muon_lr": 9.0, "weight_decay": 0.1},
        constant_adam(lr=0.02, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1),
    ),
]


@pytest.mark.parametrize(("name", "params", "expected"), OPTIMIZERS)
def test_optimizers(name, params, expected):
    settings = read({"optimizer": {"type": name, "params": params}})
    assert settings.ignored == {}
    leaf_name = "embed" if name == "Muon" else "w"
    found = steps_of(ZeroConfig(**settings.options).optimizer, 5, leaf_name)
    np.testing.assert_allclose(found - leaf(), expected - leaf(), rtol=1e-3, atol=1e-6)


def test_clipping():
    """The first gradients are above the norm, some of the others below."""
    norms = [np.sqrt((g * g).sum()) for g in gradients(5)]
    assert min(norms) < 0.5 < max(norms)
    written = {"gradient_clipping": 0.5, "optimizer": {"type": "SGD", "params": {"lr": 1}}}
    expected = leaf() - sum(g * min(1, 0.5 / n) for g, n in zip(gradients(5), norms))
    found = steps_of(ZeroConfig(**read(written).options).optimizer, 5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_muon_orthogonalizes_hidden_matrices():
    """runtime/zero/muon/original_muon.py: the first update has a flat spectrum, times the rate and
    the root of its sides' ratio."""
    params = {"muon_lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}
    optimizer = ZeroConfig(
        **read({"optimizer": {"type": "Muon", "params": params}}).options
    ).optimizer
    update = steps_of(optimizer, 1) - leaf() * (1 - 0.1 * 0.2)
    spectrum = np.linalg.svd(update, compute_uv=False) / 0.1
    u, _, vt = np.linalg.svd(gradients(1)[0], full_matrices=False)
    assert np.all((spectrum > 0.6) & (spectrum < 1.3))
    cosine = -(update * (u @ vt)).sum() / np.linalg.norm(update) / np.sqrt(3)
    assert cosine > 0.97
    for name in ("lm_head", "embedding"):  # Adam's first update: the sign, times its own rate
        found = steps_of(optimizer, 1, name) - leaf() * (1 - 3e-4 * 0.2)
        np.testing.assert_allclose(found, -3e-4 * np.sign(gradients(1)[0]), rtol=2e-3)


@pytest.mark.parametrize(
    "written", [{"gradient_clipping": 1.0}, {"scheduler": {"type": "WarmupLR"}}], ids=str
)
def test_without_an_optimizer_it_is_that_of_make_step(written):
    """Also with a scheduler: WarmupLR rises to the optimizer's own rate, 3e-4."""
    if "gradient_clipping" in written:
        written = {"gradient_clipping": 1e9}
        optimizer = ZeroConfig(**read(written).options).optimizer
        expected = steps_of(optax.adamw(3e-4), 5)
        np.testing.assert_allclose(steps_of(optimizer, 5), expected, rtol=1e-6)
    else:
        optimizer = ZeroConfig(**read(written).options).optimizer
        rates = [deepspeed_warmup({}, k - 1, 3e-4) for k in range(5)]
        [found] = used_rates(optimizer, ["learning_rate"], 5)
        np.testing.assert_allclose(found, rates, rtol=1e-6)
