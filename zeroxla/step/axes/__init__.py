"""Training steps whose work on one row is split over mesh axes: tensor, context, expert."""
