"""A request's sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1


@dataclass(kw_only=True)
class StructuredOutputsParams:
    json: str


@dataclass(kw_only=True)
class SamplingParams:
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_p: float
    logit_bias: dict[int, float] | None
    prompt_logprobs: int | None
    logprobs: int | None
    structured_outputs: StructuredOutputsParams | None
    ignore_eos: bool
    stop_token_ids: list[int]
    detokenize: bool
    output_kind: RequestOutputKind
