"""Lists of models that share workers: how they affect the catalog, and invalid lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from shared.models.catalog import Catalog
from shared.models.catalog_file import read_catalog

MODELS = """\
models:
  - {name: texts, task: embedding, source: 'hf:a/b', dimensions: 4, batch: {max_tokens: 8},
     gpu: {type: l4, share: 2}, canary: {revision: next}}
  - {name: words, aliases: [split], task: embedding, source: 'hf:a/c', dimensions: 4,
     batch: {max_tokens: 8}, gpu: {type: l4, share: 2}}
  - {name: others, task: embedding, source: 'hf:a/d', dimensions: 4, batch: {max_tokens: 8},
     gpu: {type: a100}}
  - {name: bounded, task: embedding, source: 'hf:a/e', dimensions: 4, batch: {max_tokens: 8},
     gpu: {type: l4, share: 2}, replicas: {max: 3}}
flows:
  - {name: both, input: {text: string}, output: $one,
     steps: [{id: one, model: words, input: {text: $input.text}}]}
"""


def read(folder: Path, workers: str) -> Catalog:
    path = folder / "models.yaml"
    path.write_text(f"{MODELS}workers:\n  {workers}\n")
    return read_catalog(path)


def test_models_of_a_list_have_one_group_and_its_replicas(tmp_path: Path) -> None:
    catalog = read(
        tmp_path, "- {name: reading, models: [words, texts], replicas: {min: 1, max: 5}}"
    )
    groups = {group.name: [model.name for model in group.models] for group in catalog.worker_groups}
    assert groups == {
        "reading": ["words", "texts"],
        "others": ["others"],
        "bounded": ["bounded"],
        "texts.canary": ["texts.canary"],
    }
    for name in ("texts", "words"):
        assert (catalog.find(name).replicas.min, catalog.find(name).replicas.max) == (1, 5)
    assert catalog.find("bounded").replicas.max == 3
    assert [group.is_shared for group in catalog.worker_groups] == [True, False, False, False]


def test_without_a_list_each_model_has_its_own(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(MODELS)
    catalog = read_catalog(path)
    assert [group.name for group in catalog.worker_groups] == [one.name for one in catalog.deployed]


@pytest.mark.parametrize(
    ("workers", "place", "reason"),
    [
        ("[]", "workers", "must be a list"),
        ("- {name: reading, models: [texts]}", "models", "at least 2 items"),
        ("- {models: [texts, words]}", "name", "Field required"),
        ("- {name: reading, models: [texts, words], gpu: l4}", "gpu", "Extra inputs"),
        (
            "- {name: reading, models: [texts, none]}",
            "models.1",
            "model 'none' does not exist; the catalog",
        ),
        ("- {name: reading, models: [texts, split]}", "models.1", "model 'split' does not exist"),
        ("- {name: reading, models: [texts, both]}", "models.1", "model 'both' does not exist"),
        ("- {name: reading, models: [texts, texts]}", "models.1", "appears twice in this list"),
        (
            "- {name: reading, models: [texts, others]}",
            "models.1",
            "'others' has GPU {type: a100, share: 1, sharing: time-sharing, ",
        ),
        ("- {name: reading, models: [texts, bounded]}", "models.1", "must not set replicas"),
        (
            "- {name: reading, models: [texts, words]}\n  - {name: again, models: [words, texts]}",
            "models.0",
            "'words' is already assigned to workers 'reading'",
        ),
        (
            "- {name: both, models: [texts, words]}",
            "",
            "the name 'both' is already used on line 11",
        ),
        (
            "- {name: split, models: [texts, words]}",
            "",
            "the name 'split' is already used on line 4",
        ),
        ("- {name: Others, models: [texts, words]}", "", "both become 'others' in Kubernetes"),
        (
            "- {name: texts-canary, models: [texts, words]}",
            "",
            "both become 'texts-canary' in Kubern",
        ),
    ],
)
def test_wrong_lists_are_refused_with_line_and_reason(
    tmp_path: Path, workers: str, place: str, reason: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, workers)
    line = 13 if workers == "[]" else 15 if "again" in workers else 14
    where = f"{tmp_path}/models.yaml:{line}: {place}{': ' if place else ''}"
    assert caught.value.message.startswith(where)
    assert reason in caught.value.message


@pytest.mark.parametrize(("gpu", "is_refused"), [("{type: l4}", True), ("{}", False)])
def test_vllm_does_not_share_its_gpu_with_other_models(
    tmp_path: Path, gpu: str, is_refused: bool
) -> None:
    entries = "".join(
        f"- {{name: {name}, task: text, engine: {engine}, source: 'hf:a/{name}',"
        f" batch: {{max_tokens: 4096}}, gpu: {gpu}}}\n"
        for name, engine in (("writer", "vllm"), ("talker", "auto"))
    )
    path = tmp_path / "models.yaml"
    path.write_text(f"models:\n{entries}workers: [{{name: both, models: [talker, writer]}}]\n")
    if not is_refused:
        assert len(read_catalog(path).worker_groups) == 1
        return
    with pytest.raises(ConfigurationError, match="'writer' has engine vllm, which reserves its"):
        read_catalog(path)
