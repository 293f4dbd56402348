"""Packages that only an extra of zeroxla installs: one that is missing is named with its extra.

Come here when a feature needs a package that `make_step` does not need.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

# Names under which packages are installed, where they differ from the names that are imported.
PACKAGES = {"sklearn": "scikit-learn"}


class MissingExtraError(ImportError):
    """A package is not installed; the text names it, and the extra that brings it."""


@contextlib.contextmanager
def extra(name: str, purpose: str, instead: str = "") -> Iterator[None]:
    """Say which extra brings a package that an import inside does not find.

    Args:
      name: the extra, as `pyproject.toml` has it.
      purpose: the beginning of the error's sentence, with its verb: "pictures need".
      instead: the end of that sentence: what to do without the package.

    Raises:
      MissingExtraError: a package is not installed.

    >>> with extra("plot", "pictures need"):
    ...     import matplotlib.figure
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "zeroxla").partition(".")[0]
        if module == "zeroxla":  # a mistake of ours, which no extra mends
            raise
        package = PACKAGES.get(module, module)
        raise MissingExtraError(
            f"{purpose} the package {package}; pip install 'zeroxla[{name}]'{instead}",
            name=error.name,
        ) from error


def check_package(module: str, name: str, purpose: str, instead: str = "") -> None:
    """Check that a package can be imported, without importing it.

    Args:
      module: the package's module.
      name, purpose, instead: as of `extra`.

    Raises:
      MissingExtraError: it is not installed.
    """
    with extra(name, purpose, instead):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(name=module)
