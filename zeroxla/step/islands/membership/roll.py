"""`Roll`: the processes of islands that the coordinator hears, and what they say."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from zeroxla.step.islands.membership.messages import MemberReport, Place
from zeroxla.step.islands.membership.post import Address

Island = tuple[MemberReport, ...]
"""The reports of all processes of an island."""


class Roll:
    """Who is there.

    Attributes:
      refused: why a process may not take part, by its number.
    """

    def __init__(self) -> None:
        self.refused: dict[int, str] = {}
        self._reports: dict[int, MemberReport] = {}
        self._hosts: dict[int, str] = {}
        self._promised: dict[int, dict[int, int]] = {}

    def heard(
        self, member: int, report: MemberReport, host: str, known: Mapping[str, str]
    ) -> tuple[MemberReport, bool] | None:
        """Take the report of a process.

        Args:
          member: the number of the process.
          report: what it says.
          host: where it calls from.
          known: what islands have in common; empty if nobody has said so yet.

        Returns:
          The report with the slot, and whether the process is new; None if it is refused.
        """
        before = self._reports.pop(member, None)
        slot = report.slot
        if slot is None:
            slot = before.slot if before is not None else self._free_slot()
        facts = report.facts or ({} if before is None else before.facts)
        promised = self._promised.get(member, {})
        versions = tuple(max(v, promised.get(p, 0)) for p, v in enumerate(report.versions))
        report = dataclasses.replace(report, slot=slot, facts=facts, versions=versions)
        if why := self._refusal(report, known):
            self.refused[member] = why
            return None
        self.refused.pop(member, None)
        self._reports[member], self._hosts[member] = report, report.host or host
        return report, before is None

    def lost(self, member: int) -> MemberReport | None:
        """Forget a process that has left; return what it said last."""
        self.refused.pop(member, None)
        self._promised.pop(member, None)
        return self._reports.pop(member, None)

    def promise(self, slot: int, fragment: int, version: int) -> None:
        """Note that an island holds a version that it has not merged yet."""
        for member, report in self._reports.items():
            if report.slot == slot:
                self._promised.setdefault(member, {})[fragment] = version
                versions = [version if p == fragment else v for p, v in enumerate(report.versions)]
                self._reports[member] = dataclasses.replace(report, versions=tuple(versions))

    def report_of(self, member: int) -> MemberReport | None:
        """Return what a process has said last."""
        return self._reports.get(member)

    def islands(self) -> dict[int, Island]:
        """Return the islands, by slot, of which all processes are there and have begun."""
        found: dict[int, dict[int, MemberReport]] = collections.defaultdict(dict)
        for report in self._reports.values():
            if report.facts and report.slot is not None:
                found[report.slot][report.process] = report
        return {
            slot: tuple(island[i] for i in sorted(island))
            for slot, island in found.items()
            if len(island) == next(iter(island.values())).num_processes
        }

    def training(self) -> dict[int, Island]:
        """Return the islands that train."""
        return {s: island for s, island in self.islands().items() if all(p.trains for p in island)}

    def place(self, slot: int, rows: int = 0, hidden: tuple[int, ...] = ()) -> Place:
        """Return where the processes of an island listen.

        Args:
          slot: the island.
          rows: its weight.
          hidden: fragments of which it has nothing that others should take.
        """
        mine = {x.process: member for member, x in self._reports.items() if x.slot == slot}
        addresses = (
            Address(host=self._hosts[m], port=self._reports[m].port, member=m)
            for _, m in sorted(mine.items())
        )
        each = [self._reports[m].versions for m in mine.values()]
        versions = [min(found) for found in zip(*each, strict=True)]
        versions = [0 if p in hidden else v for p, v in enumerate(versions)]
        return Place(slot=slot, rows=rows, addresses=tuple(addresses), versions=tuple(versions))

    def astray(self, versions: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        """Return the fragments, by slot, of which an island has other bits than most have.

        Args:
          versions: the number of closed rounds of each fragment.
        """
        found: dict[int, list[int]] = collections.defaultdict(list)
        for fragment, version in enumerate(versions):
            sums = {
                slot: tuple(process.checksums[fragment][1] for process in island)
                for slot, island in sorted(self.islands().items())
                if all(p.checksums.get(fragment, (-1, 0))[0] == version for p in island)
            }
            if len(set(sums.values())) > 1:
                right = collections.Counter(sums.values()).most_common(1)[0][0]
                for slot in (slot for slot, value in sums.items() if value != right):
                    found[slot].append(fragment)
        return {slot: tuple(fragments) for slot, fragments in found.items()}

    def _refusal(self, report: MemberReport, known: Mapping[str, str]) -> str:
        """Return why a process may not take part; "" if it may."""
        others = [x for x in self._reports.values() if x.slot == report.slot]
        if any(x.process == report.process for x in others):
            return f"another island has slot {report.slot}; leave the slot out for a free one"
        if any(x.num_processes != report.num_processes for x in others):
            return f"the processes of the island with slot {report.slot} differ in their number"
        both = known.keys() & report.facts.keys()
        if names := sorted(name for name in both if known[name] != report.facts[name]):
            name = names[0]
            return (
                f"this island has other {', '.join(names)} than the others; {name}: "
                f"{known[name]} there, {report.facts[name]} here. If this is another run, give its "
                "coordinator another state file"
            )
        return ""

    def _free_slot(self) -> int:
        """Return the first slot that no island has, so that one that comes back takes its own."""
        taken = {x.slot for x in self._reports.values()}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)
