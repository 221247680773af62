"""Preferences: a GPT-2 learns to prefer E2E's text about a restaurant to one about another."""

import functools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning import tokenizers
from scripts.bench.lib.finetuning.tasks.base import Rows
from scripts.bench.lib.finetuning.tasks.e2e import E2ETask
from scripts.bench.lib.finetuning.tasks.lm import answered, gpt2, size_of
from scripts.bench.lib.flops import Row

BETA = 0.1


class DPO(E2ETask):
    model_task = "causal-lm"
    words = 50257
    lr = 1e-4
    script = "finetune_dpo.py"
    flags = {"template": "none", "beta": BETA}
    peer = "trl_dpo"
    environment = "trl"
    peers = {"trl": "default", "trl, precomputed": "precomputed"}
    passes = 4 / 3  # for the reference model's forward
    one_epoch = True  # some contenders first compute the reference's log-probabilities for all rows
    tokenizer = staticmethod(tokenizers.byte_level)

    def of_pairs(self, pairs: Rows) -> Rows:
        draw = random.Random(0)
        return [
            {"prompt": f"{pair['mr']} ->", "chosen": f" {pair['ref']}", "rejected": f" {draw.choice(pairs)['ref']}"}
            for pair in pairs
        ]

    def configuration(self, hidden: int, layers: int, words: int) -> Any:
        """Without dropout, because TRL turns it off."""
        config = gpt2(hidden, layers, words)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        return config

    def encode(self, tokenizer: Any, rows: Rows, known: Rows | None = None) -> Rows:
        """Encodes a row: its `answers` are two rows of a language model."""
        encoded = []
        for row in rows:
            prompt, *answers = (tokenizer(row[name])["input_ids"] for name in ("prompt", "chosen", "rejected"))
            encoded.append({"answers": [answered(prompt, answer, tokenizer.eos_token_id) for answer in answers]})
        return encoded

    def sizes(self, encoded: Mapping[str, Any]) -> list[Row]:
        return [size_of(answer) for answer in encoded["answers"]]

    def collator(self, kind: str, tokenizer: Any, model: Any) -> Any:
        import transformers

        collate = transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
        return lambda rows: collate([answer for row in rows for answer in row["answers"]])

    def judge(self, model: Any, batch: Any, start: Path) -> tuple[float, int, int]:
        import torch.nn.functional as F

        rewards = BETA * (_log_probs(model, batch) - _log_probs(_reference(start), batch))
        chosen, rejected = rewards.view(-1, 2).unbind(1)
        return -F.logsigmoid(chosen - rejected).sum().item(), len(chosen), int((chosen > rejected).sum())


@functools.cache  # one for all batches
def _reference(start: Path) -> Any:
    return DPO().load(start, []).eval()


def _log_probs(model: Any, batch: Any) -> Any:
    """The log-probabilities of the answers, (rows,)."""
    logits, labels = model(**batch).logits[:, :-1].float(), batch["labels"][:, 1:]
    found = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (found * (labels >= 0)).sum(-1)
