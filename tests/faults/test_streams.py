"""Streams of texts while an API instance and a worker are killed: `python -m bench streams` runs it
in full, with a real model.
"""

import asyncio
from pathlib import Path

import pytest

from tests.faults.generation_catalog import generation_catalog
from tests.faults.streams import StreamReaders, read_while_killing
from tests.faults.world import World
from tests.workers.models.generation import tiny

pytestmark = pytest.mark.slow(about_s=50)

MODEL = "tiny-text"
STREAMS, KILLS, EVERY_S = 40, 2, 0.5


def test_each_stream_is_whole_while_an_instance_and_a_worker_die(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tiny.write_folder(folder)
    catalog = generation_catalog(MODEL, folder, generation={"longest_tokens": 224})
    with World(tmp_path, served=(MODEL, catalog)) as world:
        readers = StreamReaders(world, MODEL, tokens=160, in_flight=8)
        found = asyncio.run(
            read_while_killing(
                readers, world, streams=STREAMS, kills=KILLS, every_s=EVERY_S, say=print
            )
        )
    assert found.flaws() == []
    assert len(found.kills) == KILLS
    assert len(found.streams) >= STREAMS
    assert all(stream.text for stream in found.streams)
