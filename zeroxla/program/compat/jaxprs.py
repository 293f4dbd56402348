"""Jaxprs and their equations, as the supported versions of JAX have them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import jax
import jax.extend.core as jex
from jax._src import ad_checkpoint, config, core, source_info_util
from jax._src.compute_on import extend_compute_type
from jax._src.interpreters import ad, partial_eval

from zeroxla.program.primitives import CALLS, CUSTOM_RULES, REMATS

_PACKAGE = PurePath(__file__).parents[2]
_LIBRARIES = {"flax", "haiku", "equinox", "optax"}


def is_jaxpr(value: Any) -> bool:
    """Return whether a parameter of an equation is a jaxpr, open or closed."""
    return isinstance(value, jex.Jaxpr | jex.ClosedJaxpr)  # pyright: ignore[reportPrivateImportUsage]


def settings_of(eqn: Any) -> tuple[Any, ...]:
    """Return what of an equation's context changes what it computes, or where."""
    context = eqn.ctx
    names = ("compute_type", "threefry_partitionable", "cur_abstract_mesh", "xla_metadata")
    return tuple(str(getattr(context, name, None)) for name in names)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Return (jaxpr with `invars`, `constvars`, `eqns`, `outvars`; values of the constvars).

    In JAX 0.10 an equation's jaxpr is either closed (a pair of jaxpr and constants) or open. Since
    0.11 there is one class, which may carry its own constants.
    """
    if isinstance(jaxpr, jex.ClosedJaxpr):  # pyright: ignore[reportPrivateImportUsage]
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        return inner, tuple(jaxpr.consts)
    return jaxpr, tuple(getattr(jaxpr, "consts", None) or ())


def without_dead_code(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Open a closed jaxpr and drop the equations that no output needs, also in loop and remat
    bodies. Flax's nnx transforms leave such ones: they return every parameter that they are given.
    """
    jaxpr, consts = open_jaxpr(jaxpr)
    used = [True] * len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(jaxpr, used, instantiate=True)[0], consts


def inlined_jaxpr(eqn: Any) -> Any | None:
    """Return the body of a call, such as `jit`; None for every other equation."""
    return _body(eqn.params) if eqn.primitive.name in CALLS else None


def forward_jaxpr(eqn: Any) -> Any | None:
    """Return the body of an equation that runs it once in forward; None for every other equation.

    These are calls, custom rules and `jax.checkpoint`. A program with them inlined computes the
    same, but its derivative does not use the rules.
    """
    once = eqn.primitive.name in CALLS | CUSTOM_RULES | REMATS
    return _body(eqn.params) if once else None


def backward_jaxpr(eqn: Any) -> Any | None:
    """Return the same for an equation of a backward, in which custom rules have been applied.

    What a `jax.checkpoint` body computes again is kept from being merged with what was computed
    before, as by JAX.
    """
    body, params = forward_jaxpr(eqn), eqn.params
    again = eqn.primitive.name in REMATS and params["differentiated"] and params["prevent_cse"]
    if not again:
        return body
    jaxpr, consts = open_jaxpr(body)
    closed = jex.ClosedJaxpr(jaxpr, list(consts))  # pyright: ignore[reportPrivateImportUsage]
    run = jex.jaxpr_as_fun(closed)
    avals = [v.aval for v in jaxpr.invars]
    return jax.make_jaxpr(lambda *args: run(*jax.lax.optimization_barrier(args)))(*avals)


def custom_rule_name(eqn: Any) -> str | None:
    """Return the name of the function that an equation with a derivative of its own calls; None for
    every other equation."""
    if eqn.primitive.name not in CUSTOM_RULES:
        return None
    jaxpr, _ = open_jaxpr(_body(eqn.params))
    return jaxpr.debug_info.func_name


def custom_rule_constants(eqn: Any) -> int:
    """Return how many operands of an equation with a derivative of its own come before its
    arguments: the values that its function closes over. JAX refuses to differentiate by them."""
    return eqn.params["num_consts"] if eqn.primitive.name in CUSTOM_RULES else 0


def closing_rules(eqn: Any) -> Iterator[Any]:
    """Yield the equations with a derivative of their own and values that they close over: this one,
    and those in the programs that it runs."""
    if custom_rule_constants(eqn):
        yield eqn
    for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=is_jaxpr):
        if is_jaxpr(value):
            for inner in open_jaxpr(value)[0].eqns:
                yield from closing_rules(inner)


def rule_and_line(eqn: Any) -> str:
    """Return the name of the function that an equation with a derivative of its own calls, and its
    line."""
    return f"{custom_rule_name(eqn)} ({model_line(eqn) or source_line(eqn)})"


def _body(params: dict[str, Any]) -> Any:
    return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]


def as_remat(eqn: Any) -> Any:
    """Return an equation with `jax.checkpoint` in the form that it has by default.

    With the option `jax_remat3` it is a call of an object that holds the body.
    """
    called = eqn.params.get("_prim")
    if type(called).__name__ != "RematTraced":
        return eqn
    jaxpr = open_jaxpr(called.params["jaxpr"])[0]
    prevent_cse = called.params.get("prevent_cse", True)
    params = {
        "jaxpr": jaxpr,
        "prevent_cse": prevent_cse,
        "differentiated": False,
        "policy": called.params["policy"],
    }
    return eqn.replace(primitive=ad_checkpoint.remat_p, params=params)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return (number of constants, number of carries) of a `scan` equation.

    JAX 0.10 has them as parameters; since 0.11 they follow from the tree of its operands.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def has_effects(eqn: Any) -> bool:
    """Return whether an equation does more than compute. Naming mesh axes does not count."""
    return any(not isinstance(effect, core.NamedAxisEffect) for effect in eqn.effects)


def branches_for(params: dict[str, Any], platform: str) -> Sequence[Any]:
    """Return the branches of a `cond` equation that a platform may take.

    These are all branches. If `jax.lax.platform_dependent` made the equation, it is the platform's
    own branch alone.
    """
    branches, platforms = params["branches"], params.get("branches_platforms")
    if platforms is None:
        return branches
    name = {"gpu": "cuda"}.get(platform, platform)
    return [
        next(b for b, names in zip(branches, platforms, strict=True) if not names or name in names)
    ]


def is_by_platform(params: dict[str, Any]) -> bool:
    """Return whether `jax.lax.platform_dependent` made a `cond` equation of such parameters."""
    return params.get("branches_platforms") is not None


def call_equation(eqn: Any, name_stack: Any, args: Sequence[Any]) -> list[Any]:
    """Bind an equation to `args` in its own context and under `name_stack`; return its results.

    Raises:
      ValueError: a function with a derivative of its own closes over an array that a gradient
        reaches.
    """
    with context_of(eqn, name_stack):
        try:
            out = eqn.primitive.bind(*args, **bind_params(eqn.primitive, eqn.params))
        except ad.CustomVJPException as error:
            raise ValueError(
                f"the function {', '.join(map(rule_and_line, closing_rules(eqn)))} has a derivative"
                " of its own (custom_vjp), and closes over an array that a gradient reaches, of "
                "which its rule knows nothing; give it that array as an argument"
            ) from error
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_params(primitive: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for binding an equation's primitive again.

    Raises:
      NotImplementedError: JAX is older than 0.10.
    """
    bound = primitive.get_bind_params(params)
    if isinstance(bound, tuple):  # JAX before 0.10 returned (subfuns, params)
        raise NotImplementedError(
            f"JAX {jax.__version__} is older than 0.10.2, the oldest supported version; upgrade jax"
        )
    return bound


def name_stack_of(eqn: Any) -> Any:
    """Return the `jax.named_scope` path of an equation."""
    return eqn.source_info.name_stack


def source_line(eqn: Any) -> str:
    """Return the file and the line of the user's code that an equation comes from; empty if they
    are not known."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return "" if frame is None else f"{frame.file_name}:{frame.start_line}"


def model_line(eqn: Any) -> str:
    """Return the file and the line of the model that an equation comes from, as
    "folder/file.py:line"; empty if they are not known.

    Frames of the libraries that models are written with are passed over: Flax, Haiku, Equinox,
    optax, and zeroxla itself without its models.
    """
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        if name := _model_file(frame.file_name):
            return f"{name}:{frame.start_line}"
    return ""


@functools.cache
def _model_file(file_name: str) -> str:
    """Return "folder/file.py" for a file of a model; empty for one of a library."""
    path = PurePath(file_name)
    inside = set(path.parts[:-1])
    if inside & _LIBRARIES or (_PACKAGE in path.parents and "models" not in inside):
        return ""
    return f"{path.parent.name}/{path.name}"


@contextlib.contextmanager
def context_of(eqn: Any, name_stack: Any) -> Iterator[None]:
    """Return a context in which a primitive is bound with an equation's scopes and settings.

    An equation that does not say where it computes does so where the surrounding program does.
    """
    stack = source_info_util.current_name_stack() + name_stack
    user = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
    computes = config.compute_on_context_manager.value
    with user, eqn.ctx.manager, extend_compute_type(eqn.ctx.compute_type or computes):
        yield


def array_type(shape: Sequence[int], dtype: Any) -> Any:
    """Return the abstract value (`aval`) of an array."""
    return jax.core.ShapedArray(tuple(shape), dtype)  # pyright: ignore[reportAttributeAccessIssue]
