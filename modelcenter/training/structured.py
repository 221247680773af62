"""Generating the answers in CPM-Bee's structured rows (data.structured)."""

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
from modelcenter.training.inference.text_generation import max_over_ranks, new_tokens, with_turn_seed


@dataclass
class _PartlyFilled:
    """An object with some of its answers.

    filled: a copy of the object with the answers so far. row: the object as the model reads it. values: its tokens,
    then those of the answers so far.
    """

    filled: dict[str, Any]
    row: StructuredRow
    values: np.ndarray

    def with_start(self, turn: int, start: int) -> StructuredRow:
        """The row with the token that starts an answer."""
        segment = self.row.answers[min(turn, len(self.row.answers) - 1)].segment
        return replace(self.row, values=np.vstack([self.values, [[start, 0, *self._token_inputs(segment)]]]))

    def with_answer(self, turn: int, start: int, tokens: Sequence[Token], text: str) -> "_PartlyFilled":
        """The object with one more answer."""
        answer, filled = self.row.answers[turn], copy.deepcopy(self.filled)
        keys, inside = (ANSWER, *answer.path), filled
        for key in keys[:-1]:
            inside = inside[key]
        inside[keys[-1]] = text
        new = [[*token, *self._token_inputs(answer.segment)] for token in ((start, 0), *tokens)]
        return replace(self, filled=filled, values=np.vstack([self.values, new]))

    def _token_inputs(self, segment: int) -> tuple[int, ...]:
        """The other inputs of an answer's token: no context, its segment, and those that all tokens of the row's own
        sample share."""
        return 0, segment, int(self.values[0, FIELDS.index("num_segments")]), 0, 0


def write_answers(model: Model, tokenizer: Any, prompts: Sequence[str], **search: Any) -> list[list[str]]:
    """The answers to JSON objects, num_return_sequences for each: the text under "<ans>", or the value there as JSON.

    Raises:
        ValueError: a prompt is not an object; also what `fill` raises.
    """
    found = fill(model, StructuredEncoder(tokenizer), parse_objects(prompts), **search)
    return [[as_text(filled[ANSWER]) for filled in several] for several in found]


def parse_objects(prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Parse JSON objects. Raises ValueError for a prompt that is not one."""
    objects = []
    for prompt in prompts:
        try:
            one = json.loads(prompt)
        except ValueError:
            one = None
        if not isinstance(one, dict):
            raise ValueError(
                f"prompt: got {prompt!r:.60}, expected a JSON object; this model reads objects with the key "
                f"{ANSWER!r}, or plain texts, but not both at once"
            )
        objects.append(one)
    return objects


def as_text(answer: Any) -> str:
    """The value under "<ans>": a text as it is, several as JSON."""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def fill(
    model: Model,
    encoder: StructuredEncoder,
    objects: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]] = (),
    **search: Any,
) -> list[list[dict[str, Any]]]:
    """num_return_sequences copies of each object, in which the model has written the texts under "<ans>".

    The answers of an object are generated one after another, each given those before it. Each answer has a beam search
    of its own; num_return_sequences applies to the first. Collective on a sharded model; each rank has at least one
    object.

    Args:
        samples: objects with answers, which precede each object as examples. search: arguments of model.generate.

    Raises:
        ValueError: see StructuredEncoder.encode and generate.
    """
    rows = [encoder.encode(one, samples, answered=False) for one in objects]
    states = [_PartlyFilled(copy.deepcopy(dict(one)), row, row.values) for one, row in zip(objects, rows, strict=True)]
    turns, several = max(len(row.answers) for row in rows), int(search.pop("num_return_sequences", 1))
    turns, table = max_over_ranks(turns), extension_table(rows)
    if "max_new_tokens" in search:
        search["max_new_tokens"] = new_tokens(model, search["max_new_tokens"], max(len(row) for row in rows))
    for turn in range(turns):
        copies = 1 if turn else several
        unfinished = [i for i, state in enumerate(states) if turn < len(state.row.answers)]
        # A rank that is done repeats a row while others still generate.
        batch = [states[i] for i in unfinished] or states[:1]
        drawn = with_turn_seed(search, turn)  # with a common seed, the answers of an object would be alike
        answers = _write(model, encoder, batch, turn, table, num_return_sequences=copies, **drawn)
        if not turn:
            states = [state for state in states for _ in range(several)]
            unfinished = list(range(len(states)))
        for i, tokens in zip(unfinished, answers, strict=bool(unfinished)):
            text = encoder.decode(tokens, states[i].row.texts)
            states[i] = states[i].with_answer(turn, encoder.start, tokens, text)
    return [[state.filled for state in states[i : i + several]] for i in range(0, len(states), several)]


def _write(
    model: Model,
    encoder: StructuredEncoder,
    states: Sequence[_PartlyFilled],
    turn: int,
    table: Sequence[Token],
    **search: Any,
) -> list[list[Token]]:
    """The tokens of the answers, without their ends: num_return_sequences for each state."""
    config: Any = model.config
    rows = [state.with_start(turn, encoder.start) for state in states]
    lengths = [len(row) for row in rows]
    batch = structured_batch(rows, config.vocab_size, table)
    padded = {name: pad_sequence(batch[name][0].split(lengths), batch_first=True).to(model.device) for name in FIELDS}
    ids = padded.pop("input_ids")
    mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long().to(model.device)
    shared = ("segment_rel", "ext_table_ids", "ext_table_sub")
    # Table entries that the row does not use are not generated, nor an unknown character if the row has none.
    banned = torch.zeros(len(rows), config.vocab_size + len(table), dtype=torch.bool)
    unknown = encoder.tokenizer.unk_token_id
    for i, row in enumerate(rows):
        banned[i, unknown] = (unknown, 0) not in row.texts
        banned[i, config.vocab_size :] = torch.tensor([token not in row.texts for token in table], dtype=torch.bool)
    output = model.generate(
        ids,
        mask,
        token_inputs=padded,
        other_inputs={name: batch[name].to(model.device) for name in shared if name in batch},
        banned=banned.to(model.device),
        **{"eos_token_id": encoder.end, "pad_token_id": encoder.end, "tokenizer": encoder.tokenizer} | search,
    )
    out: list[list[Token]] = []
    for line in output[:, ids.shape[1] :].tolist():
        line = line[: line.index(encoder.end)] if encoder.end in line else line
        out.append([(n, 0) if n < config.vocab_size else table[n - config.vocab_size] for n in line])
    return out
