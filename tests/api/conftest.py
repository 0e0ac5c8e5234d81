"""An API over a broker in memory, for tests that need no more than that; without Redis unless a test brings one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.records import Records
from tests.api.harness import ApiUnderTest, running_api, settings_for


@pytest.fixture
def patient_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis may be slow on a busy machine; how long it may be is tested in tests/shared."""
    defaults = Records.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "timeout_s", 5.0)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ApiUnderTest]:
    async with running_api(settings_for(tmp_path)) as running:
        yield running
        await running.until_idle()
        assert running.parts.dispatcher.in_flight == 0
