"""In-place operations on distributed tensors: the table of what mutates, the watch, the lint.

``watch`` is imported when it is first used, because it needs torch and the lint must not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sbp.inplace.watch import Record, Watch, watch

__all__ = ["Record", "Watch", "watch"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        module = importlib.import_module("sbp.inplace.watch")
        # Importing the module has put it here under the function's name.
        for public in __all__:
            globals()[public] = getattr(module, public)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
