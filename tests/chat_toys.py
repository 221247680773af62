"""A tokenizer for decoders, chats and chat templates small enough for tests."""

from functools import cache
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = ["Aromi", "Bibimbap", "Cocum", "Fitzbillies", "Giraffe", "Loch Fyne", "Strada", "Zizzi"]
FOODS = ["Chinese", "English", "French", "Indian", "Italian", "Japanese"]
SIZES = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "max_positions": 128}
STILL = {"dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}


def make_pairs(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows {"mr", "ref"} of different lengths that a model can learn."""
    import random

    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        name, food = rng.choice(NAMES), rng.choice(FOODS)
        more = rng.choice(["", " by the river", " in the city centre, near the station"])
        rows.append({"mr": f"name[{name}], food[{food}]", "ref": f"{name} serves {food} food{more}."})
    return rows


@cache
def _trained() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for row in make_pairs(200, seed=9) for text in row.values()]
    tokenizer.train_from_iterator([*texts, "user assistant system\n\n \n"], trainer)
    return tokenizer.to_str()


def make_gpt2_tokenizer() -> Any:
    """The same tokens in a GPT2Tokenizer."""
    import json

    from transformers import GPT2Tokenizer

    model = json.loads(_trained())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return GPT2Tokenizer(vocab=model["vocab"], merges=merges, pad_token="<|endoftext|>")


def make_tokenizer(template: str | None = None, end: str = "<|endoftext|>", **options: Any) -> Any:
    """A byte-level BPE tokenizer like GPT-2's and Qwen's, with or without a chat template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), eos_token=end, pad_token="<|endoftext|>", **options
    )
    made.chat_template = template
    return made
