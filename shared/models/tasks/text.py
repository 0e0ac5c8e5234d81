"""Generation (`text` in the catalog): a language model continues a conversation or a prompt.

The worker that prepares prompts counts the tokens in a conversation or a prompt. The model does not
run, so counting is free.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from shared.errors import BadInput, ContextLengthExceeded
from shared.models.entry import CatalogEntry
from shared.models.flow_types import StepSchema
from shared.models.tasks.base import (
    MAX_STEP_SEED,
    FirstGuesses,
    LinkTo,
    StepInput,
    Task,
    TaskInput,
    TaskResult,
    WorkBound,
)
from shared.models.tasks.embedding import (
    BYTES_PER_TOKEN,
    SPECIAL_TOKENS,
    bound_tokens,
    estimate_tokens,
)

FinishReason = Literal["stop", "length"]
"""`stop`: the model finished its text, or generated a stop sequence.

`length`: max_tokens was reached.
"""
VLLM_STARTUP_S = 900.0
"""Default for `startup_s` with vLLM. Compiling a 135M-parameter model took 90 s on two cores."""
TEMPLATE_TOKENS = 8
"""Approximate number of tokens that a chat template adds to a message."""
MAX_TEMPLATE_TOKENS = 512
"""Maximum number of tokens that a chat template adds on its own: a system message, the date, and
instructions for calling tools. A message's framing has fewer tokens than its JSON has bytes.
"""
INDENTED = 2
"""Maximum factor by which tool and variable JSON grows when templates write it with spaces or
indentation.
"""
TOKEN_BYTES = 8
"""The size of a token in a reply, in bytes: its text, escaped."""
RESPONSE_FORMAT = "response_format"
FAR_ABOVE = 8
"""A prompt estimated to be this many times the context size is rejected without being tokenized."""

STEP_FIELDS: Mapping[str, Any] = {
    "prompt": {"type": "string", "minLength": 1},
    "messages": {"type": "array", "items": {"type": "object"}, "minItems": 1},
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": 0, "maximum": 2**20},
    "seed": {"type": "integer", "minimum": 0, "maximum": MAX_STEP_SEED},
    "stop": {
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": 256},
        "maxItems": 4,
    },
}
"""A text model's flow step inputs, as JSON Schema; the same as for a prediction."""

ID_BYTES = 4


class TokenLogprob(msgspec.Struct, omit_defaults=True):
    """A token's log probability, and those for the most likely tokens at its position."""

    token: str
    """The token's text. Bytes that do not form a complete character are shown as U+FFFD."""
    logprob: float
    data: bytes = b""
    """The text's bytes."""
    top: list[TokenLogprob] = []


class TokenChunk(msgspec.Struct, omit_defaults=True):
    """Consecutive generated tokens.

    `first`: number of tokens before this chunk. `text` may lag behind `ids`: it ends before an
    incomplete character, and before text that may become a stop sequence. An item's first chunk
    includes the number of prompt tokens, and how many of them are `cached_tokens`.
    """

    first: int
    ids: list[int]
    text: str = ""
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    input_tokens: int = 0
    cached_tokens: int = 0

    @property
    def end(self) -> int:
        """Number of tokens up to and including this chunk."""
        return self.first + len(self.ids)


class GenerationInput(TaskInput, tag="generation"):
    """The prompt to continue, and the options. Either `messages` or `prompt` is set.

    `messages` and `tools` use OpenAI's format. They are passed to the model's chat template
    unchanged.
    """

    max_tokens: int
    seed: int
    ends_with_context: bool = False
    """True to shorten the text if the prompt leaves room for fewer than `max_tokens` in the
    context.

    Otherwise, the prompt is rejected.
    """
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    prompt: str | list[int] = ""
    """Text, or token IDs from the model's tokenizer."""
    temperature: float = 1.0
    """0 always picks the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0
    """Keeps tokens whose probability is at least this fraction of the most likely token's."""
    repetition_penalty: float = 1.0
    """For tokens that occur in the prompt or the text, positive logits are divided by this number,
    and negative ones are multiplied by it.
    """
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    """Biases added to token logits before anything else is applied."""
    template_options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Chat template variables."""
    is_echoed: bool = False
    """True if the result includes the prompt's text, with log probabilities for its tokens if
    requested.
    """
    stop: list[str] = msgspec.field(default_factory=list)
    logprobs: int = -1
    """Number of alternatives to report per token. -1 means no log probabilities at all."""
    json_schema: str = ""
    """JSON schema, serialized, that the text must match. Empty if there is none."""
    schema_field: str = RESPONSE_FORMAT
    """Request field that supplied the schema. Any field other than the default means that the
    schema describes a tool call.
    """
    is_streamed: bool = False
    """True if tokens are reported as they are generated (shared/stores/token_streams.py)."""

    @property
    def field(self) -> Literal["messages", "prompt"]:
        return "messages" if self.messages else "prompt"

    def check_length(self, context_tokens: int) -> None:
        """Rejects a prompt that is far too long, before it is tokenized.

        Raises:
            ContextLengthExceeded: the prompt is too long. The number of tokens is estimated from
                the prompt's size.
        """
        prompt = self._estimate_prompt()
        if prompt > FAR_ABOVE * context_tokens:
            raise self.too_long(prompt, context_tokens)

    def room(self, prompt_tokens: int, context_tokens: int) -> int:
        """Returns how many tokens may be generated after a prompt.

        Raises:
            ContextLengthExceeded: too few remain.
        """
        remaining_tokens = context_tokens - prompt_tokens
        if remaining_tokens < (1 if self.ends_with_context else self.max_tokens):
            raise self.too_long(prompt_tokens, context_tokens)
        return min(self.max_tokens, remaining_tokens)

    def too_long(self, prompt_tokens: int, context_tokens: int) -> ContextLengthExceeded:
        """Returns the error with OpenAI's wording, because clients and proxies look for it."""
        written = 1 if self.ends_with_context else self.max_tokens
        return ContextLengthExceeded(
            f"This model's maximum context length is {context_tokens} tokens. However, you "
            f"requested {prompt_tokens + written} tokens ({prompt_tokens} in the {self.field}, "
            f"{written} in the completion). Please reduce the length of the {self.field} or "
            "completion.",
            field=self.field,
        )

    def estimate_work(self, entry: CatalogEntry) -> int:
        """Returns an estimate of the prompt's tokens, plus the maximum that may be generated."""
        return self._estimate_prompt() + self.max_tokens

    def _estimate_prompt(self) -> int:
        if isinstance(self.prompt, list):
            return len(self.prompt)
        if not self.messages:
            return estimate_tokens(self.prompt)
        parts = [self.messages, self.tools, *filter(None, [self.template_options])]
        size_bytes = len(msgspec.json.encode(parts))
        return -(-size_bytes // BYTES_PER_TOKEN) + TEMPLATE_TOKENS * len(self.messages)

    def bound_work(self, entry: CatalogEntry) -> WorkBound:
        """Returns one token per byte in the prompt, plus the maximum number that may be generated.

        A prompt that leaves too little of the context for its continuation is rejected.
        """
        room = max(0, entry.generation.context_tokens - self.max_tokens)
        return WorkBound(min(self._bound_prompt(), room) + self.max_tokens, self.max_tokens)

    def _bound_prompt(self) -> int:
        if isinstance(self.prompt, list):
            return len(self.prompt)
        if not self.messages:
            return bound_tokens(self.prompt) + SPECIAL_TOKENS
        messages, tools, options = (
            bound_tokens(msgspec.json.encode(part).decode())
            for part in (self.messages, self.tools, self.template_options)
        )
        return messages + INDENTED * (tools + options) + MAX_TEMPLATE_TOKENS

    def cache_form(self) -> tuple[object, ...]:
        """Returns all fields except `is_streamed`, which does not affect the text."""
        names = (name for name in self.__struct_fields__ if name != "is_streamed")
        # As JSON, because messages are nested and the template sees their key order.
        fields = {name: getattr(self, name) for name in names}
        return ("generation", msgspec.json.encode(fields).decode())


class GenerationResult(TaskResult, tag="generation"):
    """The text, the reason it ended, and the tokens used.

    `tokens` counts all tokens. `input_tokens` includes `cached_tokens`: prompt tokens whose keys
    and values the worker had already computed for another prompt that starts the same way.
    """

    text: str
    finish_reason: FinishReason
    tokens: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    prompt_text: str = ""
    """The prompt's text, only if requested."""
    prompt_logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    """An echoed prompt's log probabilities. The first token's log probability is 0, without
    alternatives.
    """
    stop_sequence: str = ""
    """The stop sequence that ended the generation. Empty if the generation ended for another
    reason.
    """

    def find_wrong_number(self) -> str:
        """Describes a log probability that is invalid."""
        tokens = (*self.prompt_logprobs, *self.logprobs)
        logprobs = (candidate.logprob for token in tokens for candidate in (token, *token.top))
        if all(map(math.isfinite, logprobs)):
            return ""
        return "a log probability that is not a finite number"

    @property
    def streamed_tokens(self) -> int:
        """Number of tokens in the result's stream."""
        return self.output_tokens

    def to_output(self, media_type: str, link_to: LinkTo) -> str:
        return self.text

    def step_value(self) -> str:
        return self.text


def is_sampling_repeatable(
    seed: int | None, temperature: float | None, top_p: float | None
) -> bool:
    """Returns whether an identical request produces identical text."""
    return seed is not None or temperature == 0 or top_p == 0


class GenerationTask(Task):
    """Language models. The unit of work is the token, whether read or generated."""

    name = "text"
    noun = "a text model"
    gen_ai_operation = "chat"
    unit = "tokens"
    precisions: ClassVar = ("auto", "fp32", "bf16", "fp16", "int4")
    engines: ClassVar = ("auto", "llama.cpp", "vllm")
    has_context = True
    shares_weights = True
    first_guesses: ClassVar = FirstGuesses(item_s=2.0, gap_s=0.05, batch_s=2.0)

    def entry_defaults(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises the time limit for vLLM, which compiles the model and records CUDA graphs."""
        return {"startup_s": VLLM_STARTUP_S} if fields.get("engine") == "vllm" else {}

    def check_entry(self, entry: CatalogEntry) -> None:
        """Requires a token budget, and torch or an engine."""
        if entry.backend == "onnx":
            raise ValueError(f"{self.noun} requires the torch backend, or auto")
        if entry.engine != "auto":
            self._check_engine(entry)
        self._check_adapters(entry)
        if entry.batch.max_tokens is None:
            raise ValueError(f"{self.noun} requires batch.max_tokens")
        if entry.batch.max_tokens < entry.generation.context_tokens:
            raise ValueError("batch.max_tokens must be at least generation.context_tokens")

    def _check_engine(self, entry: CatalogEntry) -> None:
        if entry.backend != "auto":
            raise ValueError(f"backend: is not supported by engine {entry.engine}; omit it")
        if entry.engine == "vllm" and entry.precision == "int4":
            raise ValueError(
                "precision: int4 is not supported by engine vllm; omit it or use a source with "
                "quantized weights"
            )
        if entry.engine == "vllm" and entry.precision == "bf16" and entry.gpu.type == "t4":
            raise ValueError("precision: bf16 is not supported by t4 GPUs; omit it or use fp16")
        if entry.engine == "llama.cpp" and entry.precision != "auto":
            raise ValueError(
                f"precision: is determined by the model file with engine {entry.engine}; omit it "
                "and choose a file with a different quantization"
            )
        if entry.generation.lookup_tokens:
            raise ValueError(
                f"generation.lookup_tokens: is not supported by engine {entry.engine}; omit it"
            )

    def _check_adapters(self, entry: CatalogEntry) -> None:
        is_file = entry.engine == "llama.cpp"
        for name, adapter in entry.generation.adapters.items():
            where = f"generation.adapters.{name}"
            if entry.engine == "auto":
                raise ValueError(f"{where}: requires engine llama.cpp or vllm")
            if name == entry.name:
                raise ValueError(f"{where}: the model already has this name")
            if adapter.source.endswith(".gguf") != is_file:
                wanted = "a GGUF file" if is_file else "a folder saved by PEFT, not a GGUF file"
                raise ValueError(f"{where}.source: engine {entry.engine} requires {wanted}")

    def budget(self, entry: CatalogEntry) -> int:
        """Returns the number of tokens whose keys and values are kept at once."""
        assert entry.batch.max_tokens is not None, (
            "validated when the catalog was read; this is a bug"
        )
        return entry.batch.max_tokens

    def tolerance(self, entry: CatalogEntry) -> float:
        """Returns 0, because generations have no distance measure."""
        return 0.0

    def result_bytes(self, entry: CatalogEntry) -> int:
        """Returns the size of a generated text with the maximum number of tokens."""
        return entry.generation.longest_tokens * TOKEN_BYTES

    def step_schema(self, entry: CatalogEntry) -> StepSchema:
        """Returns the schemas of a prompt or messages, and of the text that continues them."""
        return StepSchema({"type": "object", "properties": STEP_FIELDS}, {"type": "string"})

    def step_input(self, entry: CatalogEntry, values: Mapping[str, Any]) -> StepInput:
        """Accepts a prompt or messages.

        Raises:
            BadInput: neither or both are given, or too many tokens are requested.
            ContextLengthExceeded: the prompt is far too long for the model.
        """
        prompt, messages = values.get("prompt"), values.get("messages")
        if bool(prompt) == bool(messages):
            raise BadInput("send either prompt or messages", field="prompt")
        limits, max_tokens = entry.generation, values.get("max_tokens")
        if max_tokens is not None and max_tokens > limits.longest_tokens:
            raise BadInput(
                f"max_tokens: must be at most {limits.longest_tokens} for {entry.name}",
                field="max_tokens",
            )
        seed = values.get("seed")
        temperature, top_p = (float(values.get(name, 1.0)) for name in ("temperature", "top_p"))
        repeats = is_sampling_repeatable(seed, temperature, top_p)
        generation = GenerationInput(
            max_tokens=max_tokens or limits.default_tokens,
            seed=(seed or 0) if repeats else secrets.randbelow(MAX_STEP_SEED),
            ends_with_context=max_tokens is None,
            messages=list(messages or ()),
            prompt=prompt or "",
            temperature=temperature,
            top_p=top_p,
            top_k=values.get("top_k", 0),
            stop=list(values.get("stop", ())),
        )
        generation.check_length(limits.context_tokens)
        return StepInput(generation, repeats)

    def step_bound(self, entry: CatalogEntry) -> WorkBound:
        """Returns the full context size, and the maximum number of generated tokens."""
        return WorkBound(entry.generation.context_tokens, entry.generation.longest_tokens)


TEXT = GenerationTask()


class PromptToCount(TaskInput, tag="text_to_count"):
    """Messages or a prompt, for counting their tokens. `wants_ids`: also return the token IDs."""

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    prompt: str = ""
    wants_ids: bool = False

    def estimate_work(self, entry: CatalogEntry) -> int:
        """Returns 0, because the model does not run."""
        return 0

    def bound_work(self, entry: CatalogEntry) -> WorkBound:
        """Returns 0, because counting is free."""
        return WorkBound(0)

    def cache_form(self) -> tuple[object, ...]:
        """Returns all fields as JSON, because key order is visible to the template."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return ("text_to_count", msgspec.json.encode(fields).decode())


class TokenCount(TaskResult, tag="token_count"):
    """The number of tokens and, if requested, their IDs as little-endian uint32."""

    count: int
    ids: bytes = b""

    @property
    def token_ids(self) -> list[int]:
        starts = range(0, len(self.ids), ID_BYTES)
        return [int.from_bytes(self.ids[at : at + ID_BYTES], "little") for at in starts]

    def to_output(self, media_type: str, link_to: LinkTo) -> Any:
        return self.count

    def step_value(self) -> int:
        return self.count
