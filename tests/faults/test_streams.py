"""Text streams while an API instance and a worker are killed.

`python -m bench streams` runs the full version, with a real model.
"""

import asyncio
from pathlib import Path

import pytest

from tests.faults.generation_catalog import generation_catalog
from tests.faults.streams import TURNS, StreamReaders, read_while_killing
from tests.faults.world import APIS, WORKERS, World
from tests.workers.models.generation import tiny

pytestmark = pytest.mark.slow(about_s=50)

MODEL = "tiny-text"
ENGINES = ("auto", "llama.cpp")
STREAMS, EVERY_S = 40, 0.5


@pytest.mark.parametrize("engine", ENGINES)
def test_each_stream_is_whole_while_an_instance_and_a_worker_die(
    tmp_path: Path, engine: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tiny.write_folder(folder)
    turns: tuple[str, ...] = TURNS[:3]
    if engine != "auto":
        pytest.importorskip("xllamacpp")
        from tests.workers.models.generation.gguf_file import write_gguf

        write_gguf(folder)
        turns = (f"engine of {WORKERS[0]}", "broker", WORKERS[1], APIS[0])
    catalog = generation_catalog(MODEL, folder, engine, generation={"longest_tokens": 224})
    with World(tmp_path, served=(MODEL, catalog)) as world:
        readers = StreamReaders(world, MODEL, tokens=160, in_flight=8)
        found = asyncio.run(
            read_while_killing(
                readers,
                world,
                streams=STREAMS,
                kills=len(turns),
                every_s=EVERY_S,
                say=print,
                turns=turns,
            )
        )
    # After a takeover, an engine may round differently. Text that was already delivered doesn't
    # change.
    rounded = [] if engine == "auto" else found.differing
    assert [flaw for flaw in found.flaws() if flaw not in rounded] == []
    assert len(found.kills) == len(turns)
    assert len(found.streams) >= STREAMS
    assert all(stream.text for stream in found.streams)
