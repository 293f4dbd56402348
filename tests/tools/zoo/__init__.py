"""The zoo: small models that try hard to break the library, each a named `Case`.

None of them imports zeroxla, but for the models of models/. `CASES` maps names to cases;
`tests/step/test_equality.py` runs them.

Files: `base` (the class `Case`), `four` (models/), `linen_models` and `nnx_models` (modules as
users write them), `functions` (plain pairs: control flow, custom rules, odd shapes), `scans` (loops
over stacked leaves).
"""

# The order of the imports is the order of the cases.
from tools.zoo import four, functions, linen_models, nnx_models, scans  # noqa: F401
from tools.zoo.base import CASES, Case

__all__ = ["CASES", "Case"]
