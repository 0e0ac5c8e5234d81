"""How long tests wait for expected events, and how often they repeat randomized ones.

A limit only ends a test that hangs; no test's outcome depends on it. Each is at least ten times the
time needed on an idle machine with two cores. EMULATOR_TEST_PATIENCE=3 multiplies the limits for a
slower machine.
"""

import os

PATIENCE = float(os.environ.get("EMULATOR_TEST_PATIENCE", "1"))

WAIT_LIMIT_S = 180.0 * PATIENCE
"""How long to wait for a response, a message, a row, or a short program to end."""
WAIT_LIMIT_MS = round(1000 * WAIT_LIMIT_S)
"""The `timeoutMs` of queries. By default, queries return after 10 s even if they are incomplete."""
START_LIMIT_S = 240.0 * PATIENCE
"""How long to wait for a server process to become ready or exit."""

KILLS = int(os.environ.get("EMULATOR_TEST_KILLS", "4"))
"""Number of kills after each kind of confirmation. Each kill requires starting the server."""
