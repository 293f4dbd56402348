"""Pictures of reports, plans, schedules and placements, drawn with matplotlib.

Each function returns a `matplotlib.figure.Figure` on a canvas of its own. It works without a
display, opens no window and leaves matplotlib's global state alone. A notebook that has imported
`matplotlib.pyplot` shows the figure if it is the last expression of a cell.
"""

from zeroxla.inspect.pictures.axes import plot_axes
from zeroxla.inspect.pictures.comms import plot_comms
from zeroxla.inspect.pictures.disk import plot_disk
from zeroxla.inspect.pictures.explained import plot_explanation
from zeroxla.inspect.pictures.islands import plot_islands
from zeroxla.inspect.pictures.memory import plot_memory
from zeroxla.inspect.pictures.placement import plot_placement
from zeroxla.inspect.pictures.plan import plot_plan
from zeroxla.inspect.pictures.schedule import plot_schedule
from zeroxla.inspect.pictures.search import plot_search

__all__ = [
    "plot_axes",
    "plot_comms",
    "plot_disk",
    "plot_explanation",
    "plot_islands",
    "plot_memory",
    "plot_placement",
    "plot_plan",
    "plot_schedule",
    "plot_search",
]
