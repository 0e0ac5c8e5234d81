"""How long tests wait for what must come, and how often they do what differs by chance only.

A limit ends a test that hangs; it never judges. Each is at least ten times what a quiet machine of
two cores takes. EMULATOR_TEST_PATIENCE=3 stretches them all, for a slower one.
"""

import os

PATIENCE = float(os.environ.get("EMULATOR_TEST_PATIENCE", "1"))

WAIT_LIMIT_S = 180.0 * PATIENCE
"""For an answer, a message, a row, the end of a short program."""
WAIT_LIMIT_MS = round(1000 * WAIT_LIMIT_S)
"""What a query asks for as its `timeoutMs`. After 10 s it would be answered as not complete."""
START_LIMIT_S = 240.0 * PATIENCE
"""For a server process until it is ready or gone."""

KILLS = int(os.environ.get("EMULATOR_TEST_KILLS", "4"))
"""Behind each kind of answer that confirms something. Each needs a start of the server."""
