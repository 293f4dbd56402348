"""The parts of `gpu.py`. Each is a module with two functions.

`measure(place)` runs on the devices of this process and yields a `Finding` for each figure.
`programs(place)` yields the same programs as a `Program` each, to be lowered or compiled for a GPU
that is not there.
"""
