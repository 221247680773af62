"""Compare a model with another implementation of it: loss, logits, gradients, and the first layer that differs.

`modelcenter compare CHECKPOINT` runs a checkpoint here and in transformers; `modelcenter compare A B` runs two
checkpoints here. The parity tests (modelcenter.testing) stand on the same functions.
"""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from modelcenter import registry
from modelcenter._arguments import Parser
from modelcenter.convert.match import to_key
from modelcenter.convert.rules import Layout, compile_layout
from modelcenter.convert.stream import export_tensor

IGNORE = -100
TOKEN_TASKS = ("masked-lm", "causal-lm", "token-classification", "pretraining")


@dataclass
class Row:
    """One sequence: ids, token types (of models that have them), and its labels.

    For multiple choice a label stands with each first choice. `decoder_ids` are what a decoder is given beside it,
    where they are not made of the labels or the input.
    """

    input_ids: list[int]
    token_type_ids: list[int]
    labels: Any = None
    decoder_ids: list[int] | None = None


def make_rows(
    task: str,
    *,
    vocab_size: int,
    num_labels: int,
    type_vocab_size: int = 0,
    lengths: Sequence[int] = (7, 3, 11, 5, 2, 8),
    choices: int = 3,
    seed: int = 0,
    ids: Sequence[Sequence[int]] | None = None,
    decodes: bool = False,
    end: int | None = None,
) -> list[Row]:
    """Random supervised rows for a task; `ids` gives the tokens instead of drawing them.

    Token 0 is never drawn: many models treat it as padding. `decodes`: of an encoder-decoder, whose other side has rows
    of other lengths. `end`: the token that ends each row, and stands nowhere else.
    """
    rng = torch.Generator().manual_seed(seed)

    def draw(high: int, count: int, low: int = 0) -> list[int]:
        return torch.randint(low, high, (count,), generator=rng).tolist()

    tokens = [list(x) for x in ids] if ids is not None else [draw(vocab_size, n, 1) for n in lengths]
    if end is not None:
        inner = [row[:-1] if ids is None else row for row in tokens]
        tokens = [[*(t if t != end else vocab_size - 1 for t in row), end] for row in inner]
    if task == "multiple-choice":
        tokens = tokens[: len(tokens) // choices * choices]
    rows = []
    for i, sequence in enumerate(tokens):
        n, labels, decoder_ids = len(sequence), None, None
        if task in ("masked-lm", "pretraining", "token-classification"):
            classes = num_labels if task == "token-classification" else vocab_size
            chosen = draw(3, n)
            labels = [y if c else IGNORE for y, c in zip(draw(classes, n), chosen, strict=True)]
            labels[i % n] = draw(classes, 1)[0]  # at least one is supervised
            if task == "pretraining":
                labels = (labels, draw(2, 1)[0])
        elif task == "causal-lm":
            labels = [y if c else IGNORE for y, c in zip(sequence, draw(3, n), strict=True)]
            labels[-1] = sequence[-1]
        elif task == "seq2seq-lm":
            length = 1 + (3 * i + 1) % 7
            labels = [y if c else IGNORE for y, c in zip(draw(vocab_size, length), draw(4, length), strict=True)]
            labels[-1] = draw(vocab_size, 1)[0]
        elif task == "base" and decodes:
            decoder_ids = draw(vocab_size, 1 + (3 * i + 1) % 7)
        elif task in ("sequence-classification", "next-sentence-prediction"):
            labels = draw(2 if task.startswith("next") else num_labels, 1)[0]
        elif task == "question-answering":
            start = draw(n, 1)[0]
            labels = (start, start + draw(n - start, 1)[0])
        elif task == "multiple-choice":
            labels = draw(choices, 1)[0] if i % choices == 0 else None
        types = draw(type_vocab_size, n) if type_vocab_size else []
        rows.append(Row(sequence, types, labels, decoder_ids))
    return rows


def rows_for(task: str, config: Any, **how: Any) -> list[Row]:
    """`make_rows` with what a model's config says of its rows."""
    return make_rows(
        task,
        vocab_size=config.vocab_size,
        num_labels=config.num_labels,
        type_vocab_size=getattr(config, "type_vocab_size", 0),
        decodes=config.is_encoder_decoder,
        end=config.eos_token_id if config.is_encoder_decoder else None,
        **how,
    )


def _labels(task: str, rows: Sequence[Row], columns: list[list[int]] | None) -> dict[str, Tensor]:
    """Labels of a batch; `columns` are the token labels laid out as the input is."""
    extra: dict[str, Tensor] = {}
    if columns is not None:
        extra["labels"] = torch.tensor(columns)
    if task == "pretraining":
        extra["next_sentence_label"] = torch.tensor([row.labels[1] for row in rows])
    elif task in ("sequence-classification", "multiple-choice", "next-sentence-prediction"):
        extra["labels"] = torch.tensor([row.labels for row in rows if row.labels is not None])
    return extra


def pad_rows(task: str, rows: Sequence[Row], side: str = "right", choices: int = 3) -> dict[str, Tensor]:
    """A padded batch with attention_mask, in transformers' shapes; side: "right" or "left"."""
    longest = max(len(row.input_ids) for row in rows)

    def pad(values: list[int], fill: int, longest: int = longest) -> list[int]:
        extra = [fill] * (longest - len(values))
        return extra + values if side == "left" else values + extra

    batch = {
        "input_ids": torch.tensor([pad(row.input_ids, 0) for row in rows]),
        "attention_mask": torch.tensor([pad([1] * len(row.input_ids), 0) for row in rows]),
    }
    if rows[0].token_type_ids:
        batch["token_type_ids"] = torch.tensor([pad(row.token_type_ids, 0) for row in rows])
    columns = None
    if task in TOKEN_TASKS:
        columns = [pad(row.labels[0] if task == "pretraining" else row.labels, IGNORE) for row in rows]
    if (targets := decoder_rows(task, rows)) is not None:
        most = max(map(len, targets))
        if task == "seq2seq-lm":
            columns = [pad(row, IGNORE, most) for row in targets]
        else:
            batch["decoder_input_ids"] = torch.tensor([pad(row, 0, most) for row in targets])
        if side == "left" or task != "seq2seq-lm":
            batch["decoder_attention_mask"] = torch.tensor([pad([1] * len(row), 0, most) for row in targets])
    batch |= _labels(task, rows, columns)
    if task == "question-answering":
        for i, name in enumerate(("start_positions", "end_positions")):
            shift = [longest - len(row.input_ids) if side == "left" else 0 for row in rows]
            batch[name] = torch.tensor([row.labels[i] + s for row, s in zip(rows, shift, strict=True)])
    if task == "multiple-choice":
        for name in {"input_ids", "token_type_ids", "attention_mask"} & batch.keys():
            batch[name] = batch[name].unflatten(0, (-1, choices))
    return batch


def decoder_rows(task: str, rows: Sequence[Row]) -> list[list[int]] | None:
    """What stands on the decoder's side: labels, or its inputs. None: nothing of its own."""
    if task == "seq2seq-lm":
        return [row.labels for row in rows]
    return None if rows[0].decoder_ids is None else [row.decoder_ids or [] for row in rows]


def pack_rows(task: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The same rows as one packed batch with cu_seqlens."""
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    batch: dict[str, Any] = {
        "input_ids": torch.tensor([[t for row in rows for t in row.input_ids]]),
        "cu_seqlens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        "max_seqlen": int(lengths.max()),
    }
    if rows[0].token_type_ids:
        batch["token_type_ids"] = torch.tensor([[t for row in rows for t in row.token_type_ids]])
    columns = None
    if task in TOKEN_TASKS:
        columns = [[t for row in rows for t in (row.labels[0] if task == "pretraining" else row.labels)]]
    if (targets := decoder_rows(task, rows)) is not None:
        ends = torch.tensor([len(row) for row in targets]).cumsum(0)
        batch["decoder_cu_seqlens"] = torch.nn.functional.pad(ends, (1, 0)).int()
        batch["decoder_max_seqlen"] = max(map(len, targets))
        flat = [[t for row in targets for t in row]]
        if task == "seq2seq-lm":
            columns = flat
        else:
            batch["decoder_input_ids"] = torch.tensor(flat)
    batch |= _labels(task, rows, columns)
    if task == "question-answering":
        batch["start_positions"] = torch.tensor([row.labels[0] for row in rows])
        batch["end_positions"] = torch.tensor([row.labels[1] for row in rows])
    return batch


def layout_of(model: nn.Module) -> Layout:
    """The conversion layout of one of our models."""
    arch = registry.get(model.config.model_type).arch_map()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return compile_layout(arch, model.task, model.config, shapes)


def hub_gradients(model: nn.Module, grads: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Gradients of one of our models under the names and layouts of its Hugging Face checkpoint.

    Args:
        grads: native name -> gradient; None: each parameter's `grad` (zero where it has none).
    """
    if grads is None:
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    layout = layout_of(model)
    return {
        layout.written[key]: export_tensor(layout, key, {name: grads[name] for name in layout.natives(key)})
        for key in layout.pieces
    }


def parameters_by_file_name(theirs: nn.Module, ours: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a transformers model under the names of its checkpoint, which its modules may not have."""
    layout, arch = layout_of(ours), registry.get(ours.config.model_type).arch_map()
    found = {}
    for name, p in theirs.named_parameters():
        key = to_key(arch, name)
        key = layout.aliases.get(key, key)
        if key in layout.ties and not layout.ties[key].write:
            key = layout.ties[key].to
        found[layout.written.get(key, name)] = p
    return found


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest value of `theirs` where that exceeds 1. NaN counts as infinite."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    gap = (ours.double() - theirs.double()).abs().max().item()
    scale = max(1.0, theirs.double().abs().max().item())
    return gap / scale if gap == gap else float("inf")


@dataclass
class Comparison:
    """Largest differences of one model from another (see `difference`).

    Attributes:
        values: what was compared -> difference: "loss", each output, "gradients", "layers".
        worst_gradient: the parameter whose gradient differs most.
        first_layer: number of the first layer whose output differs beyond the tolerance (0: the embedding), or None.
    """

    names: tuple[str, str]
    task: str
    rows: int
    tokens: int
    tolerance: float
    values: dict[str, float] = field(default_factory=dict)
    worst_gradient: str = ""
    first_layer: int | None = None

    @property
    def equal(self) -> bool:
        return all(value <= self.tolerance for value in self.values.values())

    def __str__(self) -> str:
        lines = [f"{self.names[0]} against {self.names[1]}: {self.task}, {self.rows} rows, {self.tokens} tokens"]
        for what, value in self.values.items():
            note = ""
            if what == "gradients":
                note = f"  worst: {self.worst_gradient}"
            elif what == "layers" and self.first_layer is not None:
                note = f"  first that differs: {self.first_layer or 'the embedding'}"
            lines.append(f"  {what:<24} {value:.2e}{note}")
        verdict = "equal" if self.equal else "DIFFERENT"
        return "\n".join([*lines, f"{verdict} (largest difference allowed: {self.tolerance:.0e})"])


def compare_models(
    ours: nn.Module,
    theirs: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    names: tuple[str, str] = ("ours", "theirs"),
    tolerance: float = 1e-5,
) -> Comparison:
    """Run both on one padded batch, backward too, and compare what real tokens produce.

    Args:
        ours: a modelcenter model. theirs: a transformers model, or one of ours. Both in eval mode.
        batch: see pad_rows; labels are optional.
    """
    mask = batch["attention_mask"].bool()
    result = Comparison(names, ours.task, len(batch["input_ids"]), int(mask.sum()), tolerance)
    for model in (ours, theirs):
        model.zero_grad()
    a = ours(**batch, output_hidden_states=True)
    b = theirs(**batch, output_hidden_states=True)
    outer = output_mask(ours, batch)
    for name, value in b.items():
        # transformers names the masked-LM logits of BertForPreTraining differently
        own = {"prediction_logits": "logits"}.get(name, name)
        if not isinstance(value, Tensor) or own not in a:
            continue
        pair, real = (a[own].detach(), value.detach()), mask if name.startswith("encoder_") else outer
        if pair[1].shape[: real.dim()] == real.shape:
            pair = (pair[0][real], pair[1][real])
        result.values[name] = difference(*pair)
    flat = mask.flatten(0, -2) if mask.dim() == 3 else mask
    layers = []
    for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        real = outer if name.startswith("decoder_") else flat
        if name in a or name in b:
            pairs = [
                [x.detach().reshape(*real.shape, -1)[real] for x in pair] for pair in zip(a[name], b[name], strict=True)
            ]
            layers += [difference(x, y) for x, y in pairs]
    result.values["layers"] = max(layers)
    result.first_layer = next((i for i, gap in enumerate(layers) if gap > tolerance), None)
    if a.get("loss") is not None and b.get("loss") is not None:
        for out in (a, b):
            sum(out[name] for name in ("loss", "mc_loss") if out.get(name) is not None).backward()
        mine = hub_gradients(ours)
        native = hasattr(theirs, "task")
        other = (
            hub_gradients(theirs)
            if native
            else {
                n: torch.zeros_like(p) if p.grad is None else p.grad
                for n, p in parameters_by_file_name(theirs, ours).items()
            }
        )
        gaps = {name: difference(mine[name], grad) for name, grad in other.items() if name in mine}
        if missing := sorted(set(other) ^ set(mine)):
            gaps |= dict.fromkeys(missing, float("inf"))
        result.worst_gradient = max(gaps, key=gaps.__getitem__)
        result.values["gradients"] = gaps[result.worst_gradient]
    return result


def output_mask(ours: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Where the outputs of a model have tokens: those of its decoder where that has other rows."""
    if not ours.config.is_encoder_decoder or ours.task not in ("base", "seq2seq-lm"):
        return batch["attention_mask"].bool()
    if "decoder_attention_mask" in batch:
        return batch["decoder_attention_mask"].bool()
    return (batch["labels"] != IGNORE).flip(1).cumsum(1).flip(1) > 0


def compare_checkpoints(
    first: str, second: str | None = None, *, data: str | None = None, task: str | None = None, tolerance: float = 1e-5
) -> Comparison:
    """See the module; `data` is a file of texts in any form that training reads, else random tokens are drawn.

    Raises:
        ValueError: a checkpoint does not load, or the data is empty.
    """
    from modelcenter.auto import from_pretrained
    from modelcenter.hub.tokenizer import load_tokenizer

    ours = from_pretrained(first, task, dtype="float32", policy=False)
    config, ids = ours.config, None
    if data is not None:
        lines = _texts(data)
        found = load_tokenizer(first)(lines, truncation=True, max_length=config.max_tokens or 512)["input_ids"]
        ids = [row for row in found if row]
    kind = "multiple-choice" if ours.task == "double-heads" else ours.task
    rows = rows_for(kind, config, ids=ids)
    _check_rows(ours.task, rows, data)
    with TemporaryDirectory() as folder:
        if second is not None:
            theirs, name = from_pretrained(second, ours.task, dtype="float32", policy=False), second
        else:
            ours.save_pretrained(folder)  # so that any kind of checkpoint can be compared, and the export is what runs
            theirs, name = load_transformers(folder, ours), "transformers"
    # transformers' decoders find the end of a row by the padding token, and without one take a single row.
    ends = ours.task == "sequence-classification" and second is None
    pad = theirs.config.pad_token_id if ends else None
    if ours.task == "question-answering" or (ends and pad is None):  # of the first, padding takes part in the softmax
        rows = rows[:1]
    batch = pad_rows(kind, rows)
    if ours.task == "double-heads":
        batch |= _two_losses(batch)
    if config.problem_type not in (None, "single_label_classification") and "labels" in batch:
        shape = (len(rows), config.num_labels)
        batch["labels"] = torch.rand(shape, generator=torch.Generator().manual_seed(0)).round()
    elif ours.task == "sequence-classification" and config.num_labels == 1:
        batch["labels"] = batch["labels"].float()
    if config.model_type == "encoder-decoder":  # where transformers hides what is left out of the labels, else
        batch["decoder_attention_mask"] = output_mask(ours, batch).long()
    if pad is not None:
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        batch["input_ids"] = ids.masked_fill(ids == pad, 0 if pad else 1).masked_fill(~mask, pad)
    return compare_models(ours, theirs, batch, names=(str(first), str(name)), tolerance=tolerance)


def _check_rows(task: str, rows: Sequence[Row], data: str | None) -> None:
    """Raise ValueError for rows that give a task nothing to compute."""
    least = {"multiple-choice": "three texts that have tokens", "causal-lm": "a text of two tokens"}
    least["double-heads"] = "three texts, one of them of two tokens"
    longest = max((len(row.input_ids) for row in rows), default=0)
    if longest < (2 if task in ("causal-lm", "double-heads") else 1):  # what is predicted follows a token
        raise ValueError(f"--data {data}: expected at least {least.get(task, 'a text that has tokens')}")


def _two_losses(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Labels of a double-heads model for a multiple-choice batch: every token, and the choice, judged by its end."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return {"labels": ids.where(mask.bool(), IGNORE), "mc_labels": batch["labels"], "mc_token_ids": mask.sum(-1) - 1}


def _texts(data: str, most: int = 64) -> list[str]:
    """The first texts of a file: its lines, or its text column."""
    from modelcenter.data.columns import find_columns
    from modelcenter.data.sources import find

    source = find(data)
    table = source.read(source.splits[0])
    texts = table.columns[find_columns(table, labelled=False).text]
    return [str(text) for text in texts[:most]]


def hub_class(model_type: str, task: str) -> Any:
    """transformers' class of a task, or that of the code which exports of this architecture bring for transformers."""
    import transformers

    arch = registry.get(model_type).arch_map()
    name = arch.tasks[task].hf_class
    if not arch.files:
        if not hasattr(transformers, name):
            raise ValueError(
                f"transformers has no {name}: those who published {model_type} ship its code with the weights. Compare "
                "with another checkpoint: modelcenter compare A B"
            )
        return getattr(transformers, name)
    spec = importlib.util.spec_from_file_location("modelcenter_remote_code", registry.shipped_file(arch.files[0]))
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    return getattr(code, name)


def load_transformers(folder: str | Path, ours: nn.Module) -> nn.Module:
    """The transformers model of the class that fits one of ours, in fp32 and eval mode."""
    return hub_class(ours.config.model_type, ours.task).from_pretrained(folder, dtype=torch.float32).eval()


def main(argv: Sequence[str]) -> int:
    """`modelcenter compare`; returns the exit status: 0 equal, 1 different. Raises ValueError for wrong flags."""
    parser = Parser(prog="modelcenter compare", description=__doc__)
    parser.add_argument("first", metavar="A", help="a run, or a checkpoint: name, directory or distributed")
    parser.add_argument(
        "second", metavar="B", nargs="?", help="another checkpoint (default: A's export in transformers)"
    )
    parser.add_argument("--data", help="file of texts: txt, json, jsonl, csv, tsv or parquet (default: random tokens)")
    parser.add_argument("--task", choices=registry.TASKS, help="the head (default: the one the checkpoint names)")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest difference (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.read(list(argv))
    from modelcenter.hub.run_folder import find_step

    first, second = (None if name is None else str(find_step(name, None)) for name in (args.first, args.second))
    result = compare_checkpoints(first, second, data=args.data, task=args.task, tolerance=args.tolerance)
    if args.json:
        print(json.dumps({**asdict(result), "equal": result.equal}))
    else:
        print(result)
    return 0 if result.equal else 1
