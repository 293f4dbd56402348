"""`ProgramCalls`: calls compiled programs, after all processes agreed on which one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.processes import progress
from zeroxla.mesh.processes.exchange import agree_on_program


class ProgramCalls:
    """Calls a step's programs. With several processes, the first call of each program is compared.

    Args:
      config: the step's configuration, for messages.
    """

    def __init__(self, config: ZeroConfig) -> None:
        # Each host may have a folder of its own for what is on disk.
        offload = dataclasses.replace(config.offload, path="...")
        said = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        self._options = {name: str(value) for name, value in {**said, "offload": offload}.items()}
        self._agreed: set[Any] = set()

    def __call__(self, name: str, program: Any, *args: Any) -> Any:
        """Call a jitted program, once all processes are about to call the same one.

        Raises:
          ValueError: another process is about to call another program.
          TimeoutError: another process does not call any.
        """
        if jax.process_count() > 1:
            avals = ((x.shape, x.dtype) for x in jax.tree.leaves(args))
            called = (name, jax.tree.structure(args), *avals)
            if called not in self._agreed:
                agree_on_program(name, program.lower(*args), self._options)
                self._agreed.add(called)
                with progress.compiling():
                    return program(*args)
        return program(*args)
