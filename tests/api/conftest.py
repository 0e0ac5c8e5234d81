"""An API over a broker in memory, for tests that need no more than that; without Redis unless a
test brings one.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.harness import ApiUnderTest, running_api, settings_for


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ApiUnderTest]:
    async with running_api(settings_for(tmp_path)) as running:
        yield running
        await running.until_idle()
        assert running.dependencies.dispatcher.in_flight == 0
