"""A short run of custom_streams.py: an API instance and a worker are killed."""

from pathlib import Path

import pytest

from tests.faults.custom_streams import run

pytestmark = pytest.mark.slow(about_s=60)

STREAMS, KILLS, EVERY_S = 40, 4, 4.0


def test_each_stream_is_whole_or_says_why_while_parts_die(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        streams=STREAMS,
        kills=KILLS,
        every_s=EVERY_S,
        items=24,
        pause_s=0.1,
        in_flight=12,
        say=print,
    )
    assert found.flaws() == []
    assert len(found.kills) == KILLS
    assert len(found.streams) >= STREAMS
    assert sum(one.connections for one in found.streams) > len(found.streams)
