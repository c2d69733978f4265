"""``python -m dlm_jax.export``: see `dlm_jax.cli.exporter`. The module is also callable."""

import sys
from types import ModuleType
from typing import Any

from dlm_jax.cli.programs import export


class _Program(ModuleType):
    """A module that can be called like the function `dlm_jax.export`."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        from dlm_jax.inference.model import export

        return export(*args, **settings)


if __name__ == "__main__":
    raise SystemExit(export())
sys.modules[__name__].__class__ = _Program
