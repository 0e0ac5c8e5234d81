"""Checks numbers in command-line options, because click accepts `nan`, `inf`, and negative ones."""

from __future__ import annotations

import math

import typer


def check_amount(amount: float | None) -> float | None:
    """Returns the value of an option, which may be missing. For use as a typer callback.

    Raises:
        typer.BadParameter: it is negative, infinite, or not a number.
    """
    if amount is not None and not 0 <= amount < math.inf:
        raise typer.BadParameter(f"must be a finite number of at least 0, got {amount}")
    return amount
