"""Reference results for tests of the transcriber.

Runs in the Python environment that contains the transcriber's packages.

`direct`: faster-whisper, called directly. `windows`: faster-whisper's windows for a recording,
compared with the streamed ones. `random`: the same with random speech probabilities. `cuts`: where
continuous speech is cut. `steps`: the classes in a flow, one after another. `longer`: builds a long
recording from others.
"""

from __future__ import annotations

import importlib.util
import json
import random
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

EXAMPLES = Path(__file__).parent.parent
sys.path.insert(0, str(EXAMPLES / "transcribe"))
import windows as ours  # noqa: E402  its folder comes first
from decoding import BLOCK_S  # noqa: E402

VAD = {"max_speech_duration_s": ours.WINDOW_S, "min_silence_duration_ms": 160}
"""Options of faster-whisper's BatchedInferencePipeline."""
PAUSES_S = (0.2, 0.4, 0.8, 1.5, 3.0, 8.0)


def whole(path: str) -> Any:
    """Returns all samples of a recording."""
    return np.concatenate([np.zeros(0, np.float32), *ours.decode(Path(path))])


def chunks_of(samples: Any) -> tuple[list[list[int]], list[Any]]:
    """Returns the positions of speech, and the windows that faster-whisper makes from them."""
    vad = ours.faster_whisper().vad
    parts = vad.get_speech_timestamps(samples, vad.VadOptions(**VAD))
    places = [[part["start"], part["end"]] for part in parts]
    chunks, _ = vad.collect_chunks(samples, parts, max_duration=ours.WINDOW_S)
    return places, chunks if parts else []


def same(cut: list[ours.Window], places: list[list[int]], chunks: list[Any]) -> bool:
    """Returns whether the windows equal these chunks."""
    return (
        [place for window in cut for place in window.places] == places
        and len(cut) == len(chunks)
        and all(map(np.array_equal, [window.samples for window in cut], chunks))
    )


def show_windows(path: str) -> None:
    """Prints the number of windows in a recording. Fails if faster-whisper's windows differ."""
    cut = list(ours.windows_of(Path(path)))
    assert same(cut, *chunks_of(whole(path)))
    print(len(cut))


def probabilities(rng: np.random.Generator) -> Any:
    """Returns speech probabilities for frames, in runs of many lengths or in random order."""
    frames = int(rng.integers(1, 4000))
    if rng.random() < 0.3:
        return rng.random(frames).astype(np.float32)
    runs = list[Any]()
    while sum(len(run) for run in runs) < frames:
        length = int(rng.choice([1, 2, 4, 6, 20, 60, 200, 900]))
        runs.append(np.full(length, rng.choice([0.1, 0.4, 0.9], p=[0.4, 0.15, 0.45]), np.float32))
    together = np.concatenate(runs)[:frames]
    # Includes occasional pauses, because without them, faster-whisper cuts speech mid-word.
    for start in range(400, len(together), 400):
        together[start : start + 5] = 0.1
    return together


class Detector:
    """Returns predefined probabilities."""

    known: Any = None

    def __init__(self) -> None:
        self.at = 0

    def probabilities(self, samples: Any) -> list[float]:
        first, self.at = self.at, self.at + len(samples) // ours.FRAME
        return [float(probability) for probability in Detector.known[first : self.at]]


def show_random(count: str) -> None:
    """Prints the maximum seconds of audio held at once, for windows of random parts."""
    vad, most = ours.faster_whisper().vad, 0
    setattr(ours, "SpeechDetector", Detector)  # noqa: B010  one that knows them
    for seed in range(int(count)):
        rng = np.random.default_rng(seed)
        Detector.known = probabilities(rng)
        vad.get_vad_model = lambda: lambda padded: Detector.known
        length = len(Detector.known) * ours.FRAME - int(rng.integers(1, ours.FRAME + 1))
        samples = (np.arange(length) % 30_000).astype(np.float32)
        cutter, cut, at = ours.Cutter(), list[ours.Window](), 0
        while at < length:
            step = int(rng.integers(1, BLOCK_S * ours.RATE_HZ + 1))
            cut += cutter.add(samples[at : at + step])
            most, at = max(most, cutter.held), at + step
        cut += cutter.finish()
        assert same(cut, *chunks_of(samples)), seed
    print(most / ours.RATE_HZ)


def show_cuts() -> None:
    """Prints where continuous speech is cut, in seconds. Every 7 s, it is quiet for 64 ms."""
    setattr(ours, "SpeechDetector", Detector)  # noqa: B010  one that knows them
    seconds = 100
    Detector.known = np.full(seconds * ours.RATE_HZ // ours.FRAME + 1, 0.9, np.float32)
    samples = np.random.default_rng(1).normal(0, 0.1, seconds * ours.RATE_HZ).astype(np.float32)
    for start in range(7 * ours.RATE_HZ, len(samples), 7 * ours.RATE_HZ):
        samples[start : start + 2 * ours.FRAME] *= 0.1
    cutter = ours.Cutter()
    windows = [*cutter.add(samples), *cutter.finish()]
    assert np.array_equal(np.concatenate([window.samples for window in windows]), samples)
    assert all(len(window.samples) <= ours.WINDOW_S * ours.RATE_HZ for window in windows)
    print(json.dumps([window.parts[0].start / ours.RATE_HZ for window in windows[1:]]))


def predictor_of(name: str) -> Any:
    """Returns an example's class after its setup."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / name / "predict.py")
    assert spec is not None
    assert spec.loader is not None
    sys.path.insert(0, str(EXAMPLES / name))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    predictor = module.Predictor()
    if hasattr(predictor, "setup"):
        predictor.setup()
    return predictor


DEFAULTS = {
    "language": "",
    "prompt": "",
    "temperature": 0.0,
    "task": "transcribe",
    "word_timestamps": True,
}


def show_steps(path: str) -> None:
    """Prints the transcript produced by a flow's steps.

    Fails if it differs from the transcript of the whole recording.
    """
    cut = predictor_of("windows").predict(Path(path))
    predictor = predictor_of("transcribe")
    segments = [
        list(predictor.predict(window, **DEFAULTS, vad_filter=False)) for window in cut.windows
    ]
    windows = {"segments": segments, "parts": cut.parts}
    joined = list(predictor_of("transcript").predict(windows, cut.duration))
    assert joined == list(predictor.predict(Path(path), **DEFAULTS, vad_filter=True))
    print(json.dumps([len(segments), joined]))


def show_samples(path: str) -> None:
    """Fails unless identical windows produce identical texts, even with another one in between."""
    predictor = predictor_of("transcribe")
    texts = [
        [
            segment["text"]
            for segment in predictor.predict(Path(path), **(DEFAULTS | {"temperature": heat}))
        ]
        for heat in (1.0, 0.8, 1.0)
    ]
    assert texts[0] == texts[2], texts
    print(json.dumps(texts))


def watch(hears: Any) -> list[float]:
    """Records the temperatures of all of a model's generations, even those without a segment."""
    heats, generate = list[float](), type(hears).generate_with_fallback

    def generate_and_tell(*arguments: Any) -> Any:
        result = generate(hears, *arguments)
        heats.append(result[2])
        return result

    hears.generate_with_fallback = generate_and_tell
    return heats


def show_direct(kind: str, path: str) -> None:
    """Prints the text from calling faster-whisper directly, and the resources used.

    Args:
        kind: `sequence`: the whole recording, with each text prompted by the previous ones.
            `batched`: BatchedInferencePipeline. `windows`: the same windows, but each as a separate
            recording with its own temperatures.
    """
    import ctranslate2

    began_s, began_clock_s = time.process_time(), time.monotonic()
    package = ours.faster_whisper()
    load = partial(
        package.WhisperModel,
        str(EXAMPLES / "transcribe" / "weights"),
        device="cpu",
        compute_type="int8",
        cpu_threads=1,
    )
    model = load()
    samples = whole(path)
    if kind == "sequence":
        segments = list(model.transcribe(samples, vad_filter=True)[0])
    elif kind == "batched":
        pipeline = package.BatchedInferencePipeline(model)
        options = {"batch_size": 1, "without_timestamps": False}
        segments = list(pipeline.transcribe(samples, **options)[0])
    else:
        chunks = chunks_of(samples)[1]
        segments = []
        for chunk in chunks:
            ctranslate2.set_random_seed(0)
            heats = watch(model)
            segments += model.transcribe(chunk)[0]
            if any(heats):
                model = load()  # its thread accepts only one seed
    text = "".join(segment.text for segment in segments).strip()
    used_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    took = {
        "cpu_s": time.process_time() - began_s,
        "wall_s": time.monotonic() - began_clock_s,
        "mib": used_mib,
    }
    print(json.dumps({"text": text} | took))


def make_longer(target: str, minutes: str, *paths: str) -> None:
    """Builds a long recording from others, varying their order, loudness and distance.

    No two windows are identical, so nothing comes from a cache. Prints the order.
    """
    rng, order = random.Random(41), list[int]()
    recordings = [soundfile.read(path, dtype="float32")[0] for path in paths]
    samples_left = int(float(minutes) * 60 * ours.RATE_HZ)
    with soundfile.SoundFile(target, "w", ours.RATE_HZ, 1, "PCM_16") as file:
        while samples_left > 0:
            for number in rng.sample(range(len(paths)), len(paths)):
                pause = np.zeros(int(rng.choice(PAUSES_S) * ours.RATE_HZ), np.float32)
                sound = np.concatenate([recordings[number] * rng.uniform(0.5, 0.95), pause])
                if samples_left > 0:
                    order.append(number)
                    file.write(sound)
                samples_left -= len(sound)
    print(json.dumps(order))


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    began_s = time.process_time()
    kinds: dict[str, Any] = {
        "windows": show_windows,
        "random": show_random,
        "cuts": show_cuts,
        "steps": show_steps,
        "samples": show_samples,
        "direct": show_direct,
        "longer": make_longer,
    }
    kinds[kind](*arguments)
    used_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{kind}: {time.process_time() - began_s:.1f} s of CPU, {used_mib} MiB", file=sys.stderr)
