"""The choice itself: candidates are checked against torch fp32, those within the tolerance timed, the fastest taken."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import msgspec
import numpy as np

from shared.catalogue import Model as Entry
from shared.errors import ConfigurationError, PenstockError
from workers.choose.candidates import candidates, layouts
from workers.choose.choice import Choice, Finding, Layout
from workers.choose.machine import Machine
from workers.choose.probes import Probes
from workers.models.artifact import Artifact, Calibration, read_calibration
from workers.models.backend import Backend, unmeasured_backend
from workers.models.base import PreparedText
from workers.models.sentence_folder import read_sentence_folder

MEASURE_LIMIT_S = 7.0
"""After this no further candidate is begun; loading the libraries comes on top."""
RATE_S = 0.6
MARGIN = 1.05
"""What comes later must be this much faster: the noise of such short measurements."""
CALIBRATION_TEXTS = 40
_TOGETHER = 8
_LENGTHS = (9, 11, 60, 13, 12, 210, 10, 70, 14, 44, 12, 8, 52, 16, 11, 240, 13, 88, 10, 36)
"""Tokens of the timed texts: 60 % about 12, 30 % about 60, 10 % about 230."""

Meter = Callable[[Probes, Backend, Layout, Sequence[PreparedText]], float]
"""Texts per second of an opened backend in a layout, at these texts."""
_Rate = tuple[float, Backend, Layout]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """What is to be chosen for. `processes`, `threads`: 0 where they are open; `texts` stand in for an artifact's."""

    entry: Entry
    folder: Path
    artifact: Artifact | None
    machine: Machine
    device: str
    processes: int
    threads: int
    texts: Sequence[PreparedText]

    @property
    def is_gpu(self) -> bool:
        """Whether the model runs on a GPU."""
        return self.machine.computes_on_gpu(self.device)


def measure(probes: Probes, backend: Backend, layout: Layout, texts: Sequence[PreparedText]) -> float:
    """The meter that is used."""
    return probes.texts_per_s(texts, backend.call_tokens, layout, RATE_S)


def choose(question: Question, *, meter: Meter = measure, clock: Callable[[], float] = time.monotonic) -> Choice:
    """The fastest candidate within the tolerance, in its fastest layout.

    Args:
        question: what to choose for.
        meter: what times a candidate.
        clock: seconds, for the limit on measuring.

    Raises:
        ConfigurationError: the entry's backend or precision can't be had within its tolerance.
    """
    entry = question.entry
    listed, findings = candidates(entry, question.artifact, question.machine, is_gpu=question.is_gpu)
    forms = layouts(question.processes, question.threads, question.machine, is_gpu=question.is_gpu)
    rates: list[_Rate] = []
    spent_s = 0.0
    with Probes(entry, question.folder, question.device, len(question.machine.gpus)) as probes:
        comparison = _Comparison(question, probes)
        for backend in listed:
            finding = Finding(name=backend.name)
            findings.append(finding)
            # Never before something is found that may serve.
            if rates and spent_s > MEASURE_LIMIT_S:
                finding.reason = f"not measured: {MEASURE_LIMIT_S:g} s were over"
                continue
            if _is_outdone(backend, rates):
                finding.reason = "not measured: torch computes it faster in fewer bits"
                continue
            try:
                comparison.prepare(forms[0])
                probes.open(backend, forms[0])
                began_s = clock()
                if comparison.is_within(finding):
                    rates += _rates(comparison, backend, forms, finding, meter)
                spent_s += clock() - began_s
            except PenstockError as error:
                finding.reason = error.message
    if not rates:
        return _without_figures(entry, forms[0], findings)
    rate, backend, layout = _fastest(rates)
    return Choice(
        backend=backend,
        layout=layout,
        reason=f"fastest within cosine {entry.tolerance.cosine:g} of torch fp32: {rate:.0f} texts/s",
        findings=findings,
    )


def _is_outdone(backend: Backend, rates: Sequence[_Rate]) -> bool:
    """Whether it is torch in fp32 where torch in fewer bits will do, which is listed only where that is faster."""
    narrower = any(one.backend == "torch" and one.precision != "fp32" for _, one, _ in rates)
    return (backend.backend, backend.precision) == ("torch", "fp32") and narrower


class _Comparison:
    """The calibration set with torch fp32's vectors: the artifact's, which spares importing torch, or computed here."""

    def __init__(self, question: Question, probes: Probes) -> None:
        self.probes = probes
        self.longest = read_sentence_folder(question.folder).max_length
        self._tolerance = question.entry.tolerance.cosine
        self._calibration = _kept_calibration(question.artifact)
        self.texts = question.texts if self._calibration is None else self._calibration.texts
        self.mix = _mix_of(self.texts, self.longest)

    def prepare(self, form: Layout) -> None:
        """Computes the reference where none was kept."""
        if self._calibration is None:
            self.probes.open(Backend(), form)
            self._calibration = Calibration(self.texts, self.probes.vectors(self.texts, 1))

    def is_within(self, finding: Finding) -> bool:
        """Whether the opened backend keeps to the tolerance; fills in the finding."""
        assert self._calibration is not None, "prepared before; this is a bug"
        given = self.probes.vectors(self.texts, _TOGETHER)
        cosines = _cosines(given, self._calibration.vectors)
        finding.cosine_min, finding.cosine_mean = float(cosines.min()), float(cosines.mean())
        if not finding.cosine_min >= self._tolerance:
            finding.reason = f"cosine {finding.cosine_min:.5f} at least, tolerated is {self._tolerance:g}"
        return not finding.reason


def _kept_calibration(artifact: Artifact | None) -> Calibration | None:
    """Some of the artifact's texts, evenly spread over it."""
    if artifact is None:
        return None
    try:
        kept = read_calibration(artifact)
    except ConfigurationError as error:
        log.warning("calibration set ignored", extra={"reason": error.message})
        return None
    step = max(1, len(kept.texts) // CALIBRATION_TEXTS)
    return Calibration(kept.texts[::step], kept.vectors[::step])


def _mix_of(texts: Sequence[PreparedText], longest: int) -> list[PreparedText]:
    """Texts of _LENGTHS tokens, made of the given ones end to end."""
    stream = cycle(np.concatenate([np.frombuffer(text.ids, "<u4") for text in texts]).tolist())
    mix = []
    for length in _LENGTHS:
        ids = np.array(list(islice(stream, min(length, longest))), "<u4")
        mix.append(PreparedText(key="", length=len(ids), ids=ids.tobytes()))
    return mix


def _cosines(given: np.ndarray, reference: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(given, axis=1) * np.linalg.norm(reference, axis=1)
    return np.asarray((given * reference).sum(axis=1) / norms)


def _rates(
    comparison: _Comparison, backend: Backend, forms: Sequence[Layout], finding: Finding, meter: Meter
) -> list[_Rate]:
    """The rate of the opened backend in each layout."""
    cost = comparison.probes.call_tokens(comparison.texts[0], comparison.longest)
    backend = msgspec.structs.replace(backend, call_tokens=cost)
    rates = []
    for form in forms:
        comparison.probes.open(backend, form)
        rate = meter(comparison.probes, backend, form, comparison.mix)
        finding.texts_per_s[form.name] = round(rate, 1)
        rates.append((rate, backend, form))
    return rates


def _fastest(rates: Sequence[_Rate]) -> _Rate:
    best = rates[0]
    for other in rates[1:]:
        if other[0] > best[0] * MARGIN:
            best = other
    return best


def _without_figures(entry: Entry, layout: Layout, findings: list[Finding]) -> Choice:
    """Torch fp32, which is the reference, where the entry allows it."""
    reasons = "; ".join(f"{finding.name}: {finding.reason}" for finding in findings)
    if entry.precision in ("auto", "fp32") and entry.backend != "onnx":
        reason = f"nothing could be measured, so torch fp32 ({reasons})"
        return Choice(backend=unmeasured_backend(entry), layout=layout, reason=reason, findings=findings)
    raise ConfigurationError(
        f"{entry.name}: no {entry.backend} backend in {entry.precision} keeps to its tolerance ({reasons})",
        field="backend",
    )
