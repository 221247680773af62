"""Metrics against their definitions, worked out another way, and on two ranks against one."""

import math

import pytest
import torch
from torch import Tensor

import engine
from modelcenter.training.metrics import Accuracy, MultiLabel, Regression, ReplacedTokens, SingleLabel


def one_hot(ids: list[int], classes: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(ids), classes).float()


def feed(metrics, logits: Tensor, targets: Tensor, size: int = 3):
    metrics.update(logits[:size], targets[:size])
    metrics.result()  # it changes nothing: what comes now is added
    for start in range(size, len(targets), size):
        metrics.update(logits[start : start + size], targets[start : start + size])
    return metrics.result()


def test_binary():
    predicted, actual = [1, 1, 0, 1, 0, 0, 1, 0], [1, 0, 0, 1, 1, 0, 1, 0]
    found = feed(SingleLabel(2), one_hot(predicted, 2), torch.tensor(actual))
    assert found == pytest.approx({"accuracy": 6 / 8, "f1": 0.75, "mcc": 0.5})


def test_f1_of_two_classes_is_that_of_class_one():
    predicted, actual = [0, 0, 0, 1], [0, 0, 1, 1]
    assert feed(SingleLabel(2), one_hot(predicted, 2), torch.tensor(actual))["f1"] == pytest.approx(2 / 3)
    assert feed(SingleLabel(2), one_hot([0, 0], 2), torch.tensor([0, 0]))["f1"] == 0.0


def mcc_by_definition(predicted: list[int], actual: list[int], classes: int) -> float:
    x, y = one_hot(predicted, classes).double(), one_hot(actual, classes).double()
    x, y = x - x.mean(0), y - y.mean(0)
    spread = math.sqrt(((x * x).sum() * (y * y).sum()).item())
    return (x * y).sum().item() / spread if spread else 0.0


def test_several_classes():
    rng = torch.Generator().manual_seed(3)
    actual = torch.randint(4, (200,), generator=rng)
    predicted = torch.where(torch.rand(200, generator=rng) < 0.5, actual, torch.randint(4, (200,), generator=rng))
    found = feed(SingleLabel(5), one_hot(predicted.tolist(), 5), actual, size=17)  # class 4 occurs nowhere
    f1 = []
    for k in range(4):
        hit = int(((predicted == k) & (actual == k)).sum())
        precision, recall = hit / int((predicted == k).sum()), hit / int((actual == k).sum())
        f1.append(2 * precision * recall / (precision + recall))
    assert found["accuracy"] == pytest.approx((predicted == actual).float().mean().item())
    assert found["f1"] == pytest.approx(sum(f1) / 4)
    assert found["mcc"] == pytest.approx(mcc_by_definition(predicted.tolist(), actual.tolist(), 5))


def test_a_class_that_is_only_predicted_has_an_f1_of_0():
    """As scikit-learn has it, which averages over the classes that are predicted or labelled."""
    found = feed(SingleLabel(4), one_hot([0, 1, 2], 4), torch.tensor([0, 1, 1]))
    assert found["f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_one_class_only_has_no_correlation():
    assert feed(SingleLabel(2), one_hot([1, 1, 1], 2), torch.tensor([1, 0, 1]))["mcc"] == 0.0


@pytest.mark.parametrize("metrics", [SingleLabel(2), Accuracy()])
def test_rows_without_a_label_do_not_count(metrics):
    found = feed(metrics, one_hot([1, 0, 1, 0], 2), torch.tensor([1, -100, 0, -100]))
    assert found["accuracy"] == 0.5


def test_multi_label():
    predicted = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 0]]).float()
    actual = torch.tensor([[1, 0, 1], [0, 1, 1], [0, 1, 0], [0, 0, 0]]).float()
    found = feed(MultiLabel(3), (predicted * 2 - 1) / 10, actual)  # probabilities near 0.5, the threshold
    # 4 of 5 predicted are right, 4 of 5 actual are found; rows 0 and 3 are all right
    assert found == pytest.approx({"f1": 0.8, "f1_macro": (2 / 3 + 1.0 + 2 / 3) / 3, "accuracy": 0.5})


def test_regression():
    predicted = torch.tensor([2.5, 0.0, 2.0, 8.0, 0.0, 3.1])
    actual = torch.tensor([3.0, -0.5, 2.0, 7.0, 0.2, 2.0])
    found = feed(Regression(), predicted[:, None], actual)
    assert found["mse"] == pytest.approx(((predicted - actual) ** 2).mean().item())
    assert found["pearson"] == pytest.approx(torch.corrcoef(torch.stack([predicted, actual]))[0, 1].item())
    # Spearman is Pearson of the ranks; ties share their mean rank.
    x, y = torch.tensor([4.0, 1.5, 3.0, 6.0, 1.5, 5.0]), torch.tensor([5.0, 1.0, 3.5, 6.0, 2.0, 3.5])
    assert found["spearman"] == pytest.approx(torch.corrcoef(torch.stack([x, y]))[0, 1].item())


def test_regression_of_several_values_and_of_a_constant():
    x = torch.tensor([[1.0, 4.0], [2.0, 1.0], [3.0, 0.0]])
    assert feed(Regression(), x, x * torch.tensor([2.0, -1.0]))["pearson"] == pytest.approx(0.0)
    found = feed(Regression(), torch.ones(3, 1), torch.tensor([1.0, 2.0, 3.0]))
    assert found["pearson"] is None and found["spearman"] is None and found["mse"] == pytest.approx(5 / 3)


def test_a_correlation_that_one_value_of_a_row_does_not_have_is_none():
    x = torch.tensor([[1.0, 4.0], [2.0, 1.0], [3.0, 0.0]])
    found = feed(Regression(2), x, torch.tensor([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]]))
    assert found["pearson"] is None and found["spearman"] is None


def test_ranks_of_many_rows_are_exact():
    values = torch.randperm(20000).float()
    found = feed(Regression(), values[:, None], -values, size=20000)
    assert found["spearman"] == pytest.approx(-1.0, abs=1e-12)


def test_predictions_that_are_not_finite_have_no_correlation():
    """A model that has diverged must not be the best by the order of its NaNs. As scipy, which gives NaN."""
    for bad in (1, 3):
        metric = Regression()
        metric.update(torch.tensor([[math.nan]] * bad + [[0.1]] * (3 - bad)), torch.tensor([1.0, 2.0, 3.0]))
        found = metric.result()
        assert found["pearson"] is None and found["spearman"] is None
    metric = Regression()  # an order is one with an infinity too
    metric.update(torch.tensor([[0.1], [0.2], [math.inf]]), torch.tensor([1.0, 2.0, 3.0]))
    assert metric.result()["spearman"] == pytest.approx(1.0)


def shares(case: str) -> dict:
    """Each rank feeds its part of the same rows; the last ones of rank 1 are fewer, or none."""
    engine.init_distributed(tp_size=engine.world_size())  # all ranks count, whatever they split between them
    rng = torch.Generator().manual_seed(0)
    logits, classes = torch.randn(11, 3, generator=rng), torch.randint(3, (11,), generator=rng)
    mine = slice(0, 11) if engine.world_size() == 1 else (slice(0, 8), slice(8, 11))[engine.rank()]
    if case in ("one", "several values"):
        mine = mine if engine.world_size() == 1 else (slice(0, 11), slice(0, 0))[engine.rank()]
    if case == "regression":
        return feed(Regression(), logits[mine, :1], logits[mine, 1])
    if case == "several values":
        return feed(Regression(2), logits[mine, :2], logits[mine, 1:])
    if case == "multi":
        return feed(MultiLabel(3), logits[mine], one_hot(classes.tolist(), 3)[mine])
    return feed(SingleLabel(3), logits[mine], classes[mine])


def test_two_ranks_are_one():
    with engine.testing.Pool(2) as pool:
        for case in ("single", "multi", "regression", "one", "several values"):
            for found in pool.run(shares, case):
                assert found == pytest.approx(shares(case), abs=1e-12), case


def test_replaced_tokens_by_hand():
    """Of five tokens three are said to be replaced, two of the three that were; a sixth is padding."""
    metrics = ReplacedTokens()
    logits = torch.tensor([[2.0, -1.0, 0.5], [1.0, -3.0, 9.0]])
    replaced = torch.tensor([[1, 1, 0], [1, 0, -100]])
    guesses = torch.tensor([[0.0, 1.0, 0.0], [3.0, 0.0, 0.0]])
    metrics.update(logits[:1], replaced[:1], guesses[:1], torch.tensor([1]))
    metrics.update(logits[1:], replaced[1:], guesses[1:], torch.tensor([2]))
    found = metrics.result()
    costs = [math.log1p(math.exp(-x)) for x in (2.0, -1.0, -0.5, 1.0, 3.0)]
    assert found.pop("discriminator_loss") == pytest.approx(sum(costs) / 5)
    loss = (math.log(2 + math.e) - 1 + math.log(2 + math.exp(3))) / 2
    assert found.pop("generator_loss") == pytest.approx(loss)
    assert found.pop("generator_perplexity") == pytest.approx(math.exp(loss))
    assert found == pytest.approx(
        {"accuracy": 3 / 5, "precision": 2 / 3, "recall": 2 / 3, "replaced": 3 / 5, "generator_accuracy": 1 / 2}
    )
    assert ReplacedTokens().result()["discriminator_loss"] is None
