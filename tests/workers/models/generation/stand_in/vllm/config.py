"""Settings for following JSON schemas."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class StructuredOutputsConfig:
    backend: str
    disable_any_whitespace: bool
