"""What can be wrong with a model, found on a small instance of it: `zeroxla.check`.

One file for each check: `equality`, `collectives`, `gathered`, `whole_leaves`, `overflow` and
`repeats`. Each returns a `CheckResult`.
"""
