"""Pictures of a report and of a placement, drawn with matplotlib without touching its global state.

Each function returns a `matplotlib.figure.Figure` on a canvas of its own, so it works without a
display and opens no window. A notebook shows it as the last expression of a cell once
`matplotlib.pyplot` has been imported there.
"""

from zeroxla.inspect.pictures.comms import plot_comms
from zeroxla.inspect.pictures.disk import plot_disk
from zeroxla.inspect.pictures.memory import plot_memory
from zeroxla.inspect.pictures.placement import plot_placement
from zeroxla.inspect.pictures.plan import plot_plan
from zeroxla.inspect.pictures.schedule import plot_schedule
from zeroxla.inspect.pictures.search import plot_search

__all__ = [
    "plot_comms",
    "plot_disk",
    "plot_memory",
    "plot_placement",
    "plot_plan",
    "plot_schedule",
    "plot_search",
]
