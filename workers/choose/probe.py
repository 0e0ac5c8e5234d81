"""A probe: a process that opens one candidate after another and times it, as a model process would run it.

One process for all candidates, so that a library's seconds of import are paid once; in a process of its own, so that a
candidate that crashes takes nothing else with it. These functions run in it, one call at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shared.catalogue import Model as Entry
from shared.messages import EmbeddingResult
from workers.models import model_for
from workers.models.backend import Backend
from workers.models.base import Model, PreparedText
from workers.models.grouping import cut_by_length

_SHAPES = ((1, 8), (1, 32), (4, 16), (4, 64), (1, 192))
"""Texts and tokens of the calls that the costs are found from; all far enough apart to tell them."""
_REPEATS = 3
_CALL_TOKENS_MAX = 16384


class _Opened(NamedTuple):
    model: Model
    seconds: Callable[[], float]


_opened: list[_Opened] = []


def open_model(entry: Entry, folder: Path, backend: Backend, device: str, threads: int) -> None:
    """Loads a candidate in place of the last one.

    Raises:
        PenstockError: it can't be loaded here.
    """
    _opened.clear()
    model = model_for(entry, folder, device, backend=backend, threads=threads)
    model.setup()
    model.warmup()
    # One thread on a CPU is timed by the CPU seconds it got, so that what else runs here spoils no figure.
    is_alone = model.device_name == "cpu" and threads == 1
    _opened.append(_Opened(model, time.process_time if is_alone else time.perf_counter))


def vectors(texts: Sequence[PreparedText], together: int) -> np.ndarray:
    """Their vectors, float32 [texts, dimensions], computed `together` many at a time in order of length."""
    order = sorted(range(len(texts)), key=lambda place: texts[place].length)
    rows: dict[int, np.ndarray] = {}
    for at in range(0, len(order), together):
        places = order[at : at + together]
        for place, row in zip(places, _predict([texts[place] for place in places]), strict=True):
            rows[place] = row
    return np.stack([rows[place] for place in range(len(texts))])


def _predict(texts: Sequence[PreparedText]) -> list[np.ndarray]:
    results = _opened[0].model.predict(texts, lambda step, steps: None)
    return [np.frombuffer(result.vector, "<f4") for result in results if isinstance(result, EmbeddingResult)]


def call_tokens(text: PreparedText, longest: int) -> int:
    """What a call costs besides its tokens, in tokens: the least-squares line through the times of _SHAPES.

    Relative errors count, so that the short calls, which tell the cost, weigh as much as the long ones.
    """
    times_s, tokens = [], []
    for count, length in _SHAPES:
        batch = [_of_length(text, min(length, longest))] * count
        times_s.append(min(_time_s(batch) for _ in range(_REPEATS)))
        tokens.append(count * batch[0].length)
    lines = np.stack([1 / np.array(times_s), np.array(tokens) / np.array(times_s)], axis=1)
    (per_call_s, per_token_s), *_ = np.linalg.lstsq(lines, np.ones(len(times_s)), rcond=None)
    if per_token_s <= 0:  # more tokens cost nothing: a GPU far from full
        return _CALL_TOKENS_MAX
    return int(min(max(round(per_call_s / per_token_s), 1), _CALL_TOKENS_MAX))


def _of_length(text: PreparedText, length: int) -> PreparedText:
    repeats = -(-length // text.length)
    return PreparedText(key="", length=length, ids=(text.ids * repeats)[: 4 * length])


def _time_s(batch: Sequence[PreparedText]) -> float:
    seconds = _opened[0].seconds
    began_s = seconds()
    _predict(batch)
    return seconds() - began_s


def texts_per_s(texts: Sequence[PreparedText], call_cost: int, seconds: float) -> float:
    """The rate at `texts`, cut as a model process cuts a batch, in whole rounds of at least `seconds` together."""
    cut = [list(range(len(texts)))]
    if _opened[0].model.pads:
        cut = cut_by_length([text.length for text in texts], call_cost)
    groups = [[texts[place] for place in places] for places in cut]
    end_s = time.monotonic() + seconds
    rounds, spent_s = 0, 0.0
    while rounds == 0 or time.monotonic() < end_s:
        spent_s += sum(_time_s(group) for group in groups)
        rounds += 1
    return rounds * len(texts) / spent_s
