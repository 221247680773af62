"""Our models in loops of others: the Hugging Face Trainer and a bare Accelerator loop."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader, Dataset

import modelcenter as mc
from modelcenter.testing import randomize_

SIZES = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "dropout": 0.0}


class Rows(Dataset):
    """24 padded rows of 4 to 9 tokens."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(i)
        length = 4 + i % 6
        ids = torch.randint(5, 60, (9,), generator=random)
        return {
            "input_ids": ids,
            "attention_mask": (torch.arange(9) < length).long(),
            "labels": torch.tensor(int(ids[0] % 2)),
        }


def tokens_of(folder) -> list:
    """The special tokens that each file names."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*config.json"))]
    return [{k: v for k, v in file.items() if k.endswith("_token_id") and v is not None} for file in files]


def start(task="sequence-classification", **options):
    return mc.from_config("tiny/bert", task=task, attention_dropout=0.0, num_labels=2, **SIZES, **options).train()


def test_the_hugging_face_trainer_trains_evaluates_saves_and_resumes(tmp_path):
    """Gradients are right under accumulation, which the Trainer gets wrong for its own BERT."""
    from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

    def trainer(folder, batch, accumulation, **more):
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation} | more
        arguments = TrainingArguments(
            output_dir=str(tmp_path / folder), use_cpu=True, report_to=[], logging_steps=1, learning_rate=1e-2,
            eval_strategy="epoch", save_strategy="epoch", num_train_epochs=2, label_names=["labels"],
            load_best_model_at_end=True, disable_tqdm=True, **options,
        )  # fmt: skip
        return Trainer(start(), arguments, train_dataset=Rows(), eval_dataset=Rows())

    curves = []
    for folder, batch, accumulation in (("whole", 8, 1), ("cut", 2, 4)):
        one = trainer(folder, batch, accumulation)
        one.train()
        curves.append([(row["loss"], row["grad_norm"]) for row in one.state.log_history if "grad_norm" in row])
    assert len(curves[0]) == 6
    assert torch.allclose(torch.tensor(curves[0]), torch.tensor(curves[1]), rtol=1e-3, atol=1e-4)

    resumed = trainer("cut", 2, 4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-3"))
    tail = [(row["loss"], row["grad_norm"]) for row in resumed.state.log_history if "grad_norm" in row]
    assert torch.allclose(torch.tensor(tail), torch.tensor(curves[1]), rtol=1e-5)
    found = resumed.evaluate()
    resumed.model.save_pretrained(tmp_path / "final")
    theirs = AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "final")).eval()
    batch = torch.utils.data.default_collate([Rows()[i] for i in range(24)])
    with torch.no_grad():
        assert theirs(**batch).loss.item() == pytest.approx(found["eval_loss"], abs=1e-5)


def texts():
    rows = [Rows()[i] for i in range(8)]
    return [row | {"labels": row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)} for row in rows]


def numbers():
    return [Rows()[i] | {"labels": torch.tensor([i % 2, i % 3 > 0, 1]).float()} for i in range(8)]


def tokenizer():
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "</s>": 3}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", bos_token="[UNK]", eos_token="</s>"
    )


def pairs():
    return [row | {"next_sentence_label": torch.tensor(i % 2)} for i, row in enumerate(texts())]


CASES = {
    "next token": ("tiny/llama", "causal-lm", {}, texts, {}),
    "smoothed": ("tiny/llama", "causal-lm", {}, texts, {"label_smoothing_factor": 0.1}),
    "recomputed": ("tiny/llama", "causal-lm", {}, texts, {"gradient_checkpointing": True}),
    "labels": ("tiny/bert", "sequence-classification", {"problem_type": "multi_label_classification"}, numbers, {}),
    "numbers": ("tiny/bert", "sequence-classification", {"problem_type": "regression"}, numbers, {}),
    "terms": ("tiny/bert", "pretraining", {}, pairs, {"label_names": ["labels", "next_sentence_label"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_hugging_face_trainer_gets_the_losses_of_its_own_model(case, tmp_path):
    """Ours in two microbatches, where a number of items divides the loss: Trainer leaves its BERT's undivided."""
    import transformers

    preset, task, fields, rows, options = CASES[case]
    sizes = {**SIZES, "vocab_size": 60, "num_labels": 3, "attention_dropout": 0.0} | fields
    ours = mc.from_config(preset, task, **{k: v for k, v in sizes.items() if k != "dropout" or "bert" in preset})
    ours.save_pretrained(tmp_path)
    name = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    found = []
    assert ours.accepts_loss_kwargs == (case != "terms")
    for model, parts in (
        (ours, 1 + ours.accepts_loss_kwargs),
        (getattr(transformers, name).from_pretrained(tmp_path), 1),
    ):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "run"), use_cpu=True, report_to=[], logging_steps=1, max_steps=1,
            per_device_train_batch_size=4 // parts, gradient_accumulation_steps=parts, save_strategy="no",
            disable_tqdm=True, **{"label_names": ["labels"]} | options,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model.train(), arguments, train_dataset=rows(), eval_dataset=rows(), processing_class=tokenizer()
        )
        trainer.train()
        step, after = trainer.state.log_history[0], trainer.evaluate()["eval_loss"]
        found.append([step["loss"], step["grad_norm"], after])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert repr(ours).startswith(type(ours).__name__ + "(")


@pytest.mark.parametrize(("length", "smoothing"), [(12, 0.0), (24, 0.1)])
def test_the_hugging_face_trainer_predicts_with_generate(length, smoothing, tmp_path):
    """The texts and losses of transformers' own model, and no setting of theirs in the files."""
    import transformers

    sizes = {**SIZES, "num_decoder_layers": 1, "vocab_size": 60}
    ours = randomize_(mc.from_config("tiny/t5", "seq2seq-lm", eos_token_id=3, **sizes))
    ours.save_pretrained(tmp_path)
    rows = [{name: value.tolist() for name, value in row.items()} for row in texts()]
    found = []
    for model in (ours, transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)):
        arguments = transformers.Seq2SeqTrainingArguments(
            output_dir=str(tmp_path / "run"), use_cpu=True, report_to=[], per_device_eval_batch_size=3,
            disable_tqdm=True, label_names=["labels"], predict_with_generate=True, generation_num_beams=2,
            generation_max_length=length, label_smoothing_factor=smoothing,
        )  # fmt: skip
        words = tokenizer()
        collator = transformers.DataCollatorForSeq2Seq(words, model)
        trainer = transformers.Seq2SeqTrainer(model, arguments, collator, processing_class=words)
        predicted, _, metrics = trainer.predict(rows)
        found.append((predicted.tolist(), metrics["test_loss"]))
    assert found[0] == (found[1][0], pytest.approx(found[1][1], abs=1e-5))
    assert ours.generation_config == {}
    with pytest.raises(ValueError, match="generation_config: got GenerationConfig, expected a mapping"):
        ours.generation_config = transformers.GenerationConfig(num_beams=2)


def test_units_recompute_until_told_otherwise():
    model = mc.from_config("tiny/llama", "causal-lm", num_layers=3)
    model.gradient_checkpointing_enable(every_n_layers=2)
    assert ["forward" in vars(unit) for unit in model.units] == [True, False, True]
    model.gradient_checkpointing_disable()
    assert not any("forward" in vars(unit) for unit in model.units)
    with pytest.raises(ValueError, match="offload: got True, expected False; engine.shard"):
        model.activation_checkpointing_enable(offload=True)


def test_units_that_cast_their_parameters_recompute_until_told_otherwise():
    import engine

    engine.init_distributed()
    for recompute in ("none", "full"):
        policy = engine.Policy(precision="bf16", recompute=recompute)
        model = mc.from_config("tiny/llama", "causal-lm", num_layers=3, policy=policy)
        before, calls = [vars(unit)["forward"] for unit in model.units], []
        model.units[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        model.gradient_checkpointing_enable()
        model.gradient_checkpointing_enable()  # once more changes nothing
        model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
        assert len(calls) == 2
        model.gradient_checkpointing_disable()
        assert [vars(unit)["forward"] for unit in model.units] == before


@pytest.mark.parametrize(
    ("preset", "task", "named", "file"),
    [
        ("gpt2", "causal-lm", {}, {"eos_token_id": [2, 4]}),
        ("llama", "causal-lm", {"eos_token_id": 2}, {}),
        ("t5", "seq2seq-lm", {}, {}),
        pytest.param("bart", "seq2seq-lm", {}, {}, marks=pytest.mark.full),
        ("bert", "sequence-classification", {}, {}),
        ("llama", "sequence-classification", {"eos_token_id": 2}, {}),
    ],
)
def test_the_hugging_face_trainer_aligns_special_tokens(preset, task, named, file, tmp_path):
    import transformers

    words = tokenizer()
    ours = mc.from_config(f"tiny/{preset}", task, **named)
    ours.generation_config = file
    ours.save_pretrained(tmp_path / "before")
    name = json.loads((tmp_path / "before" / "config.json").read_text())["architectures"][0]
    theirs = getattr(transformers, name).from_pretrained(tmp_path / "before")
    for model, folder in ((ours, tmp_path / "ours"), (theirs, tmp_path / "theirs")):
        for _ in range(2):  # the second time it changes nothing
            transformers.trainer_utils.align_special_tokens(model, words)
        model.save_pretrained(folder)
    assert tokens_of(tmp_path / "ours") == tokens_of(tmp_path / "theirs")
    assert mc.from_pretrained(tmp_path / "ours").generation_config == ours.generation_config


def test_a_bare_accelerator_loop(tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, rows = start(), Rows()
    reference = start()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(rows, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    other = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    batches = list(DataLoader(rows, batch_size=4))
    for first in range(0, len(batches), 2):
        mc.training.accumulate(reference, batches[first : first + 2])
        other.step()
        other.zero_grad()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    plain = accelerator.unwrap_model(model)
    for (name, p), q in zip(plain.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-5), name
    accelerator.save_state(str(tmp_path / "state"))
    with torch.no_grad():
        next(plain.parameters()).zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.allclose(next(plain.parameters()), next(reference.parameters()), atol=1e-5)
    plain.save_pretrained(tmp_path / "model")
    again = mc.from_pretrained(str(tmp_path / "model"))
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), plain.parameters(), strict=True))
