"""How long tests wait for what must come. A limit ends a test that hangs; it never judges: what is
there ends the wait.

Each is at least ten times what a quiet machine of two cores takes. On a slower machine,
PENSTOCK_TEST_PATIENCE=3, for example, stretches all of them at once. A test whose subject is a
deadline of the product has a fake clock or large ratios.
"""

import os

PATIENCE = float(os.environ.get("PENSTOCK_TEST_PATIENCE", "1"))

WAIT_LIMIT_S = 180.0 * PATIENCE
"""For an answer, a message, a row, the end of a short program: usually less than a second, a few at
most.
"""
START_LIMIT_S = 240.0 * PATIENCE
"""For a process or a stack until it is ready or gone: usually one second, 20 where models are
loaded.
"""
REDIS_LIMIT_S = 10.0 * PATIENCE
"""Default limit for one round trip to Redis in a process of ours: usually a millisecond.
"""
TEST_LIMIT_S = 900.0 * PATIENCE
"""For one test with its set-ups, shared ones included: usually less than a minute."""
