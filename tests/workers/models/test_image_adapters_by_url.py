"""Adapters that callers specify by URL: drawn like adapters in the catalog, with bad files
rejected.
"""

import asyncio
import hashlib
import json
import resource
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from shared.errors import BadInput, ModelFailed
from shared.models.catalog import Catalog
from shared.models.image_entry import Adapter, AdapterUrls
from shared.models.tasks.image import ChosenAdapter, ImageInput, ImageResult
from shared.stores.objects import ObjectStore, object_key
from tests.workers.models import lora_files
from tests.workers.models.test_image import pixels
from tests.workers.models.test_image_adapters import ASKED, DEEP, Drawer, loaded

# Some of diffusers' schedulers use an outdated conversion between torch and NumPy 2.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]
URLS = AdapterUrls(allowed=("https://a.example/",), max_rank=8)


class World:
    """A model that accepts adapters by URL and has one in its catalog, from the same file."""

    def __init__(self, catalog: Catalog, pipeline: Path, folder: Path) -> None:
        self.objects = ObjectStore(f"file://{folder}/objects")
        self.layers = lora_files.chosen_layers(loaded(pipeline), texts=False)
        self.file = self.write(folder / "ink.safetensors", rank=4)
        ink = {"ink": Adapter(source=f"local:{self.file}")}
        self.drawer = Drawer(catalog.default("image"), pipeline, ink, adapter_urls=URLS)

    def write(self, file: Path, rank: int) -> Path:
        weights = lora_files.random_weights(self.layers, 1, rank=rank)
        return lora_files.write(file, lora_files.as_peft(weights))

    def by_url(self, data: bytes, value: ImageInput = ASKED, owner: str = "acme") -> ImageInput:
        """The job input that the API creates for an image whose adapter consists of these bytes."""
        key = object_key("inputs", data, "application/octet-stream")
        asyncio.run(self.objects.put(key, data, "application/octet-stream"))
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        chosen = ChosenAdapter(digest, digest, 1.0, object_key=key, owner=owner)
        return msgspec.structs.replace(value, adapter=chosen)


@pytest.fixture(scope="module")
def world(
    catalog: Catalog, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("by-url")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_OBJECTS_URL", f"file://{folder}/objects")
        patched.setenv("PENSTOCK_MODELS_DIR", str(folder / "models"))
        yield World(catalog, tiny_folder, folder)


def test_an_adapter_by_url_draws_as_that_of_the_catalog(world: World) -> None:
    """The image is drawn on its own, and in a batch with images that use a different adapter or
    none.
    """
    drawer, other = world.drawer, msgspec.structs.replace(ASKED, seed=5)
    named = drawer.with_adapter(ASKED, "ink")
    by_url = world.by_url(world.file.read_bytes())
    without, expected = drawer.alone(ASKED), drawer.alone(named)
    assert np.abs(expected - without).mean() > 2, "the adapter changed nothing"
    assert np.abs(drawer.alone(by_url) - expected).max() <= 1
    results = drawer.run((0, by_url), (0, named), (1, ASKED), (1, other))
    for slot, image in enumerate((expected, expected, without)):
        result = results[slot]
        assert isinstance(result, ImageResult)
        assert np.abs(pixels(result) - image).max() <= 1
    first = results[0]
    assert isinstance(first, ImageResult)
    assert by_url.adapter is not None
    assert first.adapter == by_url.adapter.name, "the row names the bytes"


def changed(file: Path, world: World, name: str, tensor: torch.Tensor) -> None:
    weights = lora_files.as_peft(lora_files.random_weights(world.layers, 1))
    lora_files.write(file, weights | {name: tensor})


def pickled(file: Path, world: World) -> None:
    torch.save({"unet.a.lora_A.weight": torch.zeros(1)}, file)


def zipped(file: Path, world: World) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("weights", b"0" * 1000)


def huge_header(file: Path, world: World) -> None:
    file.write_bytes((2**62).to_bytes(8, "little") + b"{}")


def long_header(file: Path, world: World) -> None:
    """The library would read up to 100 MB."""
    declare(file, {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, note=" " * (1 << 24))


def deep_header(file: Path, world: World) -> None:
    header = b"[" * 1_000_000
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def endless_shape(file: Path, world: World) -> None:
    wrong = {"dtype": "F32", "shape": [2**31, 2**31], "data_offsets": [0, 8]}
    header = json.dumps({f"{DEEP}.lora_A.weight": wrong}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def declare(file: Path, tensor: object, body: bytes = bytes(8), **metadata: str) -> None:
    """Writes a file whose header declares one tensor."""
    header = json.dumps({f"{DEEP}.lora_A.weight": tensor, "__metadata__": metadata}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + body)


def repeated_text_as_shape(file: Path, world: World) -> None:
    """In Python, a string times an integer is a longer string: 1.5 GB in this case."""
    declare(file, {"dtype": "F32", "shape": ["x", 1_500_000_000], "data_offsets": [0, 8]})


def repeated_list_as_shape(file: Path, world: World) -> None:
    declare(file, {"dtype": "F32", "shape": [[1], 200_000_000], "data_offsets": [0, 8]})


def negative_shape(file: Path, world: World) -> None:
    declare(file, {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]})


def shape_of_large_numbers(file: Path, world: World) -> None:
    """Multiplying that many numbers takes quadratic time."""
    declare(file, {"dtype": "F32", "shape": [2**63] * 100_000, "data_offsets": [0, 8]})


def many_dimensions(file: Path, world: World) -> None:
    declare(file, {"dtype": "F32", "shape": [0] * 100, "data_offsets": [0, 0]}, b"")


def unknown_type(file: Path, world: World) -> None:
    """safetensors parses the header, but torch has no such dtype."""
    declare(file, {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}, bytes(3))


def beyond_the_end(file: Path, world: World) -> None:
    declare(file, {"dtype": "F32", "shape": [2**30], "data_offsets": [0, 2**32]})


def deep_settings(file: Path, world: World) -> None:
    wrong = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    declare(file, wrong, lora_adapter_metadata="[" * 100_000)


def long_settings(file: Path, world: World) -> None:
    wrong = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    declare(file, wrong, lora_adapter_metadata=" " * 2_000_000)


def endless_alpha(file: Path, world: World) -> None:
    weights = lora_files.as_peft(lora_files.random_weights(world.layers, 1))
    lora_files.write(file, weights, {"unet.lora_alpha": 10**400})


def cut(file: Path, world: World) -> None:
    file.write_bytes(world.file.read_bytes()[:-100])


def not_a_number(file: Path, world: World) -> None:
    changed(file, world, f"{DEEP}.lora_A.weight", torch.full((4, 128), float("nan")))


def high_rank(file: Path, world: World) -> None:
    weights = {
        f"{DEEP}.lora_A.weight": torch.zeros(10_000, 128),
        f"{DEEP}.lora_B.weight": torch.zeros(128, 10_000),
    }
    lora_files.write(file, weights)


def other_base(file: Path, world: World) -> None:
    """An adapter for a pipeline whose layers are wider."""
    weights = {
        f"{DEEP}.lora_A.weight": torch.zeros(4, 1280),
        f"{DEEP}.lora_B.weight": torch.zeros(1280, 4),
    }
    lora_files.write(file, weights)


def wrong_settings(file: Path, world: World) -> None:
    weights = lora_files.as_peft(lora_files.random_weights(world.layers, 1))
    lora_files.write(file, weights, {"unet.alpha_pattern": [1], "unet.lora_alpha": 4})


def many_patterns(file: Path, world: World) -> None:
    weights = lora_files.as_peft(lora_files.random_weights(world.layers, 1))
    patterns = {f"layer.{number}": 4 for number in range(5000)}
    lora_files.write(file, weights, {"unet.alpha_pattern": patterns, "unet.lora_alpha": 4})


def many_blocks(file: Path, world: World) -> None:
    """Each tensor is in its own block, as in files from kohya's scripts."""
    names = (f"lora_unet_input_blocks_{number}_1_proj.alpha" for number in range(10_000))
    lora_files.write(file, {name: torch.zeros(1) for name in names})


BAD: dict[str, tuple[Callable[[Path, World], None], str]] = {
    "pickle": (pickled, "not safetensors"),
    "zip": (zipped, "not safetensors"),
    "huge header": (huge_header, "not safetensors"),
    "long header": (long_header, "not safetensors"),
    "deep header": (deep_header, "not safetensors"),
    "endless shape": (endless_shape, "not safetensors"),
    "text as shape": (repeated_text_as_shape, "not safetensors"),
    "list as shape": (repeated_list_as_shape, "not safetensors"),
    "negative shape": (negative_shape, "not safetensors"),
    "large numbers": (shape_of_large_numbers, "not safetensors"),
    "dimensions": (many_dimensions, "has 100 dimensions, which exceeds the maximum of 8"),
    "type": (unknown_type, "the unsupported data type F6_E2M3; use F64"),
    "beyond the end": (beyond_the_end, "not safetensors"),
    "deep settings": (deep_settings, "is not valid JSON"),
    "long settings": (
        long_settings,
        "has 2000000 characters, which exceeds the maximum of 1048576",
    ),
    "alpha": (endless_alpha, "has no finite alpha"),
    "cut": (cut, "not safetensors"),
    "not a number": (not_a_number, "not finite"),
    "rank": (high_rank, "has rank 10000, which exceeds max_rank (8)"),
    "other base": (other_base, "but this model requires"),
    "settings": (wrong_settings, "alpha_pattern"),
    "patterns": (many_patterns, "must be an object with at most 4096 patterns"),
    "blocks": (many_blocks, "it has 10000 tensors"),
}


@pytest.mark.parametrize("kind", ["text as shape", "list as shape", "large numbers"])
def test_header_costs_no_more_than_its_bytes(world: World, tmp_path: Path, kind: str) -> None:
    """A tiny file may declare huge sizes, which must not cost memory or CPU time."""
    BAD[kind][0](tmp_path / "bad.safetensors", world)
    bad = world.by_url((tmp_path / "bad.safetensors").read_bytes())
    world.drawer.run((0, msgspec.structs.replace(ASKED, seed=9)))
    before_mb, before_s = peak_mb(), time.process_time()
    assert isinstance(world.drawer.run((0, bad))[0], BadInput)
    assert peak_mb() - before_mb < 200
    assert time.process_time() - before_s < 5


def peak_mb() -> float:
    """This process's peak resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_refused_by_the_field(world: World, tmp_path: Path, kind: str) -> None:
    make, reason = BAD[kind]
    make(tmp_path / "bad.safetensors", world)
    bad = world.by_url((tmp_path / "bad.safetensors").read_bytes())
    results = world.drawer.run((0, bad), (0, ASKED))
    error = results[0]
    assert isinstance(error, BadInput), error
    assert error.field == "lora_weights"
    assert error.message.startswith("lora_weights: the file sha256:")
    assert reason in error.message
    assert isinstance(results[1], ImageResult), "others are drawn"


def test_a_broken_copy_is_made_again(world: World) -> None:
    """A worker that loses power while writing leaves a broken copy."""
    value = world.by_url(world.file.read_bytes(), owner="globex")
    adapters = world.drawer.model.adapters
    assert value.adapter is not None
    assert adapters._fetched is not None
    chosen = value.adapter
    copy = adapters._fetched.find(chosen.name, chosen.object_key, chosen.owner)
    copy.write_bytes(b"half")
    adapters._resident.pop(chosen.name, None)
    error = world.drawer.run((0, value))[0]
    assert isinstance(error, ModelFailed), "it is not the caller's fault"
    assert "try again" in error.public_message
    assert isinstance(world.drawer.run((0, value))[0], ImageResult)


def test_a_worker_whose_catalog_takes_no_urls_refuses(world: World, tiny_folder: Path) -> None:
    entry = world.drawer.entry
    ink = dict(entry.image.adapters)
    other = Drawer(entry, tiny_folder, ink, adapter_urls=None)
    (outcome,) = other.preparer.prepare([world.by_url(world.file.read_bytes())])
    assert isinstance(outcome, ModelFailed)
