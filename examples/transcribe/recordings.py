"""Finds the audio in a recording and measures it, down to the last byte of the file.

A header may declare the wrong amount of audio: a recorder that writes to a pipe can't go back to
fill in the length, a file joined from several others keeps the header of the first one, and a
recorder whose battery ran out never wrote its final header. Frames, pages, and blocks are therefore
counted here without decoding them, and headers are used only to determine the format. The decoder
must then find as much audio as was counted (decoding.py). If it finds less, the recording is
rejected, so no audio is lost silently.

A file is split wherever another recording was appended, because decoders don't expect a new sample
rate or another header in the middle.

Formats: WAV (https://www.mmsp.ece.mcgill.ca/Documents/AudioFormats/WAVE/WAVE.html), Ogg (RFC 3533,
RFC 7845), FLAC (RFC 9639), MP3 (ISO/IEC 11172-3, 13818-3), ADTS (ISO/IEC 13818-7), MP4 (ISO/IEC
14496-12), WebM (RFC 8794, RFC 9559), Opus packets (RFC 6716).
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path

import codecpod

FORMATS = "wav, flac, mp3, ogg, m4a, webm or aac"
TO_THE_END = (0, 0xFFFFFFFF, 0x7FFFFFFF)
"""Sizes that mean "unknown" in a WAV header."""
PCM_TAGS = (1, 3, 6, 7, 0xFFFE)
"""WAV encodings in which each block has one sample per channel."""
OPUS_RATE_HZ = 48_000
MAX_PARTS = 1000
MAX_STRAY_BYTES = 1 << 18
"""Maximum number of bytes between two MP3 or AAC frames that are not part of either frame.

Searching further would take seconds.
"""
MAX_BOXES = 200_000
"""Maximum number of WAV chunks before the audio, or of MP4 boxes.

Two hours of 100 ms fragments have 144,000 boxes.
"""
MAX_STRAY_FRAMES = 100_000
"""Maximum number of places in a FLAC file that merely look like a frame. 64 MiB of random data has
2,000.
"""


class InvalidInput(ValueError):
    """An invalid input. `field` is its name."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


@dataclass(frozen=True)
class Part:
    """A recording within a file, or the whole file.

    `data` is the recording's bytes, with a header that declares the correct length if its format
    needs one. `seconds` is the amount of audio counted. `is_file` is True if `data` is the whole
    file, unchanged.
    """

    data: bytes
    seconds: float
    is_file: bool = False


def find_parts(path: Path) -> list[Part]:
    """Returns the recordings in a file, in order. Most files contain only one.

    Raises:
        InvalidInput: the file is not a recording in a known format, is damaged, or has no audio.
    """
    whole = path.read_bytes()
    data = _without_id3(whole)
    for starts, find in FINDERS:
        if re.match(starts, data, re.DOTALL):
            parts = list(islice(find(data), MAX_PARTS + 1))
            break
    else:
        raise InvalidInput("file", f"not a recording in {FORMATS}")
    if len(parts) > MAX_PARTS:
        raise InvalidInput("file", f"it contains more than {MAX_PARTS} recordings")
    parts = [part for part in parts if part.seconds > 0]
    if not parts:
        raise InvalidInput("file", "it contains no sound")
    if len(parts) == 1 and parts[0].data == whole:
        return [Part(whole, parts[0].seconds, is_file=True)]
    return parts


def count_seconds(path: Path) -> float:
    """Returns the seconds of audio in a file.

    Raises:
        InvalidInput: see `find_parts`.
    """
    return sum(part.seconds for part in find_parts(path))


def _without_id3(data: bytes) -> bytes:
    """Removes ID3v2 tags before the audio. Some programs write them for any format."""
    at = 0
    while data[at : at + 3] == b"ID3" and at + 10 < len(data):
        at += _id3_bytes(data, at)
    return data[at:]


def _id3_bytes(data: bytes, at: int) -> int:
    """Returns the size of the ID3v2 tag at a position."""
    a, b, c, d = (byte & 0x7F for byte in data[at + 6 : at + 10])
    footer = 10 if data[at + 5] & 0x10 else 0
    return 10 + (a << 21 | b << 14 | c << 7 | d) + footer


def _make_damage_error(seconds: float) -> InvalidInput:
    return InvalidInput("file", f"it is damaged at {seconds:.1f} s")


def _trust_header(data: bytes) -> Part:
    """Returns a part whose header is trusted. Decoding it shows whether the header was correct."""
    try:
        info = codecpod.info(data)
        frames, rate = info.frames, info.sample_rate
        if not frames:  # unknown
            samples, rate = codecpod.load(data, mono=True)
            frames = len(samples)
    except codecpod.CodecpodError as error:
        raise InvalidInput("file", f"not a complete recording in {FORMATS}") from error
    return Part(data, frames / rate)


# WAV


def find_wav(data: bytes) -> Iterator[Part]:
    """Yields the recordings in WAV data, with each header declaring the length of its audio."""
    at = 0
    while data[at : at + 4] == b"RIFF" and data[at + 8 : at + 12] == b"WAVE":
        part, at = _wav_part(data, at)
        if part is not None:
            yield part


def _wav_part(data: bytes, start: int) -> tuple[Part | None, int]:
    """Returns the recording at a position, if it has audio, and the position where it ends."""
    at, form = start + 12, b""
    for _ in range(MAX_BOXES):
        if at + 8 > len(data):
            return None, len(data)
        name, (size,) = data[at : at + 4], struct.unpack_from("<I", data, at + 4)
        if name == b"data":
            end = _wav_data_end(data, at + 8, size)
            sound = data[at + 8 : end]
            head = data[start + 12 : at]
            break
        if name == b"fmt ":
            form = data[at + 8 : at + 8 + size]
        at += 8 + size + size % 2
    else:
        raise InvalidInput("file", "the wav has too many chunks")
    if len(form) < 16:
        raise InvalidInput("file", "the WAV file has no format")
    seconds, block = _wav_seconds(form, len(sound))
    sound = sound[: len(sound) // block * block]  # a truncated sample is dropped
    body = b"WAVE" + head + struct.pack("<4sI", b"data", len(sound)) + sound + bytes(len(sound) % 2)
    fixed = b"RIFF" + struct.pack("<I", len(body)) + body
    following = _next_riff(data, end)
    original = data[start:following]
    is_right = original[: len(fixed)] == fixed and following == len(data)
    return Part(original if is_right else fixed, seconds), following


def _wav_data_end(data: bytes, begin: int, size: int) -> int:
    """Returns the end of the samples.

    The end is the next chunk if there is one; otherwise, it is the next recording or the end of the
    data.
    """
    end = begin + size
    if size not in TO_THE_END and end <= len(data):
        behind = end + size % 2
        rest = data[behind : behind + 8]
        if not rest.strip(b"\0") or rest[:3] == b"TAG" or rest[:4] == b"RIFF":
            return end
        fits = len(rest) == 8 and struct.unpack_from("<I", rest, 4)[0] <= len(data) - end
        if fits and re.match(rb"[A-Za-z0-9_ -]{4}", rest):
            return end
    appended = re.compile(rb"RIFF.{4}WAVEfmt ", re.DOTALL).search(data, begin)
    return appended.start() if appended else len(data)


def _next_riff(data: bytes, end: int) -> int:
    """Returns where the next recording begins, after any chunks without audio."""
    at = end
    for _ in range(MAX_BOXES):
        if at + 8 > len(data):
            break
        at += data[at : at + 1] == b"\0"
        if data[at : at + 4] == b"RIFF":
            return at
        (size,) = struct.unpack_from("<I", data.ljust(at + 8, b"\0"), at + 4)
        at += 8 + size + size % 2
    return len(data)


def _wav_seconds(form: bytes, count: int) -> tuple[float, int]:
    """Returns the seconds of audio in `count` bytes, and the number of bytes per block."""
    tag, _, rate, per_second, block = struct.unpack_from("<HHIIH", form)
    if not rate or not block or not per_second:
        raise InvalidInput("file", "the wav header has a sample rate of 0")
    blocks = count // block
    if tag in PCM_TAGS:
        return blocks / rate, block
    if len(form) >= 20 and tag != 0x55:
        (per_block,) = struct.unpack_from("<H", form, 18)
        if per_block:
            return blocks * per_block / rate, block
    return count / per_second, 1


# Ogg


def find_ogg(data: bytes) -> Iterator[Part]:
    """Yields the recordings in Ogg data. Each recording starts with its own initial pages.

    Raises:
        InvalidInput: a page is missing or damaged.
    """
    start, chain, before_s = 0, _OggChain(), 0.0
    at = 0
    while at + 27 <= len(data):
        if data[at : at + 4] != b"OggS":
            following = data.find(b"OggS", at)
            if following < 0:
                break  # a tag of another kind, or other bytes
            raise _make_damage_error(before_s + chain.seconds)
        count = data[at + 26]
        sizes = data[at + 27 : at + 27 + count]
        end = at + 27 + count + sum(sizes)
        if end > len(data):
            break  # it was truncated here
        page = data[at:end]
        if chain.has_sound and page[5] & 2:
            yield Part(data[start:at], chain.seconds)
            before_s += chain.seconds
            start, chain = at, _OggChain()
        if not chain.add(page, page[27 + count :]):
            raise _make_damage_error(before_s + chain.seconds)
        at = end
    yield Part(data[start:at], chain.seconds)


class _OggChain:
    """An Ogg recording, with the timestamps from its pages."""

    def __init__(self) -> None:
        self.has_sound = False
        """True after any page other than the first page of a stream."""
        self._sequence: dict[bytes, int] = {}
        self._stream: bytes | None = None
        """Serial number of the audio stream."""
        self._rate = 0
        self._skip = 0
        self._granules = 0

    @property
    def seconds(self) -> float:
        return max(0, self._granules - self._skip) / self._rate if self._rate else 0.0

    def add(self, page: bytes, body: bytes) -> bool:
        """Adds a page. Returns False if the page is damaged or the one before it is missing."""
        serial, (number,) = page[14:18], struct.unpack_from("<I", page, 18)
        if ogg_checksum(page) != struct.unpack_from("<I", page, 22)[0]:
            return False
        expected, self._sequence[serial] = self._sequence.get(serial, number), number + 1
        if page[5] & 2:
            self._begin(serial, body)
            return True
        self.has_sound = True
        if number != expected:
            return False
        (granules,) = struct.unpack_from("<q", page, 6)
        if serial == self._stream and granules > 0:
            self._granules = granules
        return True

    def _begin(self, serial: bytes, head: bytes) -> None:
        rates = {b"OpusHead": (None, 10), b"\x01vorbis": (12, None), b"Speex   ": (36, None)}
        for magic, (rate_at, skip_at) in rates.items():
            if head.startswith(magic) and self._stream is None:
                self._stream = serial
                self._rate = OPUS_RATE_HZ
                if rate_at is not None:
                    (self._rate,) = struct.unpack_from("<I", head, rate_at)
                if skip_at is not None:
                    (self._skip,) = struct.unpack_from("<H", head, skip_at)
        if head.startswith(b"\x7fFLAC") and self._stream is None:
            self._stream = serial
            self._rate = int.from_bytes(head[27:30], "big") >> 4


_MIRRORED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def ogg_checksum(page: bytes) -> int:
    """Returns the checksum of an Ogg page: CRC-32 as in zlib, but with the bit order reversed."""
    mirrored = (page[:22] + bytes(4) + page[26:]).translate(_MIRRORED)
    crc = zlib.crc32(mirrored, 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int.from_bytes(crc.to_bytes(4, "little").translate(_MIRRORED), "big")


# FLAC

_FLAC_BLOCKS = {1: 192, **{code: 576 << (code - 2) for code in range(2, 6)}}
_FLAC_BLOCKS |= {code: 256 << (code - 8) for code in range(8, 16)}


def find_flac(data: bytes) -> Iterator[Part]:
    """Yields the recordings in FLAC data."""
    starts = [at.start() for at in re.finditer(rb"fLaC[\0\x80]\0\0\x22", data)] or [0]
    for start, end in pairwise([*starts, len(data)]):
        part = data[start:end]
        if len(part) < 42:
            return
        rate = int.from_bytes(part[18:21], "big") >> 4
        if not rate:
            raise InvalidInput("file", "the flac header has a sample rate of 0")
        part = _without_tag(part)
        samples, last, before_last = _flac_samples(part)
        if last and _crc16(part[last:]):
            part, samples = part[:last], before_last  # its last frame was truncated
        yield Part(part, samples / rate)


def _without_tag(data: bytes) -> bytes:
    """Removes an ID3v1 tag after the audio."""
    return data[:-128] if data[-128:-125] == b"TAG" else data


def _flac_samples(data: bytes) -> tuple[int, int, int]:
    """Returns the sample count, the start of the last frame, and the number of samples before it.

    Missing frames in between are counted too.
    """
    counted = before = last = size = stray = 0
    for frame in re.finditer(rb"\xff[\xf8\xf9]", data):
        head = _flac_frame(data, frame.start())
        if head is None:
            stray += 1
            if stray > MAX_STRAY_FRAMES:
                raise InvalidInput("file", "it is damaged: most of it contains no sound")
            continue
        number, block, is_variable = head
        size = size or block
        first = number if is_variable else number * size
        # Bytes that look like a frame by chance have a random frame number, and a few frames may be
        # missing before a real frame.
        if counted <= first <= counted + 100 * max(block, size):
            before, counted, last = first, first + block, frame.start()
    return counted, last, before


def _flac_frame(data: bytes, at: int) -> tuple[int, int, bool] | None:
    """Returns a frame's number, its sample count, and True if frame numbers count samples.

    None if there is no frame at this position.
    """
    head = data[at : at + 17].ljust(17, b"\0")  # a frame of silence has 14 bytes
    code, rate = head[2] >> 4, head[2] & 15
    ones = len(f"{head[4]:08b}".split("0", 1)[0])
    length = max(1, ones)
    if not code or rate == 15 or ones in (1, 8) or head[3] & 1:
        return None
    number = head[4] & (0x7F >> ones)
    for byte in head[5 : 4 + length]:
        number = number << 6 | byte & 0x3F
    end, block = 4 + length, _FLAC_BLOCKS.get(code, 0)
    if code in (6, 7):
        block = int.from_bytes(head[end : end + code - 5], "big") + 1
        end += code - 5
    end += {12: 1, 13: 2, 14: 2}.get(rate, 0)
    return (number, block, bool(head[1] & 1)) if _crc8(head[:end]) == head[end] else None


def _crc8(data: bytes) -> int:
    """Returns the checksum of a frame header, using the polynomial x^8 + x^2 + x + 1."""
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc << 1 ^ 0x07) & 0xFF if crc & 0x80 else crc << 1
    return crc


def _crc16(data: bytes) -> int:
    """Returns the CRC of a frame and its stored CRC (0 if intact): x^16 + x^15 + x^2 + 1."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x8005) & 0xFFFF if crc & 0x8000 else crc << 1
    return crc


# MP3 and ADTS

_KBITS = {
    (1, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_KBITS[2, 3] = _KBITS[2, 2]
_ADTS_RATES_HZ = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000)


_SYNC = re.compile(rb"\xff[\xe0-\xff]|ID3|TAG|APETAGEX")


@dataclass(frozen=True)
class Frame:
    """An MP3 or ADTS frame header.

    `kind` holds the properties that can't change within a recording. `size` is in bytes, and
    `samples` is per channel.
    """

    kind: tuple[int, ...]
    size: int
    samples: int
    rate: int


def mp3_frame(head: bytes) -> Frame | None:
    """Parses four bytes. Returns None if the bytes are not a frame header."""
    return _mp3_frame(head[:4])


@lru_cache(10_000)
def _mp3_frame(head: bytes) -> Frame | None:
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    version, layer = head[1] >> 3 & 3, 4 - (head[1] >> 1 & 3)
    kbits, rate = head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or layer == 4 or kbits in (0, 15) or rate == 3:
        return None
    family = 1 if version == 3 else 2
    hz = (44100, 48000, 32000)[rate] >> (0, 1, 2)[(3, 2, 0).index(version)]
    samples = 384 if layer == 1 else 576 if layer == 3 and family == 2 else 1152
    padding = head[2] >> 1 & 1
    bits = _KBITS[family, layer][kbits - 1] * 1000
    size = samples // 8 * bits // hz + padding
    if layer == 1:
        size = (12 * bits // hz + padding) * 4
    return Frame((version, layer, hz, head[3] >> 6 == 3), size, samples, hz)


def adts_frame(head: bytes) -> Frame | None:
    """Parses seven bytes. Returns None if the bytes are not a frame header."""
    if len(head) < 7 or head[0] != 0xFF or head[1] & 0xF6 != 0xF0:
        return None
    rate = head[2] >> 2 & 15
    size = (head[3] & 3) << 11 | head[4] << 3 | head[5] >> 5
    if rate >= len(_ADTS_RATES_HZ) or size < 7:
        return None
    channels = (head[2] & 1) << 2 | head[3] >> 6
    hz = _ADTS_RATES_HZ[rate]
    return Frame((hz, channels), size, 1024 * (1 + (head[6] & 3)), hz)


def find_mp3(data: bytes) -> Iterator[Part]:
    """Yields the recordings in MP3 data.

    Each recording begins with a Xing header or a format change.
    """
    return _find_frames(data, mp3_frame)


def find_adts(data: bytes) -> Iterator[Part]:
    """Yields the recordings in AAC data with ADTS headers."""
    return _find_frames(data, adts_frame)


def _find_frames(data: bytes, read: Callable[[bytes], Frame | None]) -> Iterator[Part]:
    start = end = trimmed = 0
    samples = 0.0
    last: Frame | None = None
    marks = [at.start() for at in re.finditer(rb"Xing|Info", data)]
    for at, frame, stray in _frames(data, read):
        while marks and marks[0] < at + 4:
            marks.pop(0)
        is_first = bool(marks) and marks[0] < at + 40
        if last is not None and (frame.kind != last.kind or is_first):
            yield Part(data[start:end], max(0.0, samples - trimmed) / last.rate)
            samples, trimmed, last = 0.0, 0, None
        if last is None:
            start = at
        else:
            # If these bytes are audio, the decoder will find less audio than is counted here.
            samples += stray / frame.size * frame.samples
        if is_first:
            trimmed = _xing_trim(data, marks[0], at + frame.size)
        else:
            samples += frame.samples
        last, end = frame, at + frame.size
    if last is None:
        raise InvalidInput("file", f"not a recording in {FORMATS}")
    yield Part(data[start:end], max(0.0, samples - trimmed) / last.rate)


def _frames(data: bytes, read: Callable[[bytes], Frame | None]) -> Iterator[tuple[int, Frame, int]]:
    """Yields the position and header of each complete frame, and the stray bytes before it.

    Stray bytes are any bytes other than zeros and tags.
    """
    at = stray = 0
    is_synced = False
    while at + 4 <= len(data):
        frame = read(data[at : at + 7])
        if frame is not None and (behind := at + frame.size) <= len(data):
            head = data[behind : behind + 7]
            if is_synced or not head or read(head) is not None:
                yield at, frame, stray
                at, stray, is_synced = behind, 0, True
                continue
        is_synced = False
        if tag := _tag_bytes(data, at):
            at += tag
            continue
        mark = _SYNC.search(data, at + 1)
        following = mark.start() if mark else len(data)
        stray += len(data[at:following].strip(b"\0"))
        if stray > MAX_STRAY_BYTES:
            raise InvalidInput("file", "it is damaged: most of it contains no sound")
        at = following


def _tag_bytes(data: bytes, at: int) -> int:
    """Returns the size of the tag at a position, or 0 if there is none."""
    if data[at : at + 3] == b"ID3" and at + 10 <= len(data):
        return _id3_bytes(data, at)
    if data[at : at + 3] == b"TAG":
        return 128
    if data[at : at + 8] == b"APETAGEX" and at + 16 <= len(data):
        (size,) = struct.unpack_from("<I", data, at + 12)
        return int(size) + 32
    return 0


def _xing_trim(data: bytes, place: int, end: int) -> int:
    """Returns how many samples an encoder added, according to the Xing header.

    http://gabriel.mp3-tech.org/mp3infotag.html

    Args:
        data: all bytes of the recording.
        place: index of the header's first byte.
    """
    (flags,) = struct.unpack_from(">I", data.ljust(place + 8, b"\0"), place + 4)
    sizes = (4, 4, 100, 4)
    lame = place + 8 + sum(size for bit, size in enumerate(sizes) if flags >> bit & 1)
    if lame + 24 > end or not data[lame]:
        return 0
    delays = int.from_bytes(data[lame + 21 : lame + 24], "big")
    return (delays >> 12) + (delays & 0xFFF)


# MP4


def find_mp4(data: bytes) -> Iterator[Part]:
    """Yields the recordings in MP4 data. Each recording begins with its own `ftyp` box."""
    start = at = 0
    for _ in range(MAX_BOXES):
        if at + 8 > len(data):
            break
        size, name = struct.unpack_from(">I4s", data, at)
        if name == b"ftyp" and at > start:
            yield _trust_header(data[start:at])
            start = at
        if size == 1 and at + 16 <= len(data):
            (size,) = struct.unpack_from(">Q", data, at + 8)
        if size < 8:
            break  # the rest of the file, or bytes that are not a box
        at += size
    else:
        raise InvalidInput("file", "the m4a has too many boxes")
    yield _trust_header(data[start:])


# WebM

_EBML, _SEGMENT, _CLUSTER, _GROUP = 0x1A45DFA3, 0x18538067, 0x1F43B675, 0xA0
_SIMPLE_BLOCK, _BLOCK, _PADDING = 0xA3, 0xA1, 0x75A2
_TRACKS, _TRACK, _NUMBER, _CODEC, _DELAY = 0x1654AE6B, 0xAE, 0xD7, 0x86, 0x56AA
_ENTERED = (_SEGMENT, _CLUSTER, _GROUP, _TRACKS, _TRACK)
_KNOWN = {0x114D9B74, 0x1549A966, 0x1C53BB6B, 0x1254C367, 0x1043A770, 0x1941A469, 0xEC, 0xBF, 0xE7}
_KNOWN |= {_EBML, *_ENTERED, _SIMPLE_BLOCK, _BLOCK, _PADDING}
_KNOWN |= {0xAB, 0xA7, 0x9B, 0xFB, 0xFD, 0x75A1, 0xA4, 0xC8}
"""Elements allowed in a segment, a cluster or a group of blocks."""


def find_webm(data: bytes) -> Iterator[Part]:
    """Yields the recordings in WebM data.

    Raises:
        InvalidInput: there is other data between the audio blocks.
    """
    starts = [at.start() for at in re.finditer(rb"\x1a\x45\xdf\xa3[\x80-\x9f\x01]", data)]
    for start, end in pairwise([*starts, len(data)]):
        part = data[start:end]
        samples = _webm_samples(part)
        yield _trust_header(part) if samples is None else Part(part, samples / OPUS_RATE_HZ)


def _webm_samples(data: bytes) -> int | None:
    """Returns the samples of the first Opus track, at OPUS_RATE_HZ.

    None if there is no such track.
    """
    sound = _OpusTrack()
    at = in_tracks = 0
    while at + 2 <= len(data) and (element := _ebml(data, at)) is not None:
        name, begin, size = element
        if name not in _KNOWN and begin > in_tracks:
            if len(data[at:].rstrip(b"\0")) <= 128:
                break  # a tag of another kind
            raise _make_damage_error(sound.samples / OPUS_RATE_HZ)
        if name == _TRACKS:
            in_tracks = begin + (size or 0)
        if size is not None and begin + size <= len(data):
            sound.add(name, data[begin : begin + min(size, 8)], size)
        at = begin if name in _ENTERED or size is None else begin + size
    return sound.samples if sound.is_found else None


class _OpusTrack:
    """The audio of a WebM file, read element by element."""

    def __init__(self) -> None:
        self.is_found = False
        self.samples = 0
        self._number = self._last = 0
        """Number of the audio track, and the track number read most recently."""
        self._is_entry = False
        """True if the track read most recently is the audio track."""

    def add(self, name: int, head: bytes, size: int) -> None:
        """Processes an element, given its first eight bytes."""
        value = int.from_bytes(head[:size], "big")
        if name == _TRACK:
            self._is_entry = False
        elif name == _NUMBER:
            self._last = value
        elif name == _CODEC and head[:6] == b"A_OPUS" and not self.is_found:
            self.is_found, self._number, self._is_entry = True, self._last, True
        elif name == _DELAY and self._is_entry:
            self.samples -= _opus_count(value)
        elif name in (_SIMPLE_BLOCK, _BLOCK) and self.is_found and head[0] & 0x7F == self._number:
            self.samples += opus_samples(head[4:6])
        elif name == _PADDING:
            self.samples -= _opus_count(int.from_bytes(head[:size], "big", signed=True))


def _opus_count(nanoseconds: int) -> int:
    return nanoseconds * OPUS_RATE_HZ // 1_000_000_000


def _ebml(data: bytes, at: int) -> tuple[int, int, int | None] | None:
    """Returns an element's name, the start of its content, and the content's size in bytes.

    A size of None means the size is unknown. Returns None if the data ends before the element does.
    """
    length = 9 - data[at].bit_length()
    place = at + length
    if length > 4 or place >= len(data):
        return (-1, at + 1, 0) if length > 4 else None
    width = 9 - data[place].bit_length()
    if width > 8 or place + width > len(data):
        return (-1, at + 1, 0) if width > 8 else None
    name = int.from_bytes(data[at:place], "big")
    size = int.from_bytes(data[place : place + width], "big") & ((1 << 7 * width) - 1)
    return name, place + width, None if size == (1 << 7 * width) - 1 else size


def opus_samples(packet: bytes) -> int:
    """Returns an Opus packet's sample count at 48 kHz, from its first two bytes (RFC 6716, 3.1)."""
    if not packet:
        return 0
    config, code = packet[0] >> 3, packet[0] & 3
    if config < 12:
        samples = (480, 960, 1920, 2880)[config % 4]
    elif config < 16:
        samples = (480, 960)[config % 2]
    else:
        samples = (120, 240, 480, 960)[config % 4]
    count = (1, 2, 2, packet[1] & 0x3F if len(packet) > 1 else 0)[code]
    return samples * count


def find_other(data: bytes) -> Iterator[Part]:
    """Yields the recording in AIFF or AU data."""
    yield _trust_header(data)


FINDERS: list[tuple[bytes, Callable[[bytes], Iterator[Part]]]] = [
    (rb"RIFF.{4}WAVE", find_wav),
    (rb"OggS", find_ogg),
    (rb"fLaC", find_flac),
    (rb".{4}ftyp", find_mp4),
    (rb"\x1a\x45\xdf\xa3", find_webm),
    (rb"FORM.{4}AIF[FC]|\.snd", find_other),
    (rb"\xff[\xf0\xf1\xf8\xf9]", find_adts),
    (rb"\xff[\xe2-\xff]", find_mp3),
]
