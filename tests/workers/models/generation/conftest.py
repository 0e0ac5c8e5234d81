"""One tiny model for all tests in this package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    # Otherwise, every process in a quick run would import torch and transformers for a single file.
    import torch

    from tests.workers.models.generation import tiny
    from workers.models.generation.model import GenerationModel


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.workers.models.generation import tiny

    return tiny.write_folder(tmp_path_factory.mktemp("tiny-text"))


@pytest.fixture(scope="session")
def shared_model(folder: Path) -> GenerationModel:
    from tests.workers.models.generation import tiny

    return tiny.open_model(folder)


@pytest.fixture
def model(shared_model: GenerationModel) -> GenerationModel:
    """The model, without any text left over from the previous test."""
    for slot in list(range(100)):
        shared_model.drop(slot)
    return shared_model


@pytest.fixture(scope="session")
def reference(folder: Path) -> tiny.Generate:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(ids: list[int], tokens: int, **options: Any) -> tuple[list[int], torch.Tensor]:
        """Returns the greedy continuation and the log probabilities of each step."""
        out = loaded.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            **options,
        )
        return out.sequences[0, len(ids) :].tolist(), torch.stack(out.logits)[:, 0].log_softmax(-1)

    return generate
