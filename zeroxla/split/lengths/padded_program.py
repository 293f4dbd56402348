"""Programs whose sequences are padded to lengths that an axis divides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from zeroxla.program.trace import Program, trace
from zeroxla.split.lengths.known_lengths import KnownLengths
from zeroxla.split.lengths.padded import Padded
from zeroxla.split.lengths.runner import PaddedRunner


def with_padded_lengths(
    program: Program, num_leaves: int, batch: slice, divisor: int, multiples: Sequence[int]
) -> tuple[Program, dict[int, int]]:
    """Return a program that computes the same with sequences whose length an axis divides.

    Dims of a batch, all but the first, are sequences if they are long enough. A sequence is padded
    if a product has a result along it. Slices, paddings and concatenations that shift a sequence
    are replaced by equations that keep its length.

    Args:
      program: the program; its first inputs are leaves.
      num_leaves: their number.
      batch: where the inputs are that are the batch.
      divisor: what must divide a length.
      multiples: others are padded to a multiple of the first that adds little.

    Returns:
      The program, the same one if nothing in it changes; and by their size, to how many elements
      sequences are padded along which products are split.
    """
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.inputs]
    among = range(len(shapes))[batch]

    def function(known: KnownLengths) -> Callable[..., list[jax.Array]]:
        def run(*args: jax.Array) -> list[jax.Array]:
            ins = [Padded.plain(x, is_computed=i >= num_leaves) for i, x in enumerate(args)]
            for i in among:
                for d, n in enumerate(shapes[i].shape[1:], 1):
                    if known.is_long(n):
                        ins[i] = ins[i].as_dim(d, (known.of(n),))
            found = PaddedRunner(program, known)(ins)
            return [jax.numpy.asarray(x.unpadded().array) for x in found]

        return run

    first = KnownLengths(divisor=divisor, multiples=(*multiples, divisor))
    jax.eval_shape(function(first), *shapes)
    if not first.used and not first.moves:
        return program, {}
    known = KnownLengths(divisor=divisor, multiples=(*multiples, divisor), wanted=first.used)
    found, _ = trace(function(known), *shapes)
    return found, {size: known.made[size].held for size in sorted(first.used)}
