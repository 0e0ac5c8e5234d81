"""Decodes the audio measured by recordings.py, in the format that Whisper expects.

libsndfile decodes a file block by block if its header declares the length that was counted. FFmpeg
decodes everything else, all at once: m4a and webm, and files whose header is wrong. Both come in
LGPL wheels (docs/decisions/0101-speech.md).
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import codecpod
import numpy as np
import soundfile
import soxr
from recordings import InvalidInput, Part, find_parts

RATE_HZ = 16_000
"""Whisper's sample rate."""
BLOCK_S = 30
FULL_SCALE = 32_768
TOLERANCE_S = 0.1
"""Maximum amount of audio that may be missing, such as a truncated frame or samples added by an
encoder.
"""
MAX_WHOLE_S = 4 * 3600
"""Maximum seconds of one channel that FFmpeg may decode at once. Decoding that much uses about 2
GiB.
"""
CANCELED_BELOW = 0.05
"""Two channels cancel out if their mean has under this share of the louder one's power."""


def decode(path: Path) -> Iterator[Any]:
    """Yields a recording in blocks: float32, one channel, RATE_HZ, rounded to 16 bits.

    Raises:
        InvalidInput: the file is not a recording, is damaged, or has no audio.
    """
    done_s = 0.0
    for part in find_parts(path):
        count = 0
        for block in _decode_part(part, path, done_s):
            count += len(block)
            yield _round(block)
        done_s += count / RATE_HZ
        if abs(part.seconds - count / RATE_HZ) > TOLERANCE_S:
            raise _incomplete(done_s)


def _decode_part(part: Part, path: Path, done_s: float) -> Iterator[Any]:
    """Yields a part's samples. `done_s` is how many seconds of audio precede it."""
    try:
        file = soundfile.SoundFile(str(path) if part.is_file else io.BytesIO(part.data))
    except soundfile.LibsndfileError:
        yield from _decode_whole(part, done_s)
        return
    with file:
        if abs(file.frames / file.samplerate - part.seconds) > TOLERANCE_S:
            yield from _decode_whole(part, done_s)
            return
        yield from _decode_blocks(file, done_s)


def _decode_blocks(file: Any, done_s: float) -> Iterator[Any]:
    """Yields the samples of a file that libsndfile reads, at RATE_HZ."""
    resampler, count = None, 0
    if file.samplerate != RATE_HZ:
        resampler = soxr.ResampleStream(file.samplerate, RATE_HZ, 1, dtype="float32")
    while True:
        try:
            block = file.read(BLOCK_S * file.samplerate, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise _incomplete(done_s + count / file.samplerate) from error
        count += len(block)
        if not len(block):
            break
        samples = mix(block)
        yield samples if resampler is None else resampler.resample_chunk(samples)
    if resampler is not None:
        yield resampler.resample_chunk(np.zeros(0, np.float32), last=True)


def _decode_whole(part: Part, done_s: float) -> Iterator[Any]:
    """Yields the samples of a part that FFmpeg decodes, at RATE_HZ."""
    try:
        channels = codecpod.info(part.data).channels
        if part.seconds * channels > MAX_WHOLE_S:
            hours = MAX_WHOLE_S / 3600 / channels
            raise InvalidInput("file", f"longer than {hours:g} hours; send it as flac, mp3 or ogg")
        samples, _ = codecpod.load(part.data, sample_rate=RATE_HZ, channels_first=False)
    except codecpod.CodecpodError as error:
        raise _incomplete(done_s) from error
    samples = samples.reshape(len(samples), -1)
    for start in range(0, len(samples), BLOCK_S * RATE_HZ):
        yield mix(samples[start : start + BLOCK_S * RATE_HZ])


def _incomplete(seconds: float) -> InvalidInput:
    return InvalidInput("file", f"it is damaged: it can't be read past {seconds:.1f} s")


def mix(block: Any) -> Any:
    """Mixes several channels into one, second by second.

    The result is their mean, or the loudest channel if they cancel each other out because two wires
    were swapped. Samples that are not numbers become silence.

    Args:
        block: float32, (samples, channels).
    """
    block = np.nan_to_num(block, nan=0.0, posinf=1.0, neginf=-1.0)
    if block.shape[1] == 1:
        return block[:, 0]
    mixed = block.mean(axis=1)
    for start in range(0, len(block), RATE_HZ):
        piece = slice(start, start + RATE_HZ)
        powers = np.square(block[piece]).mean(axis=0)
        if np.square(mixed[piece]).mean() < CANCELED_BELOW * powers.max():
            mixed[piece] = block[piece, powers.argmax()]
    return mixed


def _round(samples: Any) -> Any:
    """Rounds to 16 bits, so a window is the same even if it was stored in a file in between."""
    whole = np.clip(np.rint(samples * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1)
    return whole.astype(np.float32) / np.float32(FULL_SCALE)
