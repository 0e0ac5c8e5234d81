"""A BERT with random weights over the words in the built-in texts: a complete embedding model of
under a megabyte.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel

from workers.optimize.calibration import calibration_texts, list_held_out_texts

WIDTH = 64
ENTRY = """\
models:
  - name: tiny
    task: embedding
    source: local:{folder}
    revision: "1"
    dimensions: 64
    batch: {{max_tokens: 2048}}
    tolerance: {{cosine: {tolerance}}}
"""

Optimize = Callable[..., int]


def make_tiny_bert(folder: Path) -> None:
    words = sorted(
        {
            word
            for text in calibration_texts() + list_held_out_texts()
            for word in re.findall(r"\w+", text.lower())
        }
    )
    vocabulary = {
        word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])
    }
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_mean_tokens": True})
    )
