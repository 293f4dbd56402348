"""Runs the code of a kernel for NVIDIA GPUs in NumPy: every thread of every block at once.

The code is PTX, which the compiler writes before it turns it into a GPU's own instructions. It must
be straight, without branches, and no thread may read what another one writes. So it is with the
kernels of quantization: they have no loops, and threads exchange numbers by shuffles only.

    memory = [x, wires]                      # uint8 arrays, the kernel's arguments in their order
    run(parse(text), memory, grid=(4, 1))    # writes into `wires`
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

THREADS, LANES = 128, 32
SECTOR = 32  # bytes, which the memory of a GPU writes at once
_APART = 1 << 40  # the address of an argument, times its number
_NAN = np.uint32(0x7FFFFFFF)


class Instruction(NamedTuple):
    """`name` of "add.rn.f32" is ["add", "rn", "f32"]."""

    name: list[str]
    operands: list[str]


def parse(text: str) -> list[Instruction]:
    """Return the instructions of the one kernel in a PTX file."""
    body = text[text.index("{", text.index(".entry")) :]
    body = re.sub(r"//[^\n]*", "", body)
    found = []
    for line in re.split(r"[;\n]", body):
        line = line.strip()
        if not line or line[0] in "{}.$":
            continue
        assert line[0] != "@", f"a branch, or an instruction of some threads only: {line}"
        name, _, rest = line.partition(" ") if " " in line else line.partition("\t")
        name = name.strip()
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        found.append(Instruction(name.split("."), operands))
    return found


def run(
    program: list[Instruction], memory: list[np.ndarray], grid: tuple[int, int], *, fuse: bool
) -> int:
    """Run a kernel, which writes into its arguments.

    Args:
      program: its instructions.
      memory: its arguments, uint8 each.
      grid: the number of blocks in x and y.
      fuse: whether a product and the sum after it are rounded once where the code allows it, as the
        next compiler decides for itself.

    Returns:
      How many sectors of 32 bytes a store of a warp left half filled, over all stores.
    """
    machine = _Machine(memory, grid, fuse)
    machine.run(program)
    return machine.half_filled


class _Machine:
    """The registers of all threads, and the memory that they share."""

    def __init__(self, memory: list[np.ndarray], grid: tuple[int, int], fuse: bool):
        self._memory = memory
        self._num = grid[0] * grid[1] * THREADS
        self._registers: dict[str, np.ndarray] = {}
        self._products: dict[str, tuple[np.ndarray, np.ndarray]] | None = {} if fuse else None
        block, thread = np.divmod(np.arange(self._num, dtype=np.uint32), np.uint32(THREADS))
        self.half_filled = 0
        self._registers["%tid.x"] = thread
        self._registers["%ctaid.x"] = block % np.uint32(grid[0])
        self._registers["%ctaid.y"] = block // np.uint32(grid[0])

    def run(self, program: list[Instruction]) -> None:
        with np.errstate(all="ignore"):
            for instruction in program:
                getattr(self, f"_{instruction.name[0]}")(instruction.name, instruction.operands)

    # Operands. Registers of 32 and 64 bits hold unsigned integers, whatever they mean.

    def _get(self, operand: str, dtype: Any = np.uint32) -> np.ndarray:
        if operand.startswith("%rs") and operand not in self._registers:
            # Nothing set it: it fills up a word whose other half is used.
            value = np.full(self._num, 0x5A5A, np.uint16)
        elif operand.startswith("%"):
            value = self._registers[operand]
        elif operand[:2] in ("0f", "0F"):
            value = np.full(self._num, int(operand[2:], 16), np.uint32)
        else:
            number = int(operand.rstrip("U"), 0)
            value = np.full(self._num, number & (2**64 - 1), np.uint64)
            value = value.astype(np.dtype(f"u{np.dtype(dtype).itemsize}"))
        return value.view(dtype) if value.dtype.itemsize == np.dtype(dtype).itemsize else value

    def _floats(self, *operands: str) -> list[np.ndarray]:
        return [self._get(x, np.float32) for x in operands]

    def _set(self, operand: str, value: np.ndarray) -> None:
        if value.dtype == np.float32:
            value = np.where(np.isnan(value), _NAN, value.view(np.uint32))
        elif value.dtype == np.int32:
            value = value.view(np.uint32)
        self._registers[operand] = value

    def _places(self, operand: str, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the argument that an address belongs to, and the places of its bytes."""
        name, _, offset = operand.strip("[]").partition("+")
        at = self._registers[name] + np.uint64(int(offset or 0))
        (argument,) = set((at // np.uint64(_APART)).tolist())
        first = (at % np.uint64(_APART)).astype(np.int64)
        assert not (first % size).any(), "an address that is not aligned"
        return self._memory[argument - 1], first[:, None] + np.arange(size)

    # Memory and moves.

    def _ld(self, name: list[str], operands: list[str]) -> None:
        target, source = operands
        if name[1].startswith("param"):
            number = int(re.findall(r"param_(\d+)", source)[0])
            self._set(target, np.full(self._num, (number + 1) * _APART, np.uint64))
            return
        targets = re.findall(r"%\w+", target)
        width = int(name[-1][1:]) // 8
        data, places = self._places(source, width * len(targets))
        loaded = data[places].view(f"u{width}")
        for i, register in enumerate(targets):
            wide = np.uint32 if register.startswith("%r") and width < 4 else loaded.dtype
            self._set(register, np.ascontiguousarray(loaded[:, i]).astype(wide))

    def _st(self, name: list[str], operands: list[str]) -> None:
        target, source = operands
        width = int(name[-1][1:]) // 8
        sources = re.findall(r"[^{},\s]+", source)
        parts = [self._get(x).astype(f"u{width}") for x in sources]
        data, places = self._places(target, width * len(parts))
        self.half_filled += _half_filled(places)
        data[places] = np.stack(parts, axis=1).view(np.uint8)

    def _mov(self, name: list[str], operands: list[str]) -> None:
        target, source = operands
        halves = np.uint32(16)
        if target.startswith("{"):
            word = self._get(source)
            for i, register in enumerate(re.findall(r"[%\w]+", target)):
                if register != "_":
                    part = word >> (halves * np.uint32(i)) & np.uint32(0xFFFF)
                    self._set(register, part.astype(np.uint16))
        elif source.startswith("{"):
            low, high = (self._get(x, np.uint16) for x in re.findall(r"[%\w]+", source))
            self._set(target, low.astype(np.uint32) | high.astype(np.uint32) << halves)
        else:
            self._set(target, self._get(source, np.dtype(f"u{int(name[-1][1:]) // 8}")))

    def _cvta(self, name: list[str], operands: list[str]) -> None:
        self._set(operands[0], self._registers[operands[1]])

    def _shfl(self, name: list[str], operands: list[str]) -> None:
        target, source, lane = operands[:3]
        values = self._get(source).reshape(-1, LANES)
        lanes = np.arange(LANES)
        lanes = lanes ^ int(lane) if "bfly" in name else np.full(LANES, int(lane))
        self._set(target.split("|")[0], values[:, lanes].reshape(-1))

    def _nothing(self, name: list[str], operands: list[str]) -> None:
        """Choose one thread, or wait for others: no result depends on it."""

    _elect = _fence = _bar = _ret = _nothing

    # Integers.

    def _and(self, name: list[str], operands: list[str]) -> None:
        self._set(operands[0], self._get(operands[1]) & self._get(operands[2]))

    def _or(self, name: list[str], operands: list[str]) -> None:
        self._set(operands[0], self._get(operands[1]) | self._get(operands[2]))

    def _xor(self, name: list[str], operands: list[str]) -> None:
        self._set(operands[0], self._get(operands[1]) ^ self._get(operands[2]))

    def _not(self, name: list[str], operands: list[str]) -> None:
        self._set(operands[0], ~self._get(operands[1]))

    def _shl(self, name: list[str], operands: list[str]) -> None:
        self._set(operands[0], self._get(operands[1]) << self._get(operands[2]))

    def _shr(self, name: list[str], operands: list[str]) -> None:
        dtype = np.int32 if name[-1] == "s32" else np.uint32
        self._set(operands[0], self._get(operands[1], dtype) >> self._get(operands[2], dtype))

    def _bfe(self, name: list[str], operands: list[str]) -> None:
        first, count = int(operands[2]), int(operands[3])
        dtype = np.int32 if name[-1] == "s32" else np.uint32
        word = self._get(operands[1]) << np.uint32(32 - first - count)
        self._set(operands[0], word.view(dtype) >> dtype(32 - count))

    def _prmt(self, name: list[str], operands: list[str]) -> None:
        words = [self._get(x).reshape(-1, 1).view(np.uint8) for x in operands[1:3]]
        pool = np.concatenate(words, axis=1)
        choice = int(operands[3].rstrip("U"), 0)
        chosen = [choice >> 4 * i & 15 for i in range(4)]
        assert max(chosen) < 8, "the sign of a byte"
        self._set(operands[0], np.ascontiguousarray(pool[:, chosen]).view(np.uint32)[:, 0])

    def _mad(self, name: list[str], operands: list[str]) -> None:
        a, b, c = (self._get(x) for x in operands[1:])
        self._set(operands[0], a * b + c)

    def _mul(self, name: list[str], operands: list[str]) -> None:
        target, *sources = operands
        if name[-1] == "f32":
            a, b = self._floats(*sources)
            self._set(target, a * b)
            if self._products is not None and "rn" not in name:
                self._products[target] = (a, b)
        elif "wide" in name:
            a, b = (self._get(x).astype(np.uint64) for x in sources)
            self._set(target, a * b)
        else:
            self._set(target, self._get(sources[0]) * self._get(sources[1]))

    # Sums and other operations on floats.

    def _add(self, name: list[str], operands: list[str]) -> None:
        self._sum(name, operands, 1)

    def _sub(self, name: list[str], operands: list[str]) -> None:
        self._sum(name, operands, -1)

    def _sum(self, name: list[str], operands: list[str], sign: int) -> None:
        target, first, second = operands
        if name[-1] == "f32":
            a, b = self._floats(first, second)
            b = -b if sign < 0 else b
            fused = self._products if self._products and "rn" not in name else {}
            if first in fused:
                self._set(target, _multiply_add(*fused[first], b))
            elif second in fused:
                x, y = fused[second]
                self._set(target, _multiply_add(-x if sign < 0 else x, y, a))
            else:
                self._set(target, a + b)
            return
        dtype = np.uint64 if name[-1].endswith("64") else np.uint32
        a, b = self._get(first, dtype), self._get(second, dtype)
        self._set(target, a + b if sign > 0 else a - b)

    def _fma(self, name: list[str], operands: list[str]) -> None:
        self._set(operands[0], _multiply_add(*self._floats(*operands[1:])))

    def _max(self, name: list[str], operands: list[str]) -> None:
        self._extreme(name, operands, np.maximum)

    def _min(self, name: list[str], operands: list[str]) -> None:
        self._extreme(name, operands, np.minimum)

    def _extreme(self, name: list[str], operands: list[str], of: Any) -> None:
        target, *sources = operands
        if name[-1] in ("s32", "u32"):
            dtype = np.int32 if name[-1] == "s32" else np.uint32
            self._set(target, of(*(self._get(x, dtype) for x in sources)))
            return
        assert name[1] == "NaN", "a maximum that hides NaN"
        if name[-1] == "f32":
            self._set(target, of(*self._floats(*sources)))
            return
        dtype = {"bf16": np.uint16, "bf16x2": np.uint32}[name[-1]]
        halves = [np.stack([self._get(x, dtype)], axis=1).view(np.uint16) for x in sources]
        value = of(*((half.astype(np.uint32) << np.uint32(16)).view(np.float32) for half in halves))
        value = np.where(np.isnan(value), np.uint32(0x7FFF0000), value.view(np.uint32))
        self._set(target, (value >> np.uint32(16)).astype(np.uint16).view(dtype)[:, 0])

    def _abs(self, name: list[str], operands: list[str]) -> None:
        self._set(operands[0], self._get(operands[1]) & np.uint32(0x7FFFFFFF))

    def _neg(self, name: list[str], operands: list[str]) -> None:
        if name[-1] == "f32":
            self._set(operands[0], self._get(operands[1]) ^ np.uint32(0x80000000))
        else:
            self._set(operands[0], -self._get(operands[1], np.int32))

    def _rcp(self, name: list[str], operands: list[str]) -> None:
        # Whatever the machine's approximation: it may be off in the last places.
        (x,) = self._floats(operands[1])
        self._set(operands[0], np.nextafter(np.float32(1) / x, np.float32(9)))

    def _cvt(self, name: list[str], operands: list[str]) -> None:
        target, *sources = operands
        kind, source = name[-2:]
        if kind == "bf16x2":
            high, low = (_as_bfloat16(x) for x in self._floats(*sources))
            self._set(target, high << np.uint32(16) | low)
        elif source == "bf16":
            self._set(target, self._get(sources[0], np.uint16).astype(np.uint32) << np.uint32(16))
        elif kind == "bf16":
            self._set(target, _as_bfloat16(*self._floats(*sources)).astype(np.uint16))
        elif source == "f32":
            assert (kind, name[1]) == ("s32", "rzi")
            self._set(target, np.trunc(self._floats(sources[0])[0]).astype(np.int32))
        elif kind == "f32":
            assert (source, name[1]) == ("s32", "rn")
            self._set(target, self._get(sources[0], np.int32).astype(np.float32))
        else:
            self._set(target, self._get(sources[0]).astype(f"u{int(kind[1:]) // 8}"))

    # Comparisons.

    def _setp(self, name: list[str], operands: list[str]) -> None:
        target, first, second, *before = operands
        dtype = {"f32": np.float32, "s32": np.int32, "u32": np.uint32}[name[-1]]
        a, b = self._get(first, dtype), self._get(second, dtype)
        found = {
            "lt": lambda: a < b,
            "gt": lambda: a > b,
            "geu": lambda: ~(a < b),
            "eq": lambda: a == b,
            "ne": lambda: a != b,
            "le": lambda: a <= b,
            "ge": lambda: a >= b,
        }[name[1]]()
        if before:
            join = {"and": np.logical_and, "or": np.logical_or}[name[2]]
            found = join(found, self._registers[before[0]])
        self._registers[target] = found

    def _selp(self, name: list[str], operands: list[str]) -> None:
        target, one, other, choice = operands
        self._set(target, np.where(self._registers[choice], self._get(one), self._get(other)))


def _half_filled(places: np.ndarray) -> int:
    """Return how many sectors the stores to these bytes, int[threads, bytes], only fill in part."""
    found = 0
    for warp in places.reshape(-1, LANES * places.shape[1]):
        _, filled = np.unique(np.unique(warp) // SECTOR, return_counts=True)
        found += int(np.sum(filled < SECTOR))
    return found


def _multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a x b + c, rounded once but for ties of the 11 bits more of a long double."""
    wide = [x.astype(np.longdouble) for x in (a, b, c)]
    return (wide[0] * wide[1] + wide[2]).astype(np.float32)


def _as_bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded)
