"""The tiny pipeline's prompts: each is encoded once, and the truncated tokens are counted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from workers.models.image.hub import Hub
from workers.models.image.own_pipeline import Interception
from workers.models.image.prompts import Prompts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pipeline(tiny_folder: Path) -> Any:
    return diffusers.StableDiffusionPipeline.from_pretrained(tiny_folder, safety_checker=None)


@pytest.fixture
def rows(pipeline: Any) -> Iterator[list[int]]:
    """Number of prompts in each text encoder call."""
    seen: list[int] = []
    hook = pipeline.text_encoder.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(len(kwargs["input_ids"])),
        with_kwargs=True,
    )
    yield seen
    hook.remove()


def encode(
    prompts: Prompts, pipeline: Any, prompt: str, negative: str | None = None, variant: str = ""
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """The embeddings of both prompts, and the number of truncated tokens."""
    own = Interception(Hub()).own(pipeline)
    lost = prompts.intercept(own, variant)
    with torch.inference_mode():
        positive, other = own.encode_prompt(prompt, own.device, 1, True, negative)
    return positive, other, lost.count


def test_equal_prompts_are_encoded_once(pipeline: Any, rows: list[int]) -> None:
    prompts = Prompts()
    first = encode(prompts, pipeline, "a", "x")
    assert rows == [1, 1]
    again = encode(prompts, pipeline, "a", "x")
    assert rows == [1, 1]
    assert all(torch.equal(*both) for both in zip(first[:2], again[:2], strict=True))
    for other in ({"prompt": "b"}, {"negative": "y"}, {"variant": "ink@1.0"}):
        encode(prompts, pipeline, **({"prompt": "a", "negative": "x"} | other))
    assert rows == [1] * 8


def test_what_one_image_changes_is_not_kept(pipeline: Any) -> None:
    prompts = Prompts()
    for _ in range(2):
        positive, _, _ = encode(prompts, pipeline, "a")
        assert positive.abs().max() > 0
        with torch.inference_mode():
            positive.zero_()


def test_the_embeddings_are_the_pipelines_own(pipeline: Any) -> None:
    with torch.inference_mode():
        own = pipeline.encode_prompt("a", "cpu", 1, True, "x")
    prompts = Prompts()
    for _ in range(2):
        for mine, reference in zip(encode(prompts, pipeline, "a", "x"), own, strict=False):
            torch.testing.assert_close(mine, reference)


def test_tokens_left_out_are_counted_in_both_prompts(pipeline: Any) -> None:
    prompts, most = Prompts(), pipeline.tokenizer.model_max_length
    for _ in range(2):
        assert encode(prompts, pipeline, "a")[2] == 0
        # The maximum includes two special tokens.
        assert encode(prompts, pipeline, "a " * (most - 2))[2] == 0
        assert encode(prompts, pipeline, "a " * (most + 3), "a " * (most - 1))[2] == 5 + 1


def test_what_was_not_used_for_longest_is_dropped(pipeline: Any, rows: list[int]) -> None:
    positive, negative, _ = encode(Prompts(), pipeline, "a")
    prompts = Prompts(kept_bytes=2 * (positive.nbytes + negative.nbytes))
    rows.clear()
    for prompt in ("a", "b", "a", "c", "a", "b"):
        encode(prompts, pipeline, prompt)
    # "c" evicts "b", so "b" is encoded again.
    assert len(rows) == 2 * 4


def test_no_room_means_no_memory(pipeline: Any, rows: list[int]) -> None:
    prompts = Prompts(kept_bytes=0)
    encode(prompts, pipeline, "a")
    encode(prompts, pipeline, "a")
    assert rows == [1] * 4
