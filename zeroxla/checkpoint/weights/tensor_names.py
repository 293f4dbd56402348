"""Maps leaves to the tensors of a file: names, layers, transposition.

A model's format is data in its class's attribute `hugging_face` (see `models/format.py`). A leaf of
a scan holds a tensor for each layer; any other leaf is one tensor.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.program.paths import Path, paths_of

if TYPE_CHECKING:
    from zeroxla.models.format import Format

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """The rows of a tensor that belong to one of several leaves: the indices of its dim of outputs.

    There are `groups` times the rows of all its leaves, in their order.

    Attributes:
      groups: how often the rows begin anew with the first leaf.
      sizes: the number of rows of each leaf in a group.
      index: which leaf this is.
    """

    groups: int
    sizes: tuple[int, ...]
    index: int

    @property
    def num_rows(self) -> int:
        """The number of rows of the tensor."""
        return self.groups * sum(self.sizes)

    def covering(self, rows: slice) -> slice:
        """Return the rows of the tensor to read for some rows of the leaf."""
        first, size, step = sum(self.sizes[: self.index]), self.sizes[self.index], sum(self.sizes)
        if self.groups == 1:
            return slice(first + rows.start, first + rows.stop)
        return slice(rows.start // size * step, -(-rows.stop // size) * step)

    def of_covering(self, values: np.ndarray, rows: slice) -> np.ndarray:
        """Return some rows of the leaf from the rows of the tensor that cover them, as dim 0."""
        if self.groups == 1:
            return values
        first, size, step = sum(self.sizes[: self.index]), self.sizes[self.index], sum(self.sizes)
        inner = values.shape[1:]
        own = values.reshape(-1, step, *inner)[:, first : first + size].reshape(-1, *inner)
        skipped = rows.start // size * size
        return own[rows.start - skipped : rows.stop - skipped]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NamedLeaf:
    """A leaf and its tensors in a file.

    Attributes:
      path: the leaf's keys, such as ("h", "attn", "c_attn", "kernel").
      shape: the natural shape.
      tensors: the names of its tensors: one for each index of the leading dims `stack`, the last of
        which runs fastest.
      stack: the leading dims that count tensors: layers, experts; () if the leaf is one tensor.
      is_transposed: whether a tensor has the last two dims of its part of the leaf the other way.
      part: the rows of the tensors that are the leaf's; None if the tensors are its own.
    """

    path: Path
    shape: Shape
    tensors: tuple[str, ...]
    stack: Shape = ()
    is_transposed: bool = False
    part: TensorPart | None = None

    @property
    def name(self) -> str:
        return "/".join(self.path)

    @property
    def rows_dim(self) -> int:
        """The dim of a tensor that counts outputs."""
        return -2 if self.is_transposed else -1

    @property
    def tensor_shape(self) -> Shape:
        shape = list(self.oriented(self.shape[len(self.stack) :]))
        if self.part is not None:
            shape[self.rows_dim] = self.part.num_rows
        return tuple(shape)

    def oriented(self, of_dims: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what belongs to the dims of a layer of the leaf in the order of a tensor's."""
        if not self.is_transposed:
            return of_dims
        return (*of_dims[:-2], of_dims[-1], of_dims[-2])


def flat_leaves(shapes: Mapping[Path, Shape]) -> list[NamedLeaf]:
    """Return the leaves of any model, each a tensor "a.b.c".

    Raises:
      ValueError: two leaves would have the same name, as in {"a": {"b": x}, "a.b": y}.
    """
    seen: dict[str, Path] = {}
    for path in shapes:
        other = seen.setdefault(".".join(path), path)
        if other != path:
            raise ValueError(
                f"the leaves {'/'.join(other)} and {'/'.join(path)} would both be the tensor "
                f"{'.'.join(path)}; rename one of them in the model"
            )
    return [NamedLeaf(path=p, shape=shapes[p], tensors=(n,)) for n, p in seen.items()]


def format_leaves(shapes: Mapping[Path, Shape], format: Format, module: Any) -> list[NamedLeaf]:
    """Return the leaves of a model with a format.

    Args:
      shapes: the natural shapes of the leaves.
      format: the format.
      module: the abstract model.

    Raises:
      ValueError: the format knows no place for a leaf.
    """
    stacked = {path.replace(format.layer, format.stack): path for path in format.tensors}
    unrolled = {_pattern(path): path for path in format.tensors}

    def leaf(path: Path, shape: Shape) -> tuple[str, NamedLeaf]:
        name = "/".join(path)
        matches = ((pattern.fullmatch(name), line) for pattern, line in unrolled.items())
        match, line = next((pair for pair in matches if pair[0]), (None, stacked.get(name)))
        if line is None:
            raise ValueError(
                f"the leaf {name} {shape} has no place in {format.architecture}; name the model "
                "that these parameters are of"
            )
        tensor = format.tensors[line]
        stack = shape[:1] if match is None else ()
        tensors = [tensor.replace("{layer}", str(i)) for i in range(shape[0])] if stack else []
        if match is not None:
            tensors = [tensor.replace("{layer}", i) for i in match.groups() or ("",)]
        if "{expert}" in tensor:
            num = shape[len(stack)]
            tensors = [t.replace("{expert}", str(i)) for t in tensors for i in range(num)]
            stack = (*stack, num)
        return line, NamedLeaf(
            path=path,
            shape=shape,
            tensors=tuple(tensors),
            stack=stack,
            is_transposed=line in format.transposed,
        )

    return _with_parts([leaf(path, shape) for path, shape in shapes.items()], format, module)


def _with_parts(
    leaves: list[tuple[str, NamedLeaf]], format: Format, module: Any
) -> list[NamedLeaf]:
    """Return the leaves, those that share a tensor with their parts of it."""
    of_line = dict(leaves)
    found = []
    for line, leaf in leaves:
        fused = next((one for one in format.fused if line in one.leaves), None)
        if fused is not None and all(other in of_line for other in fused.leaves):
            groups = operator.attrgetter(fused.groups)(module) if fused.groups else 1
            rows = (of_line[other].tensor_shape[leaf.rows_dim] for other in fused.leaves)
            sizes = tuple(n // groups for n in rows)
            part = TensorPart(groups=groups, sizes=sizes, index=fused.leaves.index(line))
            leaf = dataclasses.replace(leaf, part=part)
        found.append(leaf)
    return found


def _pattern(path: str) -> re.Pattern[str]:
    """Return a pattern for an unrolled leaf's path, with the layer as a group."""
    return re.compile(r"(\d+)".join(map(re.escape, path.split("{layer}"))))


def abstract(model: Any) -> Any:
    """Return a linen or nnx module as it is, and the module of a function `rngs -> nnx module`
    without its arrays. Anything else (None, a pair) is returned unchanged.

    Raises:
      ValueError: the model is a class.
    """
    if isinstance(model, type):
        raise ValueError(f"model is the class {model.__name__}; give a model of it")
    if isinstance(model, nn.Module) or not callable(model):
        return model
    from flax import nnx  # here for the time that it takes to import

    if isinstance(model, nnx.Module):
        return model
    with nnx.use_eager_sharding(False):  # ignores annotations of other ways to parallelise
        return nnx.eval_shape(lambda: model(nnx.Rngs(0)))


def format_of(module: Any) -> Format | None:
    """Return the format of an abstract model, or of its class; None if it has none."""
    return getattr(module, "hugging_face", None)


def param_shapes(module: Any) -> dict[Path, Shape]:
    """Return the shapes that the parameters of an abstract model with a format have.

    A model with a format takes tokens: a linen module is called with int32[1, 1].
    """
    if not isinstance(module, nn.Module):
        from flax import nnx

        state = nnx.to_flat_state(nnx.state(module, nnx.Param, graph=True))
        return {tuple(map(str, path)): tuple(x.get_raw_value().shape) for path, x in state}
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]
    return shapes_of(params)


def shapes_of(params: Any) -> dict[Path, Shape]:
    """Return the shapes of a tree's arrays by path."""
    return {path: tuple(x.shape) for path, x in paths_of(params)}


def check_shapes(module: Any, shapes: Mapping[Path, Shape], what: str) -> None:
    """Check that parameters belong to an abstract model with a format.

    Args:
      module: the abstract model.
      shapes: the parameters' natural shapes.
      what: the owner of the parameters, for the message.

    Raises:
      ValueError: a parameter is missing, unknown, or has another shape.
    """
    expected = param_shapes(module)
    differing = [p for p in (*expected, *shapes) if expected.get(p) != shapes.get(p)]
    if differing:
        path = differing[0]
        raise ValueError(
            f"{what} is of another model than the {type(module).__name__} that is given: its leaf "
            f"{'/'.join(path)} is {shapes.get(path, 'missing')}, and that of the model is "
            f"{expected.get(path, 'missing')}; give the same model, scan included"
        )
