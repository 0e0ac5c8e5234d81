"""How long tests wait for what must come. A limit ends a test that hangs; it never judges.

Each is at least ten times what a quiet machine of two cores takes. EMULATOR_TEST_PATIENCE=3
stretches them all, for a slower one.
"""

import os

PATIENCE = float(os.environ.get("EMULATOR_TEST_PATIENCE", "1"))

WAIT_LIMIT_S = 90.0 * PATIENCE
"""For an answer, a message, a row, the end of a short program."""
START_LIMIT_S = 240.0 * PATIENCE
"""For a server process until it is ready or gone."""
