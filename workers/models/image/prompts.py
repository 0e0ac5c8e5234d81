"""Encodes each prompt once: caches the results of a pipeline's `encode_prompt`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from workers.models.image.kept_encodings import KeptEncodings
from workers.models.image.pipeline import inner_pipelines, signature_of

KEPT_BYTES = 64 * 1024 * 1024
"""Device memory for the prompt cache.

In 16-bit precision, it holds 270 prompt pairs for Stable Diffusion 1.5, 100 for SDXL, 12 for Stable
Diffusion 3, or 15 for FLUX.1.
"""
_METHOD = "encode_prompt"


class LostTokens:
    """Counts the tokens that a pipeline's text encoders cut off.

    The tokens of each text are counted by whichever encoder accepts the longest input.
    """

    def __init__(self) -> None:
        self.by_text: dict[str, tuple[int, int]] = {}
        """For each text, the encoder's maximum number of tokens and the negated number of lost
        tokens.
        """

    @property
    def count(self) -> int | None:
        """Number of lost tokens across all texts.

        None if none of the pipeline's tokenizers cut off any tokens.
        """
        return -sum(lost for _, lost in self.by_text.values()) if self.by_text else None

    def note(self, tokenizer: Any, texts: Any, read: Any, limit: int) -> None:
        """Records the texts that a tokenizer has read and the maximum number of tokens it reads."""
        masks = read.get("attention_mask")
        for at, text in enumerate([texts] if isinstance(texts, str) else texts or ()):
            if not isinstance(text, str):
                continue
            lost = 0
            if masks is None or _is_full(torch.as_tensor(masks), at, limit):
                lost = max(0, len(tokenizer(text, verbose=False)["input_ids"]) - limit)
            self.by_text[text] = max((limit, -lost), self.by_text.get(text, (0, 0)))


def _is_full(masks: torch.Tensor, at: int, limit: int) -> bool:
    """Returns whether a text fills up its encoder's input. Some encoders pad to fewer tokens."""
    return masks.shape[-1] >= limit and bool(masks.reshape(-1, limit)[at].all())


class _CountingTokenizer:
    """Replaces a tokenizer in an item's pipeline and counts the tokens it cuts off."""

    def __init__(self, tokenizer: Any, lost: LostTokens) -> None:
        self.__dict__.update(_tokenizer=tokenizer, _counts=lost)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.__dict__["_tokenizer"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_tokenizer"], name)

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        read = self._tokenizer(text, *args, **kwargs)
        if kwargs.get("truncation") and (limit := kwargs.get("max_length")):
            self._counts.note(self._tokenizer, text, read, limit)
        return read


class Prompts:
    """A model's encoded prompts.

    Args:
        kept_bytes: maximum size of the cached prompts.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._encodings = KeptEncodings(kept_bytes)

    def intercept(self, pipeline: Any, variant: str = "") -> LostTokens:
        """Makes an item's pipeline use the cached prompts.

        Args:
            variant: identifies anything that changes the text encoders, such as an adapter and its
                scale. May be empty.

        Returns:
            A counter of the tokens that its prompts lose during encoding.
        """
        lost = LostTokens()
        for part in (pipeline, *inner_pipelines(pipeline).values()):
            for name in signature_of(type(part).__init__).parameters:
                tokenizer = getattr(part, name, None) if name.startswith("tokenizer") else None
                if tokenizer is not None:
                    object.__setattr__(part, name, _CountingTokenizer(tokenizer, lost))
            encode = getattr(part, _METHOD, None)
            if encode is not None:
                object.__setattr__(part, _METHOD, self._keeping(encode, variant, lost))
        return lost

    def _keeping(
        self, encode: Callable[..., Any], variant: str, lost: LostTokens
    ) -> Callable[..., Any]:
        signature = signature_of(encode.__func__)  # type: ignore[attr-defined]

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            named = signature.bind(None, *args, **kwargs).arguments
            key = _key([variant, encode.__func__, *named.items()])  # type: ignore[attr-defined]
            if key is None:
                return encode(*args, **kwargs)
            entry = self._encodings.get(key)
            if entry is None:
                # Some pipelines encode the negative prompt in a separate call, so its tokens are
                # counted separately.
                before, lost.by_text = lost.by_text, {}
                encoded = encode(*args, **kwargs)
                self._encodings.keep(key, (_copy(encoded), lost.by_text))
                lost.by_text = before | lost.by_text
                return encoded
            lost.by_text = lost.by_text | entry[1]
            return _copy(entry[0])

        return encode_prompt


def _copy(encoded: Any) -> Any:
    """Returns a copy, because pipelines may change the encodings in place."""
    return tree_map_only(torch.Tensor, torch.clone, encoded)


def _key(value: Any) -> Hashable | None:
    """Formats a value for use in a key. Returns None if part of it can't be in a key."""
    if value is None or isinstance(value, str | int | float | torch.device | torch.dtype):
        return (type(value).__name__, value)
    if isinstance(value, list | tuple):
        parts = tuple(_key(element) for element in value)
        return None if None in parts else (type(value).__name__, parts)
    return value if callable(value) else None
