"""Questions about a restaurant of E2E, in a context of texts about several."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.bench.lib.finetuning.tasks.base import Rows
from scripts.bench.lib.finetuning.tasks.e2e import E2ETask, slots

LONGEST = 384  # tokens of a question and its context; all rows fit
OTHERS = 7  # maximum number of texts besides the one with the answer


class QuestionAnswering(E2ETask):
    model_task = "question-answering"
    lr = 3e-4
    script = "finetune_qa.py"
    flags = {"max_length": LONGEST}

    def of_pairs(self, pairs: Rows) -> Rows:
        draw, rows = random.Random(0), []
        for number, pair in enumerate(pairs):
            known = slots(pair["mr"])
            name = known.pop("name", "it")
            said = [(slot, value) for slot, value in known.items() if value and value in pair["ref"]]
            if not said:
                continue
            texts = [draw.choice(pairs)["ref"] for _ in range(draw.randint(0, OTHERS))]
            place = draw.randint(0, len(texts))
            before = "".join(f"{text} " for text in texts[:place])
            slot, value = draw.choice(said)
            rows.append({
                "id": str(number),
                "question": f"What is the {slot} of {name}?",
                "context": before + " ".join([pair["ref"], *texts[place:]]),
                "answers": {"text": [value], "answer_start": [len(before) + pair["ref"].index(value)]},
            })  # fmt: skip
        return rows

    def texts(self, row: Mapping[str, Any]) -> list[str]:
        return [row["question"], row["context"]]

    def encode(self, tokenizer: Any, rows: Rows, known: Rows | None = None) -> Rows:
        questions, contexts = ([row[name] for row in rows] for name in ("question", "context"))
        found = tokenizer(questions, contexts, return_offsets_mapping=True)
        encoded = []
        for i, row in enumerate(rows):
            begin = row["answers"]["answer_start"][0]
            end = begin + len(row["answers"]["text"][0])
            sides, offsets = found.sequence_ids(i), found["offset_mapping"][i]
            inside = [n for n, side in enumerate(sides) if side == 1 and begin < offsets[n][1] and offsets[n][0] < end]
            ids = {name: found[name][i] for name in ("input_ids", "token_type_ids")}
            encoded.append({**ids, "start_positions": inside[0], "end_positions": inside[-1]})
        return encoded

    def judge(self, model: Any, batch: Any, start: Path) -> tuple[float, int, int]:
        out = model(**batch)
        first, last = batch["start_positions"], batch["end_positions"]
        right = (out.start_logits.argmax(-1) == first) & (out.end_logits.argmax(-1) == last)
        return out.loss.item() * len(first), len(first), int(right.sum())
