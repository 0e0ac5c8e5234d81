"""Creates recordings from ten sources, each damaged in six ways.

`corpus.py corpus SPEECH FOLDER` runs in the transcriber's Python environment. It prints one JSON
object per recording: its `path`, `origin` and `damage`, the `seconds` of audio in it, and how many
seconds are `counted` and `decoded`, or an `error`. The two Chromium recordings are in recorded/.
`lengths` instead creates recordings of several lengths.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import codecpod
import numpy as np
import soundfile
import soxr
from decoding import RATE_HZ, decode
from recordings import InvalidInput, count_seconds, mp3_frame

FINE_HZ = 44_100
KEPT_SHARE = 0.6
"""Fraction of bytes kept in a truncated recording."""
HOLE_BYTES = 600
ID3 = b"ID3\4\0\0\0\0\7\x68" + bytes(7 * 128 + 104)
ID3V1 = b"TAG" + bytes(125)
CHROMIUM_S = {"webm": 6.96, "mp4": 6.88}
"""Seconds that FFmpeg decodes from the files in recorded/."""


def make_origins(speech: Path, folder: Path) -> dict[str, tuple[Path, float]]:
    """Writes a recording in each format. Returns their paths and durations in seconds."""
    samples, rate = soundfile.read(speech, dtype="float32")
    fine = np.stack([soxr.resample(samples, rate, FINE_HZ)] * 2, axis=1)
    low = soxr.resample(samples, rate, 8000)
    seconds = len(samples) / rate
    writers: dict[str, Callable[[Path], object]] = {
        "pcm.wav": lambda path: soundfile.write(path, fine, FINE_HZ, "PCM_16"),
        "gsm.wav": lambda path: soundfile.write(path, low, 8000, "GSM610"),
        "flac.flac": lambda path: soundfile.write(path, fine, FINE_HZ, "PCM_16"),
        "constant.mp3": lambda path: codecpod.save(
            path, fine, FINE_HZ, codecpod.Mp3(bit_rate=64_000), channels_first=False
        ),
        "variable.mp3": lambda path: path.write_bytes(without_xing(variable_mp3(fine))),
        "vorbis.ogg": lambda path: soundfile.write(path, fine, FINE_HZ),
        "opus.ogg": lambda path: soundfile.write(
            path, soxr.resample(samples, rate, 48_000), 48_000, "OPUS", format="OGG"
        ),
        "aac.m4a": lambda path: codecpod.save(
            path, fine, FINE_HZ, codecpod.Aac(bit_rate=64_000), channels_first=False
        ),
    }
    origins = dict[str, tuple[Path, float]]()
    for name, write in writers.items():
        write(folder / name)
        origins[name] = (folder / name, seconds)
    for kind, chromium_s in CHROMIUM_S.items():
        path = folder / f"chromium.{kind}"
        shutil.copy(Path(__file__).parent / "recorded" / path.name, path)
        origins[path.name] = (path, chromium_s)
    return origins


def variable_mp3(samples: Any) -> bytes:
    """Returns a variable-bit-rate MP3."""
    file = io.BytesIO()
    options: dict[str, Any] = {"bitrate_mode": "VARIABLE", "compression_level": 0.3}
    soundfile.write(file, samples, FINE_HZ, format="MP3", **options)
    return file.getvalue()


def without_xing(data: bytes) -> bytes:
    """Removes an MP3's first frame, which has no audio and declares the number of frames."""
    frame = mp3_frame(data)
    assert frame is not None
    assert re.search(rb"Xing|Info", data[: frame.size])
    return data[frame.size :]


def lie(data: bytes, name: str) -> bytes:
    """Halves each length declared in a header, or marks it as unknown."""
    if name.endswith(".wav"):
        at = data.index(b"data") + 4
        return data[:4] + bytes(4) + data[8:at] + bytes(4) + data[at + 4 :]
    if name.endswith(".flac"):
        return data[:21] + bytes([data[21] & 0xF0]) + bytes(4) + data[26:]
    if name.endswith(".mp3"):
        at = max(data.find(b"Xing", 0, 300), data.find(b"Info", 0, 300)) + 8
        if at < 8:
            return data
        (frames,) = struct.unpack_from(">I", data, at)
        return data[:at] + struct.pack(">I", frames // 2) + data[at + 4 :]
    if name.endswith((".m4a", ".mp4")):
        at = data.index(b"mvhd") + 20
        return (
            data[:at]
            + struct.pack(">I", struct.unpack_from(">I", data, at)[0] // 2)
            + data[at + 4 :]
        )
    return data


def punch(data: bytes) -> bytes:
    """Overwrites bytes in the middle."""
    at = int(len(data) * KEPT_SHARE)
    noise = np.random.default_rng(7).bytes(HOLE_BYTES)
    return data[:at] + noise + data[at + HOLE_BYTES :]


def damage_all(path: Path, seconds: float) -> list[tuple[str, bytes, float | None]]:
    """Returns each kind of damage, the damaged bytes, and seconds of audio (None if unknown)."""
    data = path.read_bytes()
    return [
        ("none", data, seconds),
        ("joined", data + data, 2 * seconds),
        ("cut", data[: int(len(data) * KEPT_SHARE)], None),
        ("lied", lie(data, path.name), seconds),
        ("tagged", ID3 + data + ID3V1, seconds),
        ("hole", punch(data), seconds),
    ]


def read(path: Path) -> dict[str, Any]:
    """Returns how much of a file's audio is counted and how much is decoded."""
    try:
        counted = count_seconds(path)
        return {"counted": counted, "decoded": sum(map(len, decode(path))) / RATE_HZ}
    except InvalidInput as error:
        return {"error": str(error)}


def show_corpus(speech: str, folder: str) -> None:
    """Writes the recordings and prints what is read from each one."""
    for origin, (path, seconds) in make_origins(Path(speech), Path(folder)).items():
        for damage, data, left_s in damage_all(path, seconds):
            damaged = path.with_name(f"{path.stem}-{damage}{path.suffix}")
            damaged.write_bytes(data)
            about = {"path": str(damaged), "origin": origin, "damage": damage, "seconds": left_s}
            print(json.dumps(about | read(damaged)))


def show_lengths(speech: str, folder: str) -> None:
    """Prints what is read from recordings with various lengths, sample rates and channel counts.

    All of them end in silence, which some encoders write as very short frames.
    """
    samples, _ = soundfile.read(speech, dtype="float32")
    formats = {"a.wav": "PCM_24", "b.wav": "MS_ADPCM", "a.flac": "PCM_16", "a.aiff": "PCM_16"}
    formats |= {"a.mp3": "MPEG_LAYER_III", "a.ogg": "VORBIS"}
    codecs = {"a.m4a": codecpod.Aac(), "b.m4a": codecpod.Alac(), "c.flac": codecpod.Flac()}
    for number, rate in enumerate((8000, 16_000, 24_000, 44_100, 48_000)):
        count = rate * (number + 1) // 2 + 1234 * number
        whole = np.concatenate([np.resize(samples, count // 2), np.zeros(count - count // 2)])
        sound = np.stack([whole] * (1 + number % 2), axis=1).astype(np.float32)
        for name, encoding in formats.items():
            soundfile.write(Path(folder) / name, sound, rate, encoding)
        for name, codec in codecs.items():
            codecpod.save(Path(folder) / name, sound, rate, codec, channels_first=False)
        for name in (*formats, *codecs):
            about = {"path": name, "seconds": count / rate, "rate": rate}
            print(json.dumps(about | read(Path(folder) / name)))


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    kinds: dict[str, Callable[..., None]] = {"corpus": show_corpus, "lengths": show_lengths}
    kinds[kind](*arguments)
