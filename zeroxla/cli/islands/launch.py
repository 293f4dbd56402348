"""`zeroxla launch --islands`: a coordinator and all islands on this machine."""

from __future__ import annotations

import contextlib
import queue
import secrets
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroxla.cli.errors import INTERRUPTED
from zeroxla.cli.islands.events import in_words, is_rare
from zeroxla.cli.islands.kept_coordinator import KeptCoordinator
from zeroxla.cli.launch.options import LaunchOptions
from zeroxla.cli.launch.ranks import Share, make_ranks
from zeroxla.cli.launch.run import Teller, check_program, run_attempts
from zeroxla.cli.launch.stop_signals import StopSignals
from zeroxla.cli.launch.supervise import Outcome
from zeroxla.mesh.processes.environment import ISLANDS, ISLANDS_TOKEN, SLOT


def launch_islands(options: LaunchOptions, argv: Sequence[str]) -> int:
    """Run a program as islands, each with processes of its own, and their coordinator.

    An island that fails stops no other. It is started again as often as the options say.

    Args:
      options: the number of islands, and of an island's processes; and the times to wait.
      argv: the program and its arguments.

    Returns:
      The exit status: 0 if all islands have ended well. Otherwise the one of the first island that
      has failed for good; if none has, INTERRUPTED, as some were interrupted and have saved.

    Raises:
      ValueError: the program or an option cannot be used.
    """
    assert options.islands is not None
    check_program("launch", argv)
    teller = Teller("launch")

    def say(event: dict[str, Any]) -> None:
        if is_rare(event):
            teller.say(f"coordinator: {in_words(event)}")

    with contextlib.ExitStack() as stack:
        state = options.state
        if state is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="zeroxla-islands-"))
            state = Path(folder) / "coordinator.json"
        token = secrets.token_hex(32)
        coordinator = stack.enter_context(
            KeptCoordinator(
                token,
                num_islands=options.islands,
                state=state,
                deadline=options.round_deadline,
                say=say,
            )
        )
        shares = [
            Share(
                name=f"island {slot}",
                index=slot,
                count=options.islands,
                env={ISLANDS: coordinator.address, ISLANDS_TOKEN: token, SLOT: str(slot)},
            )
            for slot in range(options.islands)
        ]
        make_ranks(options, 0, shares[-1])  # An option that cannot work is found here.
        signals = stack.enter_context(StopSignals())
        return _Launch(options, argv, shares, coordinator, signals, teller).run()


class _Launch:
    """The islands of a launch, each watched by a thread."""

    def __init__(
        self,
        options: LaunchOptions,
        argv: Sequence[str],
        shares: Sequence[Share],
        coordinator: KeptCoordinator,
        signals: StopSignals,
        teller: Teller,
    ) -> None:
        self._options, self._argv, self._shares = options, argv, shares
        self._coordinator, self._signals, self._teller = coordinator, signals, teller
        self._ended: dict[int, Outcome] = {}
        self._news: queue.SimpleQueue[tuple[int, Outcome | BaseException]] = queue.SimpleQueue()

    def run(self) -> int:
        """Wait until all islands have ended; return the exit status."""
        for slot in range(len(self._shares)):
            threading.Thread(target=self._watch, args=(slot,), name=f"island {slot}").start()
        errors = []
        failed: dict[int, int] = {}
        while len(self._ended) < len(self._shares):
            slot, outcome = self._news.get()
            if isinstance(outcome, BaseException):
                errors.append(outcome)
                outcome = Outcome(1, f"cannot be watched: {outcome}")
            self._ended[slot] = outcome
            if outcome.status not in (0, INTERRUPTED):
                failed[slot] = outcome.status
            if outcome.status != 0:
                self._expect_fewer()
        if errors:
            raise errors[0]
        if failed and not self._signals.numbers:
            self._teller.failed(self._summary(failed))
        return next(iter(failed.values()), max(x.status for x in self._ended.values()))

    def _watch(self, slot: int) -> None:
        """Run an island to its end; runs in a thread."""
        name, most = self._shares[slot].name, self._options.max_restarts

        def failed(text: str) -> None:
            self._teller.failed(f"{name}: {text}")

        def again(left: int) -> None:
            self._teller.say(f"{name}: starting again ({left} of {most} left)")
            if self._ended:
                self._expect_fewer()

        try:
            share, signals = self._shares[slot], self._signals
            outcome = run_attempts(self._options, self._argv, share, signals, failed, again)
            self._news.put((slot, outcome))
        except BaseException as error:  # The main thread raises it when all have ended.
            self._news.put((slot, error))

    def _expect_fewer(self) -> None:
        """Let those that are left begin without those that have ended."""
        left = len(self._shares) - len(self._ended)
        if left and not self._signals.numbers:
            self._coordinator.expect(left)

    def _summary(self, failed: dict[int, int]) -> str:
        """Return a sentence about the islands that have failed for good."""
        each = ", ".join(f"island {slot} (status {failed[slot]})" for slot in sorted(failed))
        ended = {slot: x.status for slot, x in sorted(self._ended.items()) if slot not in failed}
        others = "".join(
            f"; {how}: {', '.join(slots)}"
            for how, status in (("ended well", 0), ("interrupted and saved", INTERRUPTED))
            if (slots := [str(slot) for slot, found in ended.items() if found == status])
        )
        return f"failed for good: {each}{others}"
