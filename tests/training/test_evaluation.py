"""evaluate and accumulate as functions, on any of our models."""

import weakref

import pytest
import torch
from toydata import SIZES

import engine
import modelcenter
from engine.testing import run as on_ranks
from modelcenter.training.evaluation import EvaluationStopped, logits_of, stoppable
from modelcenter.training.inference.text_generation import map_over_ranks
from modelcenter.training.metrics import SingleLabel

VOCAB = 31


def make_model(task: str = "sequence-classification", **more):
    """With dropout, so that evaluating in training mode would show."""
    sizes = SIZES | {"dropout": 0.5, "attention_dropout": 0.5, "initializer_range": 0.5, "vocab_size": VOCAB}
    return modelcenter.from_config("tiny/bert", task, num_labels=3, **sizes | more)


def make_batches(sizes: list[int]) -> list[dict]:
    """Padded batches: what a user has who packs nothing."""
    rng = torch.Generator().manual_seed(1)
    batches = []
    for rows in sizes:
        mask = (torch.arange(7) < torch.randint(2, 8, (rows, 1), generator=rng)).long()
        ids = torch.randint(5, VOCAB, (rows, 7), generator=rng)
        labels = torch.randint(3, (rows,), generator=rng)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


@pytest.mark.parametrize("training", [True, False])
def test_loss_and_metrics_of_all_rows(training):
    model, batches = make_model(), make_batches([4, 1, 3])
    model.train(training).layers[0].eval()  # as of a part that is frozen, without dropout
    found = modelcenter.training.evaluate(model, batches, SingleLabel(3))
    assert model.training is model.pooler.training is training and not model.layers[0].training
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(batch["input_ids"], batch["attention_mask"]).logits for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), abs=1e-6)
    assert found["accuracy"] == int((logits.argmax(-1) == labels).sum()) / 8
    places = [torch.tensor([3, 7, 0, 1]), torch.tensor([2]), torch.tensor([6, 5, 4])]
    assert torch.allclose(logits_of(model, batches, places, 8, 3)[torch.cat(places)], logits, atol=1e-6)


def test_a_loss_of_two_terms_is_the_sum_of_their_means():
    model = make_model("pretraining").eval()
    batches = make_batches([3, 2])
    for batch in batches:
        batch["next_sentence_label"] = batch["labels"].clamp(max=1)
        batch["labels"] = torch.where(batch["input_ids"] % 3 == 0, batch["input_ids"], -100)
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    with torch.no_grad():
        expected = model(**whole).loss.item()
    assert modelcenter.training.evaluate(model, batches)["loss"] == pytest.approx(expected, abs=1e-5)
    for batch in batches:
        batch["labels"].fill_(-100)  # a term without items adds nothing
    labels = whole["next_sentence_label"]
    with torch.no_grad():
        whole = model(**{n: whole[n] for n in ("input_ids", "attention_mask")}, output_logits=True)
    expected = torch.nn.functional.cross_entropy(whole.seq_relationship_logits, labels).item()
    assert modelcenter.training.evaluate(model, batches)["loss"] == pytest.approx(expected, abs=1e-5)
    own = lambda out, batch, totals: (batch["labels"] >= 0).sum() / totals["masked_lm"]  # noqa: E731
    assert modelcenter.training.evaluate(model, batches, loss_fn=own)["loss"] == 0.0
    parts = iter([1e8, 1.0])  # of many batches the last are small beside the sum
    whole_sum = modelcenter.training.evaluate(model, batches, loss_fn=lambda *_: torch.tensor(next(parts)))
    assert whole_sum["loss"] == 1e8 + 1


def test_each_batch_is_counted_once_and_its_logits_are_let_go():
    """Vocabulary logits of two batches at once may be more than a device has."""
    model, batches, alive, counted = make_model("pretraining"), make_batches([3, 2, 2]), [], []
    for batch in batches:
        batch["labels"], batch["next_sentence_label"] = batch["input_ids"], batch["labels"].clamp(max=1)
    held: list = []
    model.register_forward_pre_hook(lambda *_: alive.extend(one() for one in held if one() is not None))
    count = model.loss_counts
    model.loss_counts = lambda batch: counted.append(batch) or count(batch)
    modelcenter.training.evaluate(model, batches, None, lambda _, out, batch: held.append(weakref.ref(out.logits)))
    assert len(held) == 3 and not alive
    assert sum(any(one is batch for one in counted) for batch in batches) == 3 == len(counted) - 1  # and an empty one


def evaluate_share() -> dict:
    """Rank 1 has fewer batches, and one of another size."""
    engine.init_distributed(zero_level=3)
    batches = make_batches([4, 1, 3, 2])
    mine = [batches[:3], batches[3:]][engine.rank()] if engine.world_size() > 1 else batches
    return modelcenter.training.evaluate(make_model(), mine, SingleLabel(3))


def test_ranks_with_unequal_batches():
    expected = evaluate_share()
    for found in on_ranks(evaluate_share, 2):
        assert found == pytest.approx(expected, abs=1e-6)


def sent_by_a_stage() -> list[bool]:
    """Of what an evaluation handed to the next stage: whether it is still held afterwards."""
    engine.init_distributed(zero_level=0, pp_size=2)
    sent, send = [], torch.distributed.isend
    torch.distributed.isend = lambda x, **where: sent.append(weakref.ref(x)) or send(x, **where)
    modelcenter.training.evaluate(make_model(num_layers=2), make_batches([2, 2, 2]))
    return [one() is not None for one in sent]


def test_a_stage_holds_nothing_of_an_evaluation():
    """Hidden states of large batches would lie beside those of the training that goes on; and who leaves the ranks
    next has been heard."""
    assert on_ranks(sent_by_a_stage, 2) == [[False] * 3, []]


def test_no_rows_at_all():
    found = modelcenter.training.evaluate(make_model(), [], SingleLabel(3))
    assert found == {"loss": None, "accuracy": 0.0, "f1": 0.0, "mcc": 0.0}  # a loss of 0 would be the best


def gradients(loss_fn=None, share: bool = False) -> dict:
    engine.init_distributed(zero_level=0)
    model = make_model().eval()  # no dropout
    batches = make_batches([4, 1, 3])
    mine = [batches[:1], batches[1:]][engine.rank()] if share else batches
    loss = modelcenter.training.accumulate(model, mine, loss_fn)
    local = {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in model.named_parameters()
    }
    return {"loss": loss.item(), **{name: grad.tolist() for name, grad in local.items()}}


def squared(out, batch, totals):
    """A loss of one's own: it gets the output, the microbatch and the global counts."""
    return (out.logits**2).sum() / totals["loss"]


@pytest.mark.parametrize("loss_fn", [None, squared])
def test_accumulate_is_the_mean_over_all_items(loss_fn):
    model, whole = make_model().eval(), make_batches([4, 1, 3])
    whole = {name: torch.cat([batch[name] for batch in whole]) for name in whole[0]}
    out = model(**whole)
    loss = out.loss if loss_fn is None else squared(out, whole, {"loss": 8})
    loss.backward()
    found = [gradients(loss_fn), *on_ranks(lambda: gradients(loss_fn, share=True), 2)]
    for result in found:
        assert result.pop("loss") == pytest.approx(loss.item(), rel=1e-5)
        for name, p in model.named_parameters():
            assert torch.allclose(torch.tensor(result[name]), p.grad, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("own", ["inputs", "counts"])
def test_a_function_may_have_inputs_or_counts_of_its_own(own):
    seen = []

    def function(out, batch, totals):
        seen.append(("loss" in out, dict(totals)))
        return squared(out, batch, totals)

    def inputs(batch):
        return {name: value for name, value in batch.items() if name != "labels"}

    setattr(function, own, inputs if own == "inputs" else lambda batch: {"loss": 2 * len(batch["labels"])})
    modelcenter.training.accumulate(make_model(), make_batches([4, 1, 3]), function)
    assert seen == [(own == "counts", {"loss": 8 if own == "inputs" else 16})] * 3


def test_what_goes_over_batches_stops_between_two_of_them():
    """The model is in the mode it was in, and what comes later asks nobody."""
    model, batches, asked = make_model().train(), make_batches([2, 2, 2]), []
    with pytest.raises(EvaluationStopped), stoppable(lambda: len(asked) == 2 or asked.append(1)):
        modelcenter.training.evaluate(model, batches)
    assert model.training and len(asked) == 2
    written = []
    with pytest.raises(EvaluationStopped), stoppable(lambda: len(written) == 2):
        map_over_ranks(7, 1, lambda numbers: written.append(numbers) or numbers)
    assert written == [[0], [1]]
    assert map_over_ranks(2, 1, list) == [0, 1] and modelcenter.training.evaluate(model, batches)["loss"] > 0
