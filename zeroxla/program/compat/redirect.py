"""Exchanges the code of a function of JAX."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any


def redirect(function: Any, answer: Callable[..., Any]) -> None:
    """Make every call of a function a call `answer(own, *args, **kwargs)`.

    Its code is exchanged, and not its name in a module: modules that have imported the function by
    its name call `answer` too.

    Args:
      function: a function of a module, which reads no variable of another function.
      answer: is given the function as it was.
    """
    function = inspect.unwrap(function)
    own = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    own.__kwdefaults__ = function.__kwdefaults__

    def call(*args: Any, _answer: Any, _own: Any, **kwargs: Any) -> Any:
        return _answer(_own, *args, **kwargs)

    signature = inspect.signature(function)
    function.__defaults__, function.__kwdefaults__ = None, {"_answer": answer, "_own": own}
    function.__code__ = call.__code__
    function.__signature__ = signature
