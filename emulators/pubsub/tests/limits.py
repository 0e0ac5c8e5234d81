"""How long tests wait for expected events, and how many times randomized tests repeat.

A limit only ends a hung test; no test outcome depends on it. Each is at least ten times the time
needed on an idle machine with two cores. EMULATOR_TEST_PATIENCE=3 multiplies the limits for a
slower machine.
"""

import os

PATIENCE = float(os.environ.get("EMULATOR_TEST_PATIENCE", "1"))

WAIT_LIMIT_S = 180.0 * PATIENCE
"""How long to wait for a response, a message, a row, or the end of a short program."""
START_LIMIT_S = 240.0 * PATIENCE
"""How long to wait for a server process to become ready or exit."""

KILLS = int(os.environ.get("EMULATOR_TEST_KILLS", "4"))
"""Number of kills after each kind of confirmation. Each requires starting the server."""
