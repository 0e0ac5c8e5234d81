import json
from pathlib import Path

import pytest

from shared.errors import ConfigurationError, UnknownModel
from shared.models.catalog import Catalog, Model, Revision
from shared.models.catalog_file import inline_interfaces, read_catalog
from shared.models.tasks.custom import stores_files
from shared.money.charge import list_price_usd, price_of

GOOD = """\
models:
  - name: mini
    task: embedding
    source: local:mini
    revision: "1"
    aliases: [small]
    dimensions: 4
    batch: {max_tokens: 64, max_items: 8}
    price: {per_million_tokens_usd: 0.5}
  - name: painter
    task: image
    source: hf:someone/painter
    batch:
      max_pixel_steps: 4096
"""


@pytest.fixture
def models_file(tmp_path: Path) -> Path:
    path = tmp_path / "models.yaml"
    path.write_text(GOOD)
    return path


def test_shipped_catalog_is_valid() -> None:
    catalog = read_catalog(Path(__file__).parents[2] / "models.yaml")
    assert catalog.default("embedding").dimensions
    assert catalog.default("image").image.steps


def test_find_by_name_and_alias(models_file: Path) -> None:
    catalog = read_catalog(models_file)
    assert catalog.find("mini") is catalog.find("small", "embedding")
    assert catalog.default("image").name == "painter"
    assert [model.budget for model in catalog.models] == [64, 4096]


def test_only_an_embedding_model_leaves_its_backend_open(models_file: Path) -> None:
    mini, painter = read_catalog(models_file).models
    assert (mini.backend, mini.precision, mini.tolerance.cosine) == ("auto", "auto", 0.9999)
    assert (painter.backend, painter.precision) == ("torch", "auto")


def test_replies_of_images_have_slots_unless_the_entry_says_otherwise(models_file: Path) -> None:
    assert [model.replies for model in read_catalog(models_file).models] == ["direct", "slots"]
    models_file.write_text(GOOD.replace("task: image", "task: image\n    replies: direct"))
    assert read_catalog(models_file).find("painter").replies == "direct"


def test_cost_counts_what_was_computed(models_file: Path) -> None:
    mini = read_catalog(models_file).find("mini")
    assert list_price_usd(price_of(mini, 0), 2_000_000, None) == pytest.approx(1.0)
    assert list_price_usd(price_of(mini, 0), None, 2_000_000) == 0


CANARY = GOOD.replace(
    "    aliases: [small]", '    aliases: [small]\n    canary: {revision: "2", share: 0.1}'
)


def test_canary_is_a_model_of_the_pipeline_only(models_file: Path) -> None:
    models_file.write_text(CANARY)
    catalog = read_catalog(models_file)
    assert [model.name for model in catalog.models] == ["mini", "painter"]
    assert [model.name for model in catalog.deployed] == ["mini", "painter", "mini.canary"]
    canary = catalog.find_deployed("mini.canary")
    assert (canary.revision, canary.source, canary.public_name) == ("2", "local:mini", "mini")
    assert isinstance(canary, Revision)
    assert (canary.replicas.min, canary.aliases) == (1, ())
    assert Revision.model_validate_json(canary.model_dump_json()) == canary
    # Model processes read it like any other model.
    assert Model.model_validate_json(canary.model_dump_json()).revision == "2"
    assert catalog.find_deployed("small") is catalog.find("mini")
    with pytest.raises(UnknownModel):
        catalog.find("mini.canary")


@pytest.mark.parametrize(
    ("canary", "reason"),
    [
        ('{revision: "1"}', "canary.revision must differ from the model's revision"),
        ("{revision: 2}", "a revision that looks like a number must be quoted"),
        ('{revision: "2", share: 0.6}', "less than or equal to 0.5"),
        ('{revision: "2", share: 0}', "greater than 0"),
        ('{revision: "2", replicas: {min: 0}}', "min must be at least 1"),
        ('{revision: "a b"}', "should match pattern"),
        ("{share: 0.1}", "canary.revision: Field required"),
        ('{revision: "2", source: "ftp:x"}', "should match pattern"),
    ],
)
def test_wrong_canary_is_refused(models_file: Path, canary: str, reason: str) -> None:
    models_file.write_text(CANARY.replace('{revision: "2", share: 0.1}', canary))
    with pytest.raises(ConfigurationError) as caught:
        read_catalog(models_file)
    assert reason in caught.value.message


def test_same_revision_of_another_source_can_be_a_canary(models_file: Path) -> None:
    other = '{revision: "1", source: "hf:someone/mini"}'
    models_file.write_text(CANARY.replace('{revision: "2", share: 0.1}', other))
    assert read_catalog(models_file).find_deployed("mini.canary").source == "hf:someone/mini"


def test_no_model_has_the_name_of_a_canary(models_file: Path) -> None:
    models_file.write_text(GOOD.replace("name: mini", "name: mini.canary"))
    with pytest.raises(ConfigurationError, match=r"must not end in \.canary"):
        read_catalog(models_file)


def test_unknown_model_names_no_other(models_file: Path) -> None:
    with pytest.raises(UnknownModel, match="'none' does not exist") as caught:
        read_catalog(models_file).find("none", "image")
    assert "painter" not in str(caught.value)


def test_model_of_other_task_is_unknown(models_file: Path) -> None:
    with pytest.raises(UnknownModel, match="is for embedding, not image"):
        read_catalog(models_file).find("mini", "image")


def test_no_model_of_a_task() -> None:
    with pytest.raises(UnknownModel, match="has no image models"):
        Catalog(()).default("image")


@pytest.mark.parametrize(
    ("wrong", "right", "line", "reason"),
    [
        ("name: mini", "name: 1x", 2, "name: String should match"),
        ("name: mini", "name: jobs.dead", 2, "entry: Value error, a name must not end in .dead"),
        (
            "task: embedding",
            "task: speech",
            3,
            "unknown task 'speech'; use one of embedding, image, similarity",
        ),
        ("source: local:mini", "source: mini", 4, "source: String should match"),
        ("    source: local:mini\n", "", 2, "source: Field required"),
        (
            'revision: "1"',
            "revision: 1.10",
            5,
            "revision: Value error, a revision that looks like a number",
        ),
        ("max_items: 8", "max_items: 0", 8, "batch.max_items: Input should be greater than 0"),
        ("max_items: 8", "max_item: 8", 8, "batch.max_item: Extra inputs are not permitted"),
        (
            "dimensions: 4",
            "text: {}",
            2,
            "entry: Value error, an embedding model requires dimensions",
        ),
        ("dimensions: 4", "dimensions: many", 7, "dimensions: Input should be a valid integer"),
        (
            "max_pixel_steps: 4096",
            "max_items: 1",
            10,
            "entry: Value error, an image model requires batch.max_pixel",
        ),
        (
            "max_pixel_steps: 4096",
            "max_pixel_steps: -1",
            14,
            "batch.max_pixel_steps: Input should be greater",
        ),
        (
            "task: image",
            "task: image\n    deadline: {default_s: 400}",
            10,
            "entry: Value error, deadline.default_s",
        ),
        ("task: image", "task: image\n    gpu: {type: tpu}", 12, "gpu.type: Input should be 'l4'"),
        (
            "task: image",
            "task: image\n    backend: auto",
            10,
            "entry: Value error, an image model requires the torch backend",
        ),
        (
            "task: image",
            "task: image\n    image: {adapters: {ink: {source: 'local:ink.bin'}}}",
            12,
            "image.adapters.ink.source: String should match",
        ),
        (
            "task: image",
            "task: image\n    image: {adapters: {ink: {source: 'local:i.safetensors', digest: 1}}}",
            12,
            "image.adapters.ink.digest: Input should be a valid string",
        ),
        (
            "task: image",
            "task: image\n    image: {compile: always, deep_cache: {cache_interval: 3}}",
            12,
            "image: Value error, compile must be auto or never with deep_cache",
        ),
        (
            "task: image",
            "task: image\n    image: {deep_cache: {cache_interval: 1}}",
            12,
            "image.deep_cache.cache_interval: Input should be greater than or equal to 2",
        ),
        (
            "dimensions: 4",
            "dimensions: 4\n    backend: jax",
            8,
            "backend: Input should be 'auto', 'torch' or 'onnx'",
        ),
        (
            "dimensions: 4",
            "dimensions: 4\n    tolerance: {cosine: 2}",
            8,
            "tolerance.cosine: Input should be less",
        ),
        (
            "dimensions: 4",
            "dimensions: 4\n    backend: torch\n    precision: int8",
            2,
            "entry: Value error, embeddings in precision int8 require backend onnx",
        ),
        (
            "dimensions: 4",
            "dimensions: 4\n    precision: int4",
            2,
            "entry: Value error, precision: an embedding model does not support int4",
        ),
        (
            "dimensions: 4",
            "dimensions: 4\n    backend: onnx\n    precision: bf16",
            2,
            "entry: Value error, precision bf16 requires the torch backend",
        ),
        (
            "dimensions: 4",
            "dimensions: 4\n    replies: slots",
            2,
            "entry: Value error, replies: must be direct",
        ),
        (
            "dimensions: 4",
            "dimensions: 4\n    replies: both",
            8,
            "replies: Input should be 'direct' or 'slots'",
        ),
        (
            "dimensions: 4",
            "dimensions: 4\n    gpu: {type: l4, count: 2}",
            2,
            "entry: Value error, gpu.count: must be 1, got 2; only engine vllm uses",
        ),
        (
            "dimensions: 4",
            "dimensions: 4\n    gpu: {type: l4, count: 2, share: 2}",
            8,
            "gpu: Value error, share: a worker with several GPUs can't share them",
        ),
        (
            "dimensions: 4",
            "dimensions: 4\n    gpu: {type: t4, count: 8}",
            8,
            "gpu: Value error, count: no machine has 8 GPUs of type t4; use one of 1, 2, 4",
        ),
        (
            "dimensions: 4",
            "dimensions: 4\n    gpu: {count: 2}",
            8,
            "gpu: Value error, count: requires a GPU type",
        ),
        ("source: hf:", "source: !!python/name:", 10, "could not determine a constructor"),
        ("name: painter", "name: small", 10, "the name 'small' is already used on line 2"),
        ("name: painter", "name: Mini.", 10, "'mini' and 'Mini.' both become 'mini' in Kubernetes"),
    ],
    ids=lambda value: value if isinstance(value, str) and ":" in value and len(value) < 25 else "",
)
def test_wrong_entry_is_refused_with_line_and_reason(
    models_file: Path, wrong: str, right: str, line: int, reason: str
) -> None:
    assert GOOD.count(wrong) == 1
    models_file.write_text(GOOD.replace(wrong, right))
    with pytest.raises(ConfigurationError) as caught:
        read_catalog(models_file)
    place, _, rest = caught.value.message.partition(": ")
    assert place == f"{models_file}:{line}"
    assert reason in rest.replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ":1: the catalog must be a mapping"),
        ("models: []", "non-empty list `models`"),
        ("- name: mini", "the catalog must be a mapping"),
        ("models: {mini: 1}", "the catalog must be a mapping"),
        ("models: [mini]", ":1: entry: Input should be a valid dictionary"),
        ("models:\n  - name: [", "line 2"),
    ],
)
def test_file_that_is_no_catalog(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_catalog(path)
    assert caught.value.message.startswith(str(path))
    assert reason in caught.value.message


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.yaml: No such file"):
        read_catalog(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"binary\.yaml"):
        read_catalog(tmp_path / "binary.yaml")
    # YAML reads this as a date.
    (tmp_path / "date.yaml").write_text("models:\n- {name: a, task: text, revision: 2026-13-45}\n")
    with pytest.raises(ConfigurationError, match=r"date\.yaml:2: month must be in 1\.\.12"):
        read_catalog(tmp_path / "date.yaml")


def test_canary_and_model_that_meet_in_kubernetes(models_file: Path) -> None:
    text = GOOD.replace('revision: "1"', 'revision: "1"\n    canary: {revision: "2"}')
    models_file.write_text(text.replace("name: painter", "name: mini-canary"))
    with pytest.raises(ConfigurationError, match=r"'mini\.canary' and 'mini-canary' both become"):
        read_catalog(models_file)


INTERFACE = {
    "inputs": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    "output": {"type": "string"},
    "cog_version": "0.23.1",
    "sources_sha256": "0" * 64,
}
CLASSES = """\
models:
  - {name: mine, aliases: [own], task: custom, source: "local:.", interface: mine.json}
  - name: other
    task: custom
    source: "local:."
    interface: other.json
    canary: {revision: next, source: "local:."}
"""


def read_classes(folder: Path, text: str = CLASSES, **output: str) -> Catalog:
    for name in ("mine", "other"):
        told = INTERFACE | {"output": {"type": output.get(name, "string")}}
        (folder / f"{name}.json").write_text(json.dumps(told))
    (folder / "models.yaml").write_text(text)
    return read_catalog(folder / "models.yaml")


def shown(model: Model) -> object:
    assert model.interface is not None
    return model.interface.output["type"]


def test_a_class_of_a_user_who_does_not_exist_is_refused(tmp_path: Path) -> None:
    entry = 'models: [{name: mine, task: custom, source: "local:~no-such-user/x"}]'
    with pytest.raises(ConfigurationError, match="~no-such-user"):
        read_classes(tmp_path, entry)


def test_interfaces_of_a_later_catalog_are_taken(tmp_path: Path) -> None:
    catalog = read_classes(tmp_path)
    canaries = catalog.canaries
    assert catalog.take_interfaces(read_classes(tmp_path)) == []
    newer = read_classes(tmp_path, mine="integer", other="number")
    assert catalog.take_interfaces(newer) == ["mine", "other", "other.canary"]
    assert [shown(catalog.find(name)) for name in ("mine", "own", "other")] == [
        "integer",
        "integer",
        "number",
    ]
    assert [shown(model) for model in catalog.deployed] == ["integer", "number", "number"]
    assert shown(canaries["other"]) == shown(catalog.find_deployed("other.canary")) == "number"


def test_an_entry_that_changed_otherwise_is_not_taken(tmp_path: Path) -> None:
    catalog = read_classes(tmp_path)
    text = CLASSES.replace("aliases: [own]", "max_in_flight: 3")
    assert catalog.take_interfaces(read_classes(tmp_path, text, mine="integer")) == []
    assert shown(catalog.find("mine")) == "string"


def read_concurrent(folder: Path, concurrency: int, entry: str = "") -> Catalog:
    told = INTERFACE | {"concurrency": concurrency}
    (folder / "mine.json").write_text(json.dumps(told))
    text = 'models: [{name: mine, task: custom, source: "local:.", interface: mine.json%s}]'
    (folder / "models.yaml").write_text(text % entry)
    return read_catalog(folder / "models.yaml")


def test_a_class_computes_as_many_at_a_time_as_it_can_unless_the_entry_lowers_it(
    tmp_path: Path,
) -> None:
    assert read_concurrent(tmp_path, 1).find("mine").batch.max_items == 1
    assert read_concurrent(tmp_path, 8).find("mine").batch.max_items == 8
    lowered = read_concurrent(tmp_path, 8, ", batch: {max_items: 2}")
    assert lowered.find("mine").batch.max_items == 2
    with pytest.raises(ConfigurationError, match="must be at most 8, the number"):
        read_concurrent(tmp_path, 8, ", batch: {max_items: 9}")


@pytest.mark.parametrize(
    ("output", "has_files"),
    [
        ({"type": "object", "properties": {"security": {"type": "string"}}}, False),
        ({"type": "string", "format": "uri"}, True),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"format": "uri"}}]}, True),
        ({"type": "object", "properties": {"security": {"format": "uri"}}}, True),
    ],
)
def test_outputs_with_files_are_known_by_their_format(
    tmp_path: Path, output: dict[str, object], has_files: bool
) -> None:
    path = tmp_path / "models.yaml"
    path.write_text('models: [{name: mine, task: custom, source: "local:.", interface: mine.json}]')
    (tmp_path / "mine.json").write_text(json.dumps(INTERFACE | {"output": output}))
    assert stores_files(read_catalog(path).find("mine")) == has_files


@pytest.mark.parametrize("told", [{"batches": True}, {"concurrency": 8}])
def test_a_catalog_with_its_interfaces_inside_says_the_same(
    tmp_path: Path, told: dict[str, object]
) -> None:
    path = tmp_path / "models.yaml"
    path.write_text('models: [{name: mine, task: custom, source: "local:.", interface: mine.json}]')
    (tmp_path / "mine.json").write_text(json.dumps(INTERFACE | told))
    expected = read_catalog(path).models
    assert expected[0].batch.max_items > 1
    path.write_text(json.dumps(inline_interfaces(path)))
    assert read_catalog(path).models == expected


def test_an_interface_that_computes_more_at_a_time_is_taken_with_its_number(tmp_path: Path) -> None:
    catalog = read_concurrent(tmp_path, 1)
    assert catalog.take_interfaces(read_concurrent(tmp_path, 4)) == ["mine"]
    assert catalog.find("mine").batch.max_items == 4
    newer = read_concurrent(tmp_path, 4, ", batch: {max_items: 3}")
    assert catalog.take_interfaces(newer) == [], "the entry itself has changed"


def test_memory_is_bounded_for_models_of_ones_own_only(tmp_path: Path) -> None:
    text = CLASSES.replace("aliases: [own]", "resources: {memory_bytes: 1000000}")
    found = read_classes(tmp_path, text).find("mine")
    assert (found.resources.memory_bytes, found.resources.disk_bytes) == (1_000_000, 4 * 2**30)
    (tmp_path / "models.yaml").write_text(
        GOOD.replace("dimensions: 4", "dimensions: 4\n    resources: {memory_bytes: 1}")
    )
    with pytest.raises(
        ConfigurationError, match=r"resources\.memory_bytes: only supported by custom models"
    ):
        read_catalog(tmp_path / "models.yaml")
