"""`zeroxla explain`: what a run's step waits for, and which settings would change it."""
