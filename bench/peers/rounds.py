"""The measurement: all contenders run, but one at a time is awake, and all get the same texts."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.load.generator import LoadReport, percentiles
from bench.load.texts import Texts
from bench.peers.answers import vector_of
from bench.peers.loads import Load
from bench.peers.reference import cosine, vectors_of
from bench.peers.roster import Contender
from bench.peers.serving import Serving, serving
from shared.errors import PenstockError

WARM_UP_TEXTS = 200
WARM_UP_S = 3.0
WARM_UP_IN_FLIGHT = 16
UNREAD = "not a vector"
Sample = tuple[str, list[float]]
"""A text and the vector in the response to it."""


class Measured(msgspec.Struct):
    """One contender under one load in one round.

    CPU time covers all of the contender's processes, per completed request, by program. `vectors`
    is the number of responses that were compared with the reference.
    """

    contender: str
    load: str
    round: int
    sent: int
    rate: float
    round_trip_ms: dict[str, float]
    failures: dict[str, int]
    cpu_ms: dict[str, float]
    generator_cpu_ms: float
    vectors: int = 0
    cosine_mean: float = 0.0
    cosine_min: float = 0.0


class Started(msgspec.Struct):
    """A contender's startup: seconds to its first vector and memory, or why it is missing."""

    contender: str
    ready_s: float = 0.0
    memory_bytes: int = 0
    missing: str = ""


@dataclass
class Findings:
    """All measurements."""

    started: dict[str, Started] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)


def measure(
    contenders: Sequence[Contender],
    loads: Sequence[Load],
    rounds: int,
    model_folder: Path,
) -> Findings:
    """Starts all contenders, measures them in `rounds` rounds, stops them, and compares vectors.

    A contender that can't be started, or that dies, is omitted from then on, with the reason in
    `started`.
    """
    findings = Findings()
    texts = Texts(model_folder, seed=2)
    sampled: list[tuple[Measured, list[Sample]]] = []
    with ExitStack() as stack:
        awake = _start(contenders, texts, model_folder, stack, findings)
        for number in range(rounds):
            for load in (load for load in loads if load.is_in(number)):
                load_texts = load.texts(texts, seed=number)
                for peer in _rotate(awake, number):
                    if not findings.started[peer.contender.key].missing:
                        sampled += _one(peer, load, number, load_texts, findings)
        for peer in awake:
            peer.tree.thaw()
            findings.started[peer.contender.key].memory_bytes = peer.tree.memory_bytes()
            peer.tree.freeze()
    _compare(sampled, model_folder)
    return findings


def _start(
    contenders: Iterable[Contender],
    texts: Texts,
    model_folder: Path,
    stack: ExitStack,
    findings: Findings,
) -> list[Serving]:
    """Starts each contender while the others are frozen, warms it up, and freezes it."""
    awake = []
    for contender in contenders:
        started = findings.started[contender.key] = Started(contender.key)
        say(f"{contender.name}: starting")
        try:
            with ExitStack() as starting:
                peer = starting.enter_context(serving(contender, model_folder))
                peer.drive(texts.mixed(WARM_UP_TEXTS), WARM_UP_IN_FLIGHT, WARM_UP_S)
                stack.push(starting.pop_all())
        except (PenstockError, subprocess.SubprocessError) as error:
            started.missing = str(error)
            say(f"{contender.name}: left out: {error}")
            continue
        started.ready_s = peer.ready_s
        peer.tree.freeze()
        awake.append(peer)
    return awake


def _rotate(awake: list[Serving], number: int) -> list[Serving]:
    """Returns a round's order: each round starts with a different contender."""
    at = number % len(awake) if awake else 0
    return awake[at:] + awake[:at]


def _one(
    one: Serving, load: Load, number: int, texts: list[str], findings: Findings
) -> list[tuple[Measured, list[Sample]]]:
    """Measures one contender under one load.

    Returns the measurement with its sampled texts and vectors.
    """
    one.tree.thaw()
    before_s, began_s = one.tree.cpu_s(), time.monotonic()
    try:
        report = one.drive(texts, load.in_flight, load.send_s, load.rate_per_s)
        after_s = one.tree.cpu_s()
    except subprocess.SubprocessError as error:
        findings.started[one.contender.key].missing = f"died at {load.name}: {error}"
        return []
    finally:
        one.tree.freeze()
    spent_s = {name: spent - before_s.get(name, 0.0) for name, spent in after_s.items()}
    answered = len(report.round_trip_ms)
    vectors, failures = _vectors(report, one.contender)
    measured = Measured(
        contender=one.contender.key,
        load=load.name,
        round=number,
        sent=report.sent,
        rate=report.rate,
        round_trip_ms=percentiles(report.round_trip_ms) if answered else {},
        failures=failures,
        cpu_ms=_per_request(spent_s, answered),
        generator_cpu_ms=1000 * report.cpu_s / max(report.sent, 1),
    )
    findings.measured.append(measured)
    took_s = time.monotonic() - began_s
    say(
        f"{load.name}, round {number + 1}, {one.contender.name}: {report.rate:.0f}/s, "
        f"{took_s:.1f} s {failures}"
    )
    return [(measured, [(texts[place], vector) for place, vector in vectors])]


def _vectors(
    report: LoadReport, contender: Contender
) -> tuple[list[tuple[int, list[float]]], dict[str, int]]:
    """Returns the sampled vectors by text number, and the failures.

    A response without a vector counts as a failure.
    """
    vectors, failures = [], dict(report.failures)
    for number, body in report.samples:
        try:
            vectors.append((number, vector_of(body, contender.answer)))
        except (ValueError, LookupError, TypeError):
            failures[UNREAD] = failures.get(UNREAD, 0) + 1
    return vectors, failures


def _per_request(spent_s: dict[str, float], answered: int) -> dict[str, float]:
    return {
        name: round(1000 * spent / max(answered, 1), 3)
        for name, spent in spent_s.items()
        if spent > 0
    }


def say(line: str) -> None:
    print(f"  {line}", flush=True)


def _compare(sampled: list[tuple[Measured, list[Sample]]], model_folder: Path) -> None:
    """Adds the cosine similarities to the reference once nothing else needs the cores."""
    wanted = {text for _, samples in sampled for text, _ in samples}
    reference = vectors_of(wanted, model_folder)
    for measured, samples in sampled:
        if cosines := [cosine(vector, reference[text]) for text, vector in samples]:
            measured.vectors = len(cosines)
            measured.cosine_mean, measured.cosine_min = statistics.fmean(cosines), min(cosines)
