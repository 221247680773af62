"""Names of the files of a checkpoint. Imports no torch."""

CONFIG_FILE, GENERATION_FILE, MANIFEST_FILE = "config.json", "generation_config.json", "manifest.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"  # of peft
CARD_FILE, CURVES_FILE = "README.md", "curves.png"
SETTINGS_FILE = "tokenizer_config.json"
# Each also as <name>.index.json with shards; the last is ModelCenter's.
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
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "tokenization_cpm.py",
)
