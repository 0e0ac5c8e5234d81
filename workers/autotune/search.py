"""Chooses a backend: the fastest candidate within the tolerance of torch fp32.

Then determines the number of tokens per batch for that backend (batch_budget.py).

Candidates are timed in alternation, and only each one's best reading counts, because other programs
can only slow it down (decision 146).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import msgspec
import numpy as np

from shared.errors import ConfigurationError, PenstockError
from shared.models.catalog import Model
from workers.autotune.batch_budget import BudgetTiming, find_budget
from workers.autotune.benchmark_pool import BenchmarkPool
from workers.autotune.candidates import candidates, choose_layout
from workers.autotune.choice import Choice, Finding, Layout
from workers.autotune.hardware import Machine
from workers.models.artifact import Artifact, Calibration, read_calibration
from workers.models.backend import Backend, choose_unmeasured_backend
from workers.models.base import PreparedText
from workers.models.embedding.model_folder import read_sentence_folder

MARGIN = 1.05
"""How many times faster a later candidate must be, because short measurements are noisy."""
READINGS = 2
"""Readings per candidate. One if only a single candidate fits in memory."""
MEASURE_LIMIT_S = 10.0
"""No reading starts after this time, except the first. Loading libraries takes extra time."""
RATE_S = 0.5
READ_AGAIN_S = 1.0
"""Duration up to which a batch is timed twice, because the first run may include loading a GPU's
kernels. The effect on a longer batch is negligible.
"""
CALIBRATION_TEXTS = 40
_TOGETHER = 8
_LENGTHS = (9, 11, 60, 13, 12, 210, 10, 70, 14, 44, 12, 8, 52, 16, 11, 240, 13, 88, 10, 36)
"""Token counts of the timed texts: 60% are about 12, 30% about 60, and 10% about 230."""

Measure = Callable[[BenchmarkPool, Backend, Layout, Sequence[PreparedText]], float]
"""Measures a loaded backend's throughput with these texts in a given layout, in texts per second.
"""

LIBRARY_OF = {
    "torch": "workers.models.embedding.encoder_torch",
    "onnx": "workers.models.embedding.encoder_onnx",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchSpec:
    """A search's input.

    `processes` and `threads` are 0 if undecided. `texts` are used if there is no artifact.
    `memory_fraction` is the fraction of a GPU's memory that each process may use.
    """

    entry: Model
    folder: Path
    artifact: Artifact | None
    machine: Machine
    device: str
    processes: int
    threads: int
    texts: Sequence[PreparedText]
    memory_fraction: float = 1.0

    @property
    def is_gpu(self) -> bool:
        return self.machine.computes_on_gpu(self.device)

    @property
    def has_vectors(self) -> bool:
        """False for a cross-encoder, which has a single candidate and nothing to compare."""
        return self.entry.rerank == "cosine"

    @property
    def finds_budget(self) -> bool:
        """True if the entry allows batches that are larger than usual."""
        return self.entry.batch != self.entry.usual_batch

    def layout(self, backend: Backend) -> Layout:
        """Returns the number of processes and threads that `backend` would run with."""
        return choose_layout(
            self.processes, self.threads, self.machine, is_gpu=self.is_gpu, backend=backend.backend
        )


@dataclass(eq=False)
class _Option:
    """A backend within the tolerance, with its measurements."""

    backend: Backend
    layout: Layout
    finding: Finding


def measure(
    pool: BenchmarkPool, backend: Backend, layout: Layout, texts: Sequence[PreparedText]
) -> float:
    return pool.texts_per_s(texts, backend.call_tokens, layout, RATE_S)


def choose(
    spec: SearchSpec, *, meter: Measure = measure, clock: Callable[[], float] = time.monotonic
) -> Choice:
    """Returns the fastest candidate within the tolerance.

    Raises:
        ConfigurationError: the entry's backend or precision is not available within its tolerance.
    """
    listed, findings = candidates(spec.entry, spec.artifact, spec.machine, is_gpu=spec.is_gpu)
    needed = [
        candidate
        for number, candidate in enumerate(listed)
        if not _outdone_by(candidate, listed[:number], spec)
    ]
    libraries = [LIBRARY_OF[name] for name in dict.fromkeys(backend.backend for backend in needed)]
    with BenchmarkPool(
        spec.entry, spec.folder, spec.device, spec.machine, libraries, spec.memory_fraction
    ) as pool:
        accuracy = _AccuracyCheck(spec, pool)
        options = _fitting(spec, accuracy, listed, findings)

        def time_option(option: _Option) -> float:
            pool.open(option.backend, option.layout)
            if not option.backend.call_tokens:
                cost = pool.call_tokens(accuracy.texts[0], accuracy.longest)
                option.backend = msgspec.structs.replace(option.backend, call_tokens=cost)
            return meter(pool, option.backend, option.layout, accuracy.mix)

        readings = READINGS if pool.keeps_several and len(options) > 1 else 1
        winner = _find_fastest(options, time_option, clock, readings)
        if winner is None:
            return _without_figures(spec, findings)
        choice = Choice(
            backend=winner.backend,
            layout=winner.layout,
            reason=f"fastest within cosine {spec.entry.tolerance.cosine:g} of torch fp32: "
            f"{winner.finding.texts_per_s:.0f} texts/s",
            findings=findings,
        )
        if spec.finds_budget:
            _find_budget(spec, choice, pool, meter, accuracy.mix)
        return choice


def _find_fastest(
    options: Sequence[_Option],
    time_option: Callable[[_Option], float],
    clock: Callable[[], float],
    readings: int,
) -> _Option | None:
    """Times the options, and returns the fastest one. None if none could be timed.

    An option replaces an earlier one only if it is more than MARGIN times as fast. Fills in the
    findings.
    """
    timed: list[_Option] = []
    began_s = clock()
    for option in [*options] * readings:
        finding = option.finding
        if finding.reason:
            continue
        if timed and clock() - began_s > MEASURE_LIMIT_S:
            if option not in timed:
                finding.reason = f"not measured: exceeded {MEASURE_LIMIT_S:g} s"
            continue
        try:
            finding.texts_per_s = max(finding.texts_per_s, round(time_option(option), 1))
        except PenstockError as error:
            finding.reason = error.message
        else:
            timed.append(option)
    winner = None
    for option in options:
        if not option.finding.reason and (
            winner is None or option.finding.texts_per_s > MARGIN * winner.finding.texts_per_s
        ):
            winner = option
    return winner


def _find_budget(
    spec: SearchSpec,
    choice: Choice,
    pool: BenchmarkPool,
    meter: Measure,
    mix: Sequence[PreparedText],
) -> None:
    """Times batches in the chosen backend and layout, and adds the result to `choice`.

    If there is no result, for example because a process died, batches use the usual size for a day.
    """

    def measure_batch(tokens: int) -> BudgetTiming:
        return time_batch(pool, choice, mix, tokens, meter)

    usual = spec.entry.usual_batch.max_tokens or 0
    try:
        pool.open(choice.backend, choice.layout)
        choice.batch_tokens, choice.budgets = find_budget(
            measure_batch, usual, spec.entry.budget, spec.entry.deadline.default_s
        )
    except PenstockError as error:
        log.warning("batch size not measured", extra={"reason": error.message})
        choice.is_provisional = True


def time_batch(
    pool: BenchmarkPool,
    choice: Choice,
    mix: Sequence[PreparedText],
    tokens: int,
    meter: Measure = measure,
) -> BudgetTiming:
    """Times batches of `tokens` with the chosen layout and the backend that is already loaded.

    Raises:
        OutOfMemory: the device has too little memory.
    """
    texts = _texts_of(mix, tokens)
    texts_per_s = meter(pool, choice.backend, choice.layout, texts)
    if choice.layout.processes * len(texts) / texts_per_s <= READ_AGAIN_S:
        texts_per_s = max(texts_per_s, meter(pool, choice.backend, choice.layout, texts))
    total = sum(text.length for text in texts)
    return BudgetTiming(
        tokens=tokens,
        tokens_per_s=round(texts_per_s * total / len(texts), 1),
        batch_s=round(choice.layout.processes * len(texts) / texts_per_s, 6),
    )


def _texts_of(mix: Sequence[PreparedText], tokens: int) -> list[PreparedText]:
    """Returns texts from the mix with this many tokens in total, or slightly fewer."""
    again = cycle(mix)
    texts = [next(again)]
    free = tokens - texts[0].length
    while (text := next(again)).length <= free:
        texts.append(text)
        free -= text.length
    return texts


def _fitting(
    spec: SearchSpec, accuracy: _AccuracyCheck, listed: Sequence[Backend], findings: list[Finding]
) -> list[_Option]:
    """Returns the candidates within the tolerance. Appends all findings to `findings`."""
    fit: list[_Option] = []
    for backend in listed:
        finding = Finding(name=backend.name)
        findings.append(finding)
        finding.reason = _outdone_by(backend, [option.backend for option in fit], spec)
        if finding.reason:
            continue
        layout = spec.layout(backend)
        try:
            if spec.has_vectors:
                accuracy.prepare(layout)
            accuracy.pool.open(backend, layout)
            if not spec.has_vectors or accuracy.is_within(finding):
                fit.append(_Option(backend, layout, finding))
        except PenstockError as error:
            finding.reason = error.message
    return fit


def _outdone_by(backend: Backend, fit: Sequence[Backend], spec: SearchSpec) -> str:
    """Returns the reason torch fp32 need not be measured in addition to `fit`.

    Empty if it must be measured.
    """
    if (backend.backend, backend.precision) != ("torch", "fp32"):
        return ""
    if any(variant.backend == "torch" for variant in fit):  # listed only if they are faster
        return "not measured: torch is faster with fewer bits"
    is_x86_cpu = "avx2" in spec.machine.flags and not spec.is_gpu
    if is_x86_cpu and any(
        (variant.backend, variant.precision) == ("onnx", "fp32") for variant in fit
    ):
        return "not measured: ONNX Runtime computes fp32 faster on this CPU"
    return ""


class _AccuracyCheck:
    """The calibration set with torch fp32's vectors, from the artifact or computed here."""

    def __init__(self, spec: SearchSpec, pool: BenchmarkPool) -> None:
        self.pool = pool
        self.longest = read_sentence_folder(spec.folder).max_length
        self._tolerance = spec.entry.tolerance.cosine
        self._calibration = _read_calibration_sample(spec.artifact)
        self.texts = spec.texts if self._calibration is None else self._calibration.texts
        self.mix = mix_of(self.texts, self.longest)

    def prepare(self, layout: Layout) -> None:
        """Computes the reference if the artifact doesn't contain it."""
        if self._calibration is None:
            self.pool.open(Backend(), layout)
            self._calibration = Calibration(self.texts, self.pool.vectors(self.texts, 1))

    def is_within(self, finding: Finding) -> bool:
        """Returns whether the loaded backend is within the tolerance. Fills in the finding."""
        assert self._calibration is not None, "prepare() was not called; this is a bug"
        vectors = self.pool.vectors(self.texts, _TOGETHER)
        cosines = _cosines(vectors, self._calibration.vectors)
        finding.cosine_min, finding.cosine_mean = float(cosines.min()), float(cosines.mean())
        if not finding.cosine_min >= self._tolerance:
            finding.reason = (
                f"minimum cosine {finding.cosine_min:.5f} is below the tolerance of "
                f"{self._tolerance:g}"
            )
        return not finding.reason


def _read_calibration_sample(artifact: Artifact | None) -> Calibration | None:
    """Returns evenly spaced samples of the artifact's texts."""
    if artifact is None:
        return None
    try:
        calibration = read_calibration(artifact)
    except ConfigurationError as error:
        log.warning("calibration set ignored", extra={"reason": error.message})
        return None
    step = max(1, len(calibration.texts) // CALIBRATION_TEXTS)
    return Calibration(calibration.texts[::step], calibration.vectors[::step])


def mix_of(texts: Sequence[PreparedText], longest: int) -> list[PreparedText]:
    """Returns texts of _LENGTHS tokens, cut from the concatenated texts."""
    stream = cycle(np.concatenate([np.frombuffer(text.ids, "<u4") for text in texts]).tolist())
    mix = []
    for length in _LENGTHS:
        ids = np.array(list(islice(stream, min(length, longest))), "<u4")
        mix.append(PreparedText(key="", length=len(ids), ids=ids.tobytes()))
    return mix


def _cosines(vectors: np.ndarray, reference: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
    return np.asarray((vectors * reference).sum(axis=1) / norms)


def _without_figures(spec: SearchSpec, findings: list[Finding]) -> Choice:
    """Returns torch fp32, which is the reference, if the entry allows it."""
    entry = spec.entry
    reasons = "; ".join(f"{finding.name}: {finding.reason}" for finding in findings)
    if entry.precision in ("auto", "fp32") and entry.backend != "onnx":
        return Choice(
            backend=choose_unmeasured_backend(entry),
            layout=spec.layout(Backend()),
            reason=f"no backend could be measured, so torch fp32 is used ({reasons})",
            findings=findings,
        )
    raise ConfigurationError(
        f"{entry.name}: no {entry.backend} backend with precision {entry.precision} is "
        f"within its tolerance ({reasons})",
        field="backend",
    )
