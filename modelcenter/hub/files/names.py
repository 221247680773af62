"""Names of the files of a checkpoint. Imports no torch."""

import re
from collections.abc import Collection

CONFIG_FILE, GENERATION_FILE, MANIFEST_FILE = "config.json", "generation_config.json", "manifest.json"
RUN_FILE = "run.json"  # in the checkpoints of a run: its flags and data
# For replaced token detection: the folder of the generator, next to the model's, and the generator's config.json in
# checkpoints, which hold both models.
GENERATOR, GENERATOR_FILE = "generator", "generator.json"
# peft's.
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILES = (ADAPTER_CONFIG_FILE, "adapter_model.safetensors", "adapter_model.bin")
CONVERSION_FILE = "conversion.json"
CARD_FILE, CURVES_FILE = "README.md", "curves.png"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# With shards, each is <name>.index.json instead; the last is ModelCenter's.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pt")
TEMPLATES_FOLDER = "additional_chat_templates"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "bpe.codes",
    "byte_maps.json",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
    "tekken.json",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "target_vocab.json",
    "chat_template.jinja",
    "tokenization_cpm.py",
)

# Files of an earlier model that would contradict a new one.
_MODEL_FILE = re.compile(
    r"(model|pytorch_model)([-.][^/]*)?\.(safetensors|bin)(\.index\.json)?|tf_model\.h5|flax_model\.msgpack"
    r"|(generation_)?config\.json|manifest\.json|conversion\.json"
    r"|modules\.json|config_sentence_transformers\.json|sentence_bert_config\.json"
    r"|\d+_(Pooling|Dense|Normalize|LogitScore)(/(config\.json|(model|pytorch_model)\.(safetensors|bin)))?"
)


def is_replaced(name: str, new: Collection[str]) -> bool:
    """Whether a file of an earlier checkpoint would contradict the files `new`.

    A model replaces a model, and a tokenizer all files of a tokenizer.

    Args:
        name: within the checkpoint's directory.
    """
    if (CONFIG_FILE in new or MANIFEST_FILE in new) and _MODEL_FILE.fullmatch(name):
        return True
    return name.split("/")[0] in (*TOKENIZER_FILES, TEMPLATES_FOLDER) and any(file in new for file in TOKENIZER_FILES)
