"""Our models in loops of others: the Hugging Face Trainer and a bare Accelerator loop."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import modelcenter as mc

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
