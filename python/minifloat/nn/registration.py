"""Registration: functions of a package that `nn` calls and does not import."""

from __future__ import annotations

from typing import Generic, TypeVar

Functions = TypeVar("Functions")


class Registration(Generic[Functions]):
    """The functions of another package, which registers them when it is imported.

    Args:
        name: of the functions, for the error.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._registered: list[Functions] = []

    def register(self, functions: Functions) -> None:
        """Registers the functions.

        Raises:
            RuntimeError: functions are registered already.
        """
        if self._registered:
            raise RuntimeError(f"{self.name}: expected one registration, got a second")
        self._registered.append(functions)

    def functions(self) -> Functions:
        """Returns the registered functions."""
        return self._registered[0]
