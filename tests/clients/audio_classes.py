"""Small classes that serve OpenAI's audio endpoints, and the results that clients must get.

Here, a recording is a text. Each line takes a second and a half, so the exact results are known and
no weights are needed. examples/transcribe/test_transcribe.py runs the same checks against the
shipped models.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
HEARS = """
from typing import Any, Iterator
from cog import BasePredictor, Input, Path


class Predictor(BasePredictor):
    def predict(
        self,
        file: Path,
        language: str = "",
        prompt: str = "",
        temperature: float = 0.0,
        task: str = Input(default="transcribe", choices=["transcribe", "translate"]),
        word_timestamps: bool = False,
    ) -> Iterator[dict[str, Any]]:
        lines = file.read_text().splitlines()
        if lines and lines[0].startswith("noise"):
            error = ValueError("not a recording")
            error.field = "file"
            raise error
        about = {"language": language or "en", "duration": 1.5 * len(lines)}
        for number, line in enumerate(lines):
            start, said = 1.5 * number, line.upper() if task == "translate" else line
            words = [
                {"word": f" {word}", "start": start + at / 10, "end": start + at / 10 + 0.1}
                for at, word in enumerate(said.split())
            ]
            times = {"start": start, "end": start + 1.25, "words": words * word_timestamps}
            yield {"id": number, "text": f" {said}"} | times | about

    def work(self, input) -> int:
        return -(-3 * len(input.file.read_text().splitlines()) // 2)
"""
SPEAKS = """
from pathlib import Path as LocalPath
from typing import Iterator
from cog import BasePredictor, Input, Path


class Predictor(BasePredictor):
    def predict(
        self,
        input: str,
        voice: str = Input(default="heart", choices=["heart", "sky"]),
        response_format: str = Input(default="mp3", choices=["mp3", "pcm"]),
        speed: float = 1.0,
        stream: bool = False,
    ) -> Iterator[Path]:
        target = LocalPath(f"out.{response_format}")
        parts = [word * 20_000 for word in input.split(" ")]
        for part in parts if stream else ["".join(parts)]:
            target.write_text(part)
            yield Path(target)

    def work(self, input) -> int:
        return len(input.input)
"""


CUTS = """
from pathlib import Path as LocalPath
from typing import Any
from cog import BaseModel, BasePredictor, Path


class Output(BaseModel):
    windows: list[Path]
    parts: list[Any]
    duration: float


class Predictor(BasePredictor):
    def predict(self, file: Path) -> Output:
        windows, parts = [], []
        lines = file.read_text().splitlines()
        if lines and lines[0].startswith("noise"):
            error = ValueError("not a recording")
            error.field = "file"
            raise error
        for number, line in enumerate(lines):
            if not line:
                continue
            target = LocalPath(f"window-{number}.txt")
            target.write_text(line)
            windows.append(Path(target))
            parts.append([[24_000 * number, 24_000 * (number + 1)]])
        return Output(windows=windows, parts=parts, duration=1.5 * len(lines))
"""
FLOW: dict[str, Any] = {
    "name": "client-windows",
    "api": "transcription",
    "input": {
        "file": "file",
        "language": {"type": "string", "default": ""},
        "word_timestamps": {"type": "boolean", "default": False},
    },
    "steps": [
        {"id": "cut", "model": "client-cuts", "input": {"file": "$input.file"}},
        {
            "id": "read",
            "model": "client-hears",
            "for_each": "$cut.windows",
            "input": {
                "file": "$item",
                "language": "$input.language",
                "word_timestamps": "$input.word_timestamps",
            },
        },
        {
            "id": "join",
            "model": "client-joins",
            "input": {
                "windows": {"segments": "$read", "parts": "$cut.parts"},
                "duration": "$cut.duration",
            },
        },
    ],
    "output": "$join",
}
"""Transcribes a recording window by window, like the flows in examples/transcribe."""


@dataclass(frozen=True)
class Audio:
    """Input for the client checks, and the expected results.

    Args:
        hearer, speaker: models for transcription and for speech.
        text: expected transcript of the recording.
        segments, words, seconds: segments, word count and duration of the recording.
        said: a text to convert to speech.
    """

    hearer: str
    speaker: str
    recording: str
    text: str
    segments: list[str]
    words: int
    seconds: int
    said: str
    translates: bool
    voice: str

    def write(self, path: Path) -> str:
        """Writes this as JSON for the client scripts. Returns the path."""
        path.write_text(json.dumps(asdict(self)))
        return str(path)


def write_audio_classes(folder: Path) -> list[dict[str, Any]]:
    """Writes the classes to a folder. Returns their entries."""
    entries = []
    for name, api, code in (("hears", "transcription", HEARS), ("speaks", "speech", SPEAKS)):
        (folder / name).mkdir(parents=True)
        (folder / name / "predict.py").write_text(code)
        entries.append(
            {
                "name": f"client-{name}",
                "task": "custom",
                "api": api,
                "source": f"local:{folder / name}",
                "work": {"max": 1000},
                "price": {"per_work_usd": 0.001},
            }
        )
    return entries


def write_steps(folder: Path) -> list[dict[str, Any]]:
    """Writes FLOW's other classes. Returns their entries."""
    (folder / "cuts").mkdir(parents=True)
    (folder / "cuts" / "predict.py").write_text(CUTS)
    sources = {"client-cuts": folder / "cuts", "client-joins": EXAMPLES / "transcript"}
    return [
        {"name": name, "task": "custom", "source": f"local:{source}"}
        for name, source in sources.items()
    ]


def write_audio(folder: Path) -> str:
    """Writes a recording for the classes and a JSON file with the expected results.

    Returns the JSON file's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recording = folder / "day.wav"
    recording.write_text("good day\nhow are <you> & yours")
    return Audio(
        hearer="client-hears",
        speaker="client-speaks",
        recording=str(recording),
        text="good day how are <you> & yours",
        segments=["good day", " how are <you> & yours"],
        words=7,
        seconds=3,
        said="one two three",
        translates=True,
        voice="heart",
    ).write(folder / "audio.json")
