"""1,000 streams of greedy text, with API instances and workers killed in turn every 10 s.

Readers resume after their last event, using `Last-Event-ID` and `starting_after`. Each text must be
complete, contain each event exactly once and in order, and match the fp32 text from an undisturbed
run.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path

from bench.generation.load import smollm2_folder
from bench.report import Figure, Outcome, expect_none
from shared.errors import ConfigurationError
from tests.faults.generation_catalog import generation_catalog
from tests.faults.streams import StreamFindings, StreamReaders, read_while_killing
from tests.faults.world import APIS, WORKERS, World

MODEL = "smollm2"
STREAMS = 1000
TOKENS = 48
IN_FLIGHT = 24
KILL_EVERY_S = 10.0
SECONDS_A_STREAM = 0.5
"""Assumed duration of a stream, which determines the number of kills. Streams run to completion."""
BATCH = {"max_tokens": 16384, "max_items": 32}
GENERATION = {
    "context_tokens": 512,
    "default_tokens": 48,
    "longest_tokens": 256,
    "chunk_tokens": 256,
}


def run(streams: int = STREAMS) -> Outcome:
    try:
        folder = smollm2_folder()
    except ConfigurationError as error:
        return Outcome([], {"not measured": error.message})
    catalog = generation_catalog(MODEL, folder, batch=BATCH, generation=GENERATION)
    kills = max(4, round(streams * SECONDS_A_STREAM / KILL_EVERY_S))
    with (
        tempfile.TemporaryDirectory(prefix="penstock-streams-") as temporary,
        World(Path(temporary), served=(MODEL, catalog)) as world,
    ):
        readers = StreamReaders(world, MODEL, tokens=TOKENS, in_flight=IN_FLIGHT)
        findings = asyncio.run(
            read_while_killing(
                readers,
                world,
                streams=streams,
                kills=kills,
                every_s=KILL_EVERY_S,
                say=lambda line: print(f"  {line}", flush=True),
            )
        )
    return _outcome(findings)


def _outcome(findings: StreamFindings) -> Outcome:
    figures = [
        Figure("streams", len(findings.streams), ""),
        Figure("kills", len(findings.kills), ""),
        expect_none("streams with a flaw", len(findings.flaws())),
    ]
    details: dict[str, object] = {"flaws": findings.flaws()[:20]}
    for label, targets, limit_s in (("an API instance", APIS, 2.0), ("a worker", WORKERS, 12.0)):
        waits_s = findings.resumes_s(targets)
        details[f"longest waits after kills of {label}, s"] = [
            round(wait_s, 2) for wait_s in waits_s
        ]
        if waits_s:
            name = f"longest wait for the next event after a kill of {label}"
            figures.append(Figure(name, max(waits_s), "s", "<=", limit_s))
            figures.append(Figure(f"{name}, median", statistics.median(waits_s), "s"))
    resumes = sum(stream.resumes - 1 for stream in findings.streams)
    figures.append(Figure("times that a reader went on", resumes, ""))
    return Outcome(figures, details)
