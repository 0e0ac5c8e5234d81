"""How long tests wait for expected events. A limit only ends a test that hangs and never affects a
result, because the event itself ends the wait.

Each is at least ten times the time needed on an idle machine with two cores. On a slower machine, a
setting such as PENSTOCK_TEST_PATIENCE=3 multiplies them all. A test about one of the product's
deadlines uses a fake clock or large ratios.
"""

import os

PATIENCE = float(os.environ.get("PENSTOCK_TEST_PATIENCE", "1"))

WAIT_LIMIT_S = 180.0 * PATIENCE
"""Seconds to wait for a response, a message, a row, or the end of a short program: usually less
than one, a few at most.
"""
START_LIMIT_S = 240.0 * PATIENCE
"""Seconds until a process or a stack is ready or gone: usually one, or 20 if models are loaded."""
REDIS_LIMIT_S = 10.0 * PATIENCE
"""Default limit for a Redis round trip in one of our processes; it usually takes a millisecond."""
TEST_LIMIT_S = 900.0 * PATIENCE
"""Seconds for one test with its fixtures, including shared ones: usually less than a minute."""
