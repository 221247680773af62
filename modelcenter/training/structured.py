"""Answers that CPM-Bee writes into structured rows (data.structured)."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from modelcenter.data.structured import (
    ANSWER,
    FIELDS,
    StructuredEncoder,
    StructuredRow,
    Token,
    extension_table,
    structured_batch,
)
from modelcenter.models.base import Model
from modelcenter.training.inference.text_generation import max_over_ranks, new_tokens


@dataclass
class _Text:
    """An object that is being filled in, and what the model has read of it: its row and the answers so far."""

    filled: dict[str, Any]
    row: StructuredRow
    values: np.ndarray

    def asks(self, turn: int, start: int) -> StructuredRow:
        """The row with the beginning of an answer."""
        segment = self.row.answers[min(turn, len(self.row.answers) - 1)].segment
        return replace(self.row, values=np.vstack([self.values, [[start, 0, *self._marks(segment)]]]))

    def answered(self, turn: int, start: int, tokens: Sequence[Token], text: str) -> "_Text":
        """It with an answer that was written."""
        answer, filled = self.row.answers[turn], copy.deepcopy(self.filled)
        keys, inside = (ANSWER, *answer.path), filled
        for key in keys[:-1]:
            inside = inside[key]
        inside[keys[-1]] = text
        new = [[*token, *self._marks(answer.segment)] for token in ((start, 0), *tokens)]
        return replace(self, filled=filled, values=np.vstack([self.values, new]))

    def _marks(self, segment: int) -> tuple[int, ...]:
        """Of a token of an answer: no context, its segment, and what every token of the row's own sample has."""
        return 0, segment, int(self.values[0, FIELDS.index("num_segments")]), 0, 0


def write_answers(model: Model, tokenizer: Any, prompts: Sequence[str], **search: Any) -> list[list[str]]:
    """The answers to JSON objects, num_return_sequences of each: the text below "<ans>", or what is there as JSON.

    Raises:
        ValueError: a prompt that is no object, and what `fill` raises.
    """
    objects = []
    for prompt in prompts:
        try:
            one = json.loads(prompt)
        except ValueError:
            one = None
        if not isinstance(one, dict):
            raise ValueError(
                f"prompt: got {prompt!r:.60} beside or in place of a JSON object; this model reads objects with the "
                f"key {ANSWER!r}, or plain texts, but not both at once"
            )
        objects.append(one)
    found = fill(model, StructuredEncoder(tokenizer), objects, **search)
    return [[as_text(filled[ANSWER]) for filled in several] for several in found]


def as_text(answer: Any) -> str:
    """What stands below "<ans>": a text as it is, several as JSON."""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def fill(
    model: Model,
    encoder: StructuredEncoder,
    objects: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]] = (),
    **search: Any,
) -> list[list[dict[str, Any]]]:
    """Copies of each object, num_return_sequences of them, with the texts below "<ans>" written by the model.

    The answers of an object are written one after the other, each knowing those before. Beams are those of one answer;
    num_return_sequences are of the first. Collective on a sharded model, each rank with one object or more.

    Args:
        samples: objects with answers that each object is shown as examples. search: arguments of model.generate.

    Raises:
        ValueError: see StructuredEncoder.encode and generate.
    """
    rows = [encoder.encode(one, samples, answered=False) for one in objects]
    texts = [_Text(copy.deepcopy(dict(one)), row, row.values) for one, row in zip(objects, rows, strict=True)]
    turns, several = max(len(row.answers) for row in rows), int(search.pop("num_return_sequences", 1))
    turns, table = max_over_ranks(turns), extension_table(rows)
    if "max_new_tokens" in search:
        search["max_new_tokens"] = new_tokens(model, search["max_new_tokens"], max(len(row) for row in rows))
    for turn in range(turns):
        copies = 1 if turn else several
        places = [i for i, text in enumerate(texts) if turn < len(text.row.answers)]
        asked = [texts[i] for i in places] or texts[:1]  # where none is left, others still write
        found = _write(model, encoder, asked, turn, table, num_return_sequences=copies, **search)
        if not turn:
            texts = [text for text in texts for _ in range(several)]
            places = list(range(len(texts)))
        for i, tokens in zip(places, found, strict=bool(places)):
            said = encoder.decode(tokens, texts[i].row.texts)
            texts[i] = texts[i].answered(turn, encoder.start, tokens, said)
    return [[text.filled for text in texts[i : i + several]] for i in range(0, len(texts), several)]


def _write(
    model: Model, encoder: StructuredEncoder, texts: Sequence[_Text], turn: int, table: Sequence[Token], **search: Any
) -> list[list[Token]]:
    """The tokens of an answer, without its end, for each text and each of num_return_sequences."""
    config: Any = model.config
    rows = [text.asks(turn, encoder.start) for text in texts]
    lengths = [len(row) for row in rows]
    batch = structured_batch(rows, config.vocab_size, table)
    padded = {name: pad_sequence(batch[name][0].split(lengths), batch_first=True).to(model.device) for name in FIELDS}
    ids = padded.pop("input_ids")
    mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long().to(model.device)
    shared = ("segment_rel", "ext_table_ids", "ext_table_sub")
    # What stands for nothing in a row is not written there, nor is an unknown character where there is none.
    banned = torch.zeros(len(rows), config.vocab_size + len(table), dtype=torch.bool)
    unknown = encoder.tokenizer.unk_token_id
    for i, row in enumerate(rows):
        banned[i, unknown] = (unknown, 0) not in row.texts
        banned[i, config.vocab_size :] = torch.tensor([token not in row.texts for token in table], dtype=torch.bool)
    whole = model.generate(
        ids,
        mask,
        token_inputs=padded,
        other_inputs={name: batch[name].to(model.device) for name in shared if name in batch},
        banned=banned.to(model.device),
        **{"eos_token_id": encoder.end, "pad_token_id": encoder.end, "tokenizer": encoder.tokenizer} | search,
    )
    out: list[list[Token]] = []
    for line in whole[:, ids.shape[1] :].tolist():
        line = line[: line.index(encoder.end)] if encoder.end in line else line
        out.append([(n, 0) if n < config.vocab_size else table[n - config.vocab_size] for n in line])
    return out
