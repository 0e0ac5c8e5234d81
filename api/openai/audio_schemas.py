"""Requests and responses for /v1/audio, as in OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import ConfigDict, Field, model_validator

from api.bodies import MAX_URL_CHARS, Body, Option
from api.errors import WrongField
from api.validators import null_is

MAX_FILE_BYTES = 25 * 1024 * 1024
"""OpenAI's limit."""
MAX_PROMPT_CHARS = 4096
MAX_INPUT_CHARS = 4096
"""OpenAI's limit for text to speech."""
FILE = "file"
LISTS = ("timestamp_granularities", "include")
"""Form fields that may be repeated. OpenAI's clients send their names with `[]`."""
Task = Literal["transcribe", "translate"]


class DurationUsage(msgspec.Struct):
    """The recording's duration in seconds, rounded up."""

    seconds: int
    type: Literal["duration"] = "duration"


class TranscriptionReply(msgspec.Struct):
    """A recording's transcript."""

    text: str
    usage: DurationUsage


class TranscribedWord(msgspec.Struct):
    """A word with its start and end in seconds."""

    word: str
    start: float
    end: float


class TranscribedSegment(msgspec.Struct):
    """A transcript segment, with its start and end in seconds."""

    start: float
    end: float
    text: str
    id: int = 0
    seek: int = 0
    tokens: list[int] = []
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0


class VerboseTranscriptionReply(msgspec.Struct, omit_defaults=True):
    """A recording's transcript, with timestamps."""

    task: Task
    language: str
    duration: float
    text: str
    usage: DurationUsage
    segments: list[TranscribedSegment] | None = None
    words: list[TranscribedWord] | None = None


class TranscriptDelta(msgspec.Struct):
    """Text added since the stream's previous event."""

    delta: str
    type: Literal["transcript.text.delta"] = "transcript.text.delta"


class TranscriptDone(msgspec.Struct):
    """The final event of a stream."""

    text: str
    usage: DurationUsage
    type: Literal["transcript.text.done"] = "transcript.text.done"


class TranscribedElement(TranscribedSegment):
    """A segment as returned by a class. `language` and `duration` refer to the whole recording."""

    words: list[TranscribedWord] = []
    language: str = ""
    duration: float = 0.0


def _as_form(schema: dict[str, Any]) -> None:
    """Adds the file to a form's schema, and removes null, which forms can't represent."""
    known = schema["properties"]
    schema["properties"] = {
        FILE: {
            "type": "string",
            "format": "binary",
            "description": (
                f"The recording, at most {MAX_FILE_BYTES} bytes. Or send a `url` instead."
            ),
        }
    }
    for name, field in known.items():
        if field.get("type") == "null":
            continue
        kinds = [kind for kind in field.pop("anyOf", ()) if kind["type"] != "null"]
        field |= kinds[0] if kinds else {}
        if field.get("default", "") is None:
            del field["default"]
        schema["properties"][f"{name}[]" if name in LISTS else name] = field


class TranslationForm(Body):
    """A form with a recording to translate into English."""

    model_config = ConfigDict(json_schema_extra=_as_form)

    model: str | None = Field(
        None, description="Default: the first model in the catalog with `api: transcription`."
    )
    url: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_URL_CHARS,
        description="Extension, as in Groq's API: https URL of the recording, or ID of an upload "
        "with purpose `user_data`, in place of `file`. At most 64 MiB.",
    )
    prompt: str | None = Field(
        None,
        max_length=MAX_PROMPT_CHARS,
        description="Preceding text, or words with their spelling.",
    )
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    temperature: float | None = Field(None, ge=0, le=1)


class TranscriptionForm(TranslationForm):
    """A form with a recording to transcribe."""

    language: str | None = Field(
        None,
        pattern="^[a-z]{2,3}$",
        description="Language of the recording in ISO 639-1: `en`, `fr`.",
    )
    timestamp_granularities: list[Literal["word", "segment"]] | None = Field(
        None,
        max_length=2,
        description="Units that have times in `verbose_json`. Default: segments.",
    )
    stream: bool = Field(
        False, description="True to send events, one per segment. Only for `json`."
    )
    chunking_strategy: Option | None = Field(None, description="Accepted, without effect.")
    include: None = None
    known_speaker_names: None = None
    known_speaker_references: None = None
    keywords: None = None
    languages: None = None

    @model_validator(mode="after")
    def _fits_the_format(self) -> TranscriptionForm:
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise WrongField(
                "timestamp_granularities",
                "requires response_format verbose_json; omit it otherwise",
            )
        if self.stream and self.response_format != "json":
            raise WrongField("stream", "requires response_format json; omit it otherwise")
        return self

    @property
    def wants_words(self) -> bool:
        """True if the response includes word timestamps."""
        return "word" in (self.timestamp_granularities or ())


def _recording_of(file: str | None, url: str | None) -> tuple[str, str]:
    """Returns the field that identifies a line's recording, and its value."""
    if (file is None) == (url is None):
        raise WrongField(
            "url", f"exactly one of url and {FILE} (the ID of an uploaded file) is required"
        )
    return ("url", url) if url is not None else (FILE, file or "")


class TranslationLine(TranslationForm):
    """A batch line's body. It identifies its recording by ID or URL."""

    file: str | None = Field(None, min_length=1, max_length=MAX_URL_CHARS)

    @model_validator(mode="after")
    def _has_a_recording(self) -> TranslationLine:
        _recording_of(self.file, self.url)
        return self

    @property
    def recording(self) -> tuple[str, str]:
        """The field that identifies the recording, and its value."""
        return _recording_of(self.file, self.url)


class TranscriptionLine(TranscriptionForm):
    """A batch line's body. A line identifies its recording by ID or URL."""

    file: str | None = Field(None, min_length=1, max_length=MAX_URL_CHARS)

    @model_validator(mode="after")
    def _can_be_a_line(self) -> TranscriptionLine:
        _recording_of(self.file, self.url)
        if self.stream:
            raise WrongField("stream", "is not supported in batches; omit it")
        return self

    @property
    def recording(self) -> tuple[str, str]:
        """The field that identifies the recording, and its value."""
        return _recording_of(self.file, self.url)


class SpeechBody(Body):
    """Text to speak."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"input": "The gate of the dam is open.", "voice": "heart"}}
    )

    input: str = Field(min_length=1, max_length=MAX_INPUT_CHARS)
    model: str | None = Field(
        None, description="Default: the first model in the catalog with `api: speech`."
    )
    voice: str | None = Field(
        None,
        max_length=128,
        description="One of the model's voices. Default: the model's default voice.",
    )
    instructions: str | None = Field(
        None,
        max_length=MAX_INPUT_CHARS,
        description="How to speak it, if the model supports instructions.",
    )
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | None = Field(
        None, description="One of the model's formats. Default: the model's default format."
    )
    speed: float | None = Field(None, ge=0.25, le=4.0)
    stream_format: Annotated[Literal["audio", "sse"], null_is("audio")] = Field(
        "audio",
        description="`sse`: events with parts of the audio, from models that stream it.",
        json_schema_extra={"enum": ["audio", "sse", None]},
    )
