"""Fixtures for testing processes that run models."""

import pytest

from workers.runtime.pool import ModelPool
from workers.runtime.pooled_process import PooledProcess


@pytest.fixture
async def process(pool: ModelPool) -> PooledProcess:
    """The first process in the file's own pool, once the process is ready."""
    await pool.processes[0].ready()
    return pool.processes[0]
