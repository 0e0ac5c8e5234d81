"""Runs `penstock` in the test's own process."""

from __future__ import annotations

from infra.cli.main import app


def penstock(*words: str) -> int:
    """Runs a command. Returns its exit status."""
    try:
        app(list(words), prog_name="penstock")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
