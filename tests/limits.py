"""How long tests wait for expected events. A limit only ends a test that hangs and never decides a
result: the event itself ends the wait.

Each is at least ten times as long as a quiet machine of two cores takes. On a slower machine,
PENSTOCK_TEST_PATIENCE=3, for example, stretches all of them at once. A test whose subject is a
deadline of the product has a fake clock or large ratios.
"""

import os

PATIENCE = float(os.environ.get("PENSTOCK_TEST_PATIENCE", "1"))

WAIT_LIMIT_S = 180.0 * PATIENCE
"""Seconds for an answer, a message, a row, or the end of a short program: usually less than one, a
few at most.
"""
START_LIMIT_S = 240.0 * PATIENCE
"""Seconds until a process or a stack is ready or gone: usually one, or 20 if models are loaded.
"""
REDIS_LIMIT_S = 10.0 * PATIENCE
"""Default limit for one round trip to Redis in a process of ours: usually a millisecond.
"""
TEST_LIMIT_S = 900.0 * PATIENCE
"""Seconds for one test with its fixtures, including shared ones: usually less than a minute."""
