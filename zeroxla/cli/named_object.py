"""Reads an object of the user's own code that a command line names, such as `train:Model`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any


def named_object(name: str, option: str) -> Any:
    """Return the object that "module:name" or "file.py:name" stands for.

    Modules are looked for in the folder where the command runs, too, as `python -m` does.

    Args:
      name: the module's dotted name or a path that ends in .py; a colon; the object's name in it,
        which may have dots.
      option: what names it, for errors: "--track".

    Raises:
      ValueError: the text has another form, or there is no such module, file or object.
    """
    module, attribute = check_object(name, option)
    found: Any = _module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(
                f"{option} {name!r}: {module} has no {attribute!r}; give a name that it defines"
            )
        found = getattr(found, part)
    return found


def check_object(name: str, option: str) -> tuple[str, str]:
    """Check that there is a module or a file for a name, without importing it.

    Args:
      name, option: as of `named_object`.

    Returns:
      The module or the file, and the name of the object in it.

    Raises:
      ValueError: the text has another form, or there is no such module or file.
    """
    module, colon, attribute = name.rpartition(":")
    if not (module and colon and attribute):
        raise ValueError(
            f"{option} {name!r} names no object; give MODULE:NAME or FILE.py:NAME, such as "
            "my_code:Thing"
        )
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise ValueError(f"{option}: there is no file {module}; give the path of a Python file")
    elif not _has_module(module):
        raise ValueError(
            f"{option}: there is no module {module!r}; run the command in the folder that holds "
            f"it, or give the path of its file: FILE.py:NAME"
        )
    return module, attribute


def _has_module(name: str) -> bool:
    """Return whether there is a module. What stands around it is imported to look for it."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package around it is there, and lacks another itself
        return False


def _module(name: str) -> Any:
    """Import a module by its name or its file. Errors of its own code are raised as they are."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    file = Path(name)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    sys.path.insert(0, str(file.parent.absolute()))
    spec.loader.exec_module(module)
    return module
