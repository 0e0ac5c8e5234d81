"""Imports Cog without the large packages that few classes use and that take most of its CPU time.

`cog.types` needs `requests` and `urllib.request` only for inputs that are open files from a URL,
and `cog._inspector` needs pydantic only for a class that has imported it. A class that imports any
of them gets the real package.

Every runner module imports Cog from here, so that no other import of it comes first.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import urllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Requests(ModuleType):
    """The `requests` attribute of `cog.types`: the package, imported on first use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("requests"), name)


def _submodule_of_urllib(name: str) -> Any:
    """Imports `urllib.request` on first use, as if it had been imported before (PEP 562)."""
    if name != "request":
        raise AttributeError(f"module 'urllib' has no attribute {name!r}")
    return importlib.import_module("urllib.request")


@contextlib.contextmanager
def _stood_in_for(*modules: ModuleType) -> Iterator[None]:
    """Makes imports find these modules, except for modules that are already imported."""
    added = [module for module in modules if module.__name__ not in sys.modules]
    sys.modules.update({module.__name__: module for module in added})
    try:
        yield
    finally:
        for module in added:
            del sys.modules[module.__name__]


with _stood_in_for(_Requests("requests"), ModuleType("urllib.request")):
    # Only this thread is running at this point.
    import cog
    from cog import _adt as adt
    from cog import predictor as cog_predictor
    from cog.input import FieldInfo
if not hasattr(urllib, "request"):
    vars(urllib)["__getattr__"] = _submodule_of_urllib

__all__ = ["FieldInfo", "adt", "cog", "cog_predictor", "inspector"]


def import_all() -> None:
    """Immediately imports everything that would otherwise be imported on first use.

    Later imports may find different modules, because a class's folder comes before the standard
    library.
    """
    for name in ("asyncio", "requests", "urllib.request"):
        importlib.import_module(name)


class _Missing:
    """A finder that hides a package from this thread.

    The class may still have packages that require the real one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ImportError for the package. All other modules are left to the next finder."""
        if name == self._name and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


@cache
def inspector() -> ModuleType:
    """Returns Cog's inspector of signatures and types. Call it after importing the class's module.

    A class that has not imported pydantic doesn't use any of its types.
    """
    finder = _Missing("pydantic")
    if "pydantic" not in sys.modules:
        sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("cog._inspector")
    finally:
        with contextlib.suppress(ValueError):  # it was not needed
            sys.meta_path.remove(finder)
