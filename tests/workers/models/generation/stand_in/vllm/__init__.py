"""A stand-in for vLLM 0.32's engine, with the parts that Penstock uses, built on transformers.

It computes each request separately, greedily or from its seed, and follows JSON schemas with
llguidance. Tests use vLLM itself if it is installed, otherwise this stand-in.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llguidance
import llguidance.hf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["EngineArgs", "LLMEngine", "SamplingParams"]


@dataclass(kw_only=True)
class EngineArgs:
    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    block_size: int
    num_gpu_blocks_override: int
    gpu_memory_utilization: float
    enforce_eager: bool
    generation_config: str
    disable_log_stats: bool
    seed: int
    kv_cache_memory_bytes: int | None
    structured_outputs_config: StructuredOutputsConfig


class _Grammar:
    """A text's position in its schema."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, schema: str) -> None:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False}
        )
        if error := llguidance.LLMatcher.validate_grammar(grammar, tokenizer):
            raise VLLMValidationError(f"Grammar error: {error}")
        self._matcher = llguidance.LLMatcher(tokenizer, grammar)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return self._matcher.is_stopped() or bool(self._matcher.consume_tokens(tokens))

    def forbid(self, logits: torch.Tensor) -> None:
        """Makes tokens impossible that the schema does not allow next."""
        bits = self._matcher.compute_bitmask()
        for token in range(len(logits)):
            if not bits[token // 8] >> token % 8 & 1:
                logits[token] = -torch.inf


@dataclass
class _Constraint:
    """Compiled only at the second look, because vLLM compiles a schema in a thread."""

    grammar: _Grammar
    looks: int = 0

    @property
    def is_grammar_ready(self) -> bool:
        self.looks += 1
        return self.looks > 1


@dataclass
class _Request:
    request_id: str
    ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    params: SamplingParams
    structured_output_request: _Constraint | None
    generator: torch.Generator = field(default_factory=torch.Generator)


class LLMEngine:
    def __init__(self, arguments: EngineArgs) -> None:
        self._arguments = arguments
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=torch.float32
        ).eval()
        self._tokenizer = llguidance.hf.from_tokenizer(
            AutoTokenizer.from_pretrained(Path(arguments.model)), n_vocab=self._model.vocab_size
        )
        self._requests: dict[str, _Request] = {}
        # As in vLLM's core process, which names requests differently.
        scheduler = SimpleNamespace(requests={})
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        self._inside: dict[str, _Request] = scheduler.requests
        self._seen: list[tuple[str, list[int]]] = []

    @classmethod
    def from_engine_args(cls, arguments: EngineArgs) -> LLMEngine:
        return cls(arguments)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def add_request(self, request_id: str, prompt: dict[str, Any], params: SamplingParams) -> str:
        ids, salt = list(prompt["prompt_token_ids"]), prompt["cache_salt"]
        if len(ids) + params.max_tokens > self._arguments.max_model_len:
            raise ValueError("longer than the maximum model length")
        same = [_same_start(ids[:-1], other) for key, other in self._seen if key == salt]
        # Only whole blocks are shared.
        cached = max(same, default=0) // self._arguments.block_size * self._arguments.block_size
        self._seen.append((salt, ids))
        wanted = params.structured_outputs
        constraint = wanted and _Constraint(_Grammar(self._tokenizer, wanted.json))
        request = _Request(request_id, ids, len(ids), cached, params, constraint)
        request.generator.manual_seed(params.seed)
        self._requests[request_id] = request
        self._inside[f"{request_id}-inside"] = request
        return f"{request_id}-inside"

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self._inside.pop(f"{request_id}-inside", None)

    def step(self) -> list[Any]:
        batch = list(itertools.islice(self._requests.values(), self._arguments.max_num_seqs))
        return [self._output(request) for request in batch]

    @torch.inference_mode()
    def _output(self, request: _Request) -> Any:
        params = request.params
        logits = self._model(torch.tensor([request.ids])).logits[0, -1].float()
        chances = logits.log_softmax(-1)
        written = torch.bincount(
            torch.tensor(request.ids[request.prompt_tokens :], dtype=torch.int64),
            minlength=len(logits),
        )
        for biased, bias in (params.logit_bias or {}).items():
            logits[biased] += bias
        seen = torch.tensor(sorted(set(request.ids)))
        repeated, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(repeated < 0, repeated * penalty, repeated / penalty)
        logits -= params.frequency_penalty * written + params.presence_penalty * (written > 0)
        constraint = request.structured_output_request
        if constraint is not None:
            constraint.grammar.forbid(logits)
        if params.temperature == 0:
            token = int(logits.argmax())
        else:
            weights = (logits / params.temperature).softmax(-1)
            weights[weights < params.min_p * weights.max()] = 0
            token = int(torch.multinomial(weights, 1, generator=request.generator))
        request.ids.append(token)
        if constraint is not None:
            assert constraint.grammar.accept_tokens(request.request_id, [token])
        count = len(request.ids) - request.prompt_tokens
        ended = token in params.stop_token_ids
        reason = "stop" if ended else "length" if count >= params.max_tokens else None
        if reason is not None:
            self.abort_request([request.request_id])
        assert params.output_kind is RequestOutputKind.DELTA
        given = SimpleNamespace(
            token_ids=[token],
            logprobs=None if params.logprobs is None else [_told(chances, token, params.logprobs)],
            finish_reason=reason,
        )
        return SimpleNamespace(
            request_id=request.request_id,
            outputs=[given],
            finished=reason is not None,
            num_cached_tokens=request.cached_tokens,
            prompt_logprobs=self._prompt_logprobs(request) if count == 1 else None,
        )

    def _prompt_logprobs(self, request: _Request) -> list[dict[int, Any] | None] | None:
        most = request.params.prompt_logprobs
        if most is None:
            return None
        ids = request.ids[: request.prompt_tokens]
        chances = self._model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        followed = zip(chances, ids[1:], strict=False)
        return [None, *(_told(row, token, most) for row, token in followed)]


def _same_start(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _told(chances: torch.Tensor, token: int, count: int) -> dict[int, Any]:
    best = chances.topk(count).indices.tolist() if count else []
    return {one: SimpleNamespace(logprob=float(chances[one])) for one in [token, *best]}
