"""A model of one multiprocessor (SM) of an A100, H100 or H200: how long a kernel takes on it.

`bounds` adds up what each resource has to do; no kernel is faster. `simulated_cycles` lets warps
of one of the four schedulers run their instructions: each cycle one warp issues one, in its own
order, once its stall count is over, its scoreboards are clear and its pipe is free. The other three
schedulers do the same at the same time, so a scheduler has a quarter of what they share.

Warps do not wait for each other: a barrier takes one issue. Code has no branches, nothing is found
in the L2, and shared memory has no bank conflicts. Assumed: throughputs of the CUDA programming
guide for compute capabilities 8.0 and 9.0, latencies as others measured them on Hopper and Ampere,
and the clocks and bandwidths of a copy in GPUS. An A100 has half of Hopper's lanes for products.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from sass import Instruction


class Gpu(NamedTuple):
    """What differs from GPU to GPU.

    Attributes:
      copy_bytes_per_s: bytes read and written in a second by a copy, about 90 % of the data sheet.
      multiprocessors: their number.
      clock_hz: while all of them work.
      fma_pipes: of a scheduler, 16 lanes each.
    """

    copy_bytes_per_s: float
    multiprocessors: int
    clock_hz: float
    fma_pipes: int


GPUS = {
    "A100": Gpu(1.8e12, 108, 1.41e9, 1),  # SXM, 80 GB
    "H100": Gpu(2.9e12, 132, 1.7e9, 2),
    "H200": Gpu(4.3e12, 132, 1.7e9, 2),
}
SCHEDULERS, WARP_LIMIT, BLOCK_LIMIT, REGISTERS = 4, 64, 32, 65536
WARPS = 4  # of a block

# Cycles in which an instruction occupies its pipe, of one scheduler.
OCCUPIES = {"alu": 2, "fma": 2, "half": 2, "imad": 2, "xu": 8, "uniform": 2}
LATENCY = {"alu": 8, "fma": 8, "half": 8, "imad": 8, "xu": 24, "uniform": 10, "constant": 35}
SHUFFLE_LATENCY, SHARED_LATENCY, MEMORY_LATENCY, OPERANDS_READ = 25, 30, 700, 12
LAUNCH = 150  # cycles from the end of a block to the first instruction of the next


class Access(NamedTuple):
    """Memory that an instruction moves for a warp.

    Attributes:
      lines: passes through the L1, one for each 128 bytes or part of them.
      bytes_: between the L1 and the GPU's memory; 0 in shared memory.
    """

    lines: float
    bytes_: float


def blocks_at_once(registers: int) -> int:
    """Return how many blocks of 128 threads fit on a multiprocessor."""
    for_a_block = -(-registers // 8) * 8 * 32 * WARPS
    return min(REGISTERS // for_a_block, WARP_LIMIT // WARPS, BLOCK_LIMIT)


def bounds(
    code: Sequence[Instruction], accesses: Sequence[Access | None], gpu: str
) -> dict[str, float]:
    """Return the cycles that each resource of a scheduler works for one warp, by its name."""
    count = Counter(instruction.pipe for instruction in code)
    moved = [access for access in accesses if access is not None]
    return {
        "issue": len(code),
        "alu": OCCUPIES["alu"] * count["alu"],
        "fma": (count["fma"] + count["half"] + count["imad"]) * 2 / GPUS[gpu].fma_pipes,
        "imad": OCCUPIES["imad"] * count["imad"],
        "xu": OCCUPIES["xu"] * count["xu"],
        "L1": SCHEDULERS * (sum(access.lines for access in moved) + count["shuffle"]),
        "memory": sum(access.bytes_ for access in moved) / _bytes_per_cycle(gpu),
    }


def simulated_cycles(
    code: Sequence[Instruction], accesses: Sequence[Access | None], blocks: int, gpu: str
) -> float:
    """Return the cycles between the ends of two warps of a scheduler that always has `blocks`."""
    return _Scheduler(code, accesses, blocks, gpu).run()


def _bytes_per_cycle(gpu: str) -> float:
    """Of one scheduler."""
    of = GPUS[gpu]
    return of.copy_bytes_per_s / of.multiprocessors / of.clock_hz / SCHEDULERS


class _Warp:
    def __init__(self, ready: int) -> None:
        self.at = 0
        self.ready = ready
        self.pending = [0] * 8


class _Scheduler:
    def __init__(
        self,
        code: Sequence[Instruction],
        accesses: Sequence[Access | None],
        blocks: int,
        gpu: str,
    ) -> None:
        self._code, self._accesses = code, accesses
        self._rate = _bytes_per_cycle(gpu)
        self._second = "second fma" if GPUS[gpu].fma_pipes > 1 else "fma"
        # Blocks of the first wave start apart, as they do on a GPU that is already busy.
        self._warps = [_Warp(i * 250) for i in range(blocks)]
        self._free = dict.fromkeys((*OCCUPIES, "second fma"), 0.0)
        self._l1 = self._memory = 0.0
        self._events: list[tuple[float, int, int]] = []

    def run(self, waves: int = 12) -> float:
        total, warm = waves * len(self._warps), 4 * len(self._warps)
        ended: list[int] = []
        now = last = 0
        while len(ended) < total:
            self._clear(now)
            for i in range(len(self._warps)):
                number = (last + i) % len(self._warps)  # the same warp as long as it can go on
                if self._issues(self._warps[number], number, now):
                    last = number
                    if self._warps[number].at == len(self._code):
                        ended.append(now)
                        self._warps[number] = _Warp(now + LAUNCH)
                    break
            now += 1
        return (ended[-1] - ended[warm - 1]) / (total - warm)

    def _clear(self, now: int) -> None:
        while self._events and self._events[0][0] <= now:
            _, number, board = heapq.heappop(self._events)
            # A block that has ended waits for nothing, and its successor has boards of its own.
            if self._warps[number].pending[board]:
                self._warps[number].pending[board] -= 1

    def _issues(self, warp: _Warp, number: int, now: int) -> bool:
        """Issue a warp's next instruction if it can go; return whether it did."""
        if warp.ready > now:
            return False
        instruction = self._code[warp.at]
        if any(warp.pending[board] for board in range(6) if instruction.waits >> board & 1):
            return False
        times = self._start(instruction, self._accesses[warp.at], now)
        if times is None:
            return False
        for board, time in zip((instruction.sets, instruction.frees), times):
            if board < 6:
                warp.pending[board] += 1
                heapq.heappush(self._events, (max(time, now + 2), number, board))
        warp.ready = now + max(1, instruction.stall)
        warp.at += 1
        return True

    def _start(
        self, instruction: Instruction, access: Access | None, now: int
    ) -> tuple[float, float] | None:
        """Return when the result is there and when the operands are read; None if the pipe has no
        room."""
        pipe = instruction.pipe
        if access is not None or pipe == "shuffle":
            if self._l1 > now + 64 * SCHEDULERS:
                return None
            lines = 1.0 if access is None else access.lines
            begins = max(self._l1, now)
            self._l1 = begins + SCHEDULERS * lines
            if access is None:
                return begins + SHUFFLE_LATENCY, begins + OPERANDS_READ
            if pipe == "shared":
                return self._l1 + SHARED_LATENCY, begins + OPERANDS_READ
            self._memory = max(self._memory, now) + access.bytes_ / self._rate
            if pipe == "store":
                if self._memory > now + 16000:
                    self._memory -= access.bytes_ / self._rate
                    return None
                return self._l1 + OPERANDS_READ, self._l1 + OPERANDS_READ
            return max(self._l1, self._memory) + MEMORY_LATENCY, begins + OPERANDS_READ
        if pipe in ("fma", "half") and self._free["fma"] > now:
            pipe = self._second  # which the products of integers need, too
        elif pipe == "imad":
            pipe = self._second
        occupies = OCCUPIES.get(instruction.pipe)
        if occupies is not None:
            if self._free[pipe] > now + (16 if pipe == "xu" else 0):
                return None
            self._free[pipe] = max(self._free[pipe], now) + occupies
        latency = LATENCY.get(instruction.pipe, OPERANDS_READ)
        return now + latency, now + OPERANDS_READ
