"""The seconds for which a micro-batch waits for a link: to other devices, or to the host."""

from __future__ import annotations

from collections.abc import Sequence

from zeroxla.fetch.keeping.places import SegmentPlace
from zeroxla.fetch.keeping.residual_graph import DeviceRates
from zeroxla.fetch.keeping.reused_leaves import ReusedLeaves

HIDDEN_SHARE = 0.8
"""The share of the time of products in which a link is kept busy beside them."""


def gather_seconds(
    places: Sequence[SegmentPlace], reused: ReusedLeaves, rates: DeviceRates
) -> float:
    """Return the seconds for which backward waits for the leaves that it gathers again. Gathers
    that run beside computation are waited for as far as backward's products take less long."""
    backward_s = 2 * _forward_seconds(places, rates)
    return _waited(reused.again_bytes / rates.gathered_bytes_per_s, backward_s, rates)


def traffic_seconds(
    places: Sequence[SegmentPlace],
    reused: ReusedLeaves,
    rates: DeviceRates,
    *,
    gathers: float = 1.0,
    reduces: float = 1.0,
) -> float:
    """Return the seconds for which a micro-batch waits for all of its gathers and reductions.

    Args:
      places: the straight segments of a plan.
      reused: the leaves that stay gathered for backward.
      rates: the speeds of the device and of its links.
      gathers, reduces: how many gathers of forward, and reductions, it makes of each leaf.
    """
    num_bytes = reused.num_bytes + reused.again_bytes
    link_s = reused.again_bytes / rates.gathered_bytes_per_s
    link_s += gathers * num_bytes / rates.sent_bytes_per_s
    link_s += reduces * num_bytes / rates.reduced_bytes_per_s
    return _waited(link_s, 3 * _forward_seconds(places, rates), rates)


def _waited(link_s: float, compute_s: float, rates: DeviceRates) -> float:
    return max(link_s - HIDDEN_SHARE * compute_s * rates.gathers_beside, 0.0)


def hidden_bytes(places: Sequence[SegmentPlace], rates: DeviceRates) -> float:
    """Return the bytes that cross the link to the host while forward computes its products."""
    forward_s = _forward_seconds(places, rates)
    return HIDDEN_SHARE * forward_s * (rates.host_bytes_per_s or 0.0)


def _forward_seconds(places: Sequence[SegmentPlace], rates: DeviceRates) -> float:
    return sum(p.kind.forward_flops * p.turns for p in places) / rates.flops_per_s


def seconds_per_byte(rates: DeviceRates) -> float:
    """Return the seconds of a byte's way to the host and back, with nothing beside it."""
    return 2 / rates.host_bytes_per_s if rates.host_bytes_per_s else 0.0
