"""How long tests wait for expected events, and how often they repeat random ones.

A limit ends a test that hangs; it never judges. Each is at least ten times the time on a quiet
machine with two cores. EMULATOR_TEST_PATIENCE=3 multiplies them for a slower one.
"""

import os

PATIENCE = float(os.environ.get("EMULATOR_TEST_PATIENCE", "1"))

WAIT_LIMIT_S = 180.0 * PATIENCE
"""For an answer, a message, a row, or the end of a short program."""
START_LIMIT_S = 240.0 * PATIENCE
"""For a server process to become ready or end."""

KILLS = int(os.environ.get("EMULATOR_TEST_KILLS", "4"))
"""Kills after each kind of confirming answer. Each requires a start of the server."""
