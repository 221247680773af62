"""Whole models: `transformers` BERT and GPT-2 in BMTrainModelWrapper, and ModelCenter's quick start on our BERT."""

import bmtrain_toys as toys
import pytest
import torch
import torch.nn.functional as F

import engine as bmt
from engine.testing import Pool

WIDTH = {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def two():
    import transformers.models.bert.modeling_bert
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401  (once, before the fork)

    import modelcenter.models.bert  # noqa: F401

    with Pool(2, timeout=120) as pool:
        yield pool


def hugging_face(kind):
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(11)
    if kind == "bert":
        config = BertConfig(**WIDTH, intermediate_size=24, max_position_embeddings=16)
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        return BertForMaskedLM(config)
    config = GPT2Config(vocab_size=29, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(5, 29, (2, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def optimize(model, batches, optimizer, backward, step):
    found = {"loss": [], "grads": []}
    for index in range(toys.STEPS):
        loss = model(**batches(index)).loss
        found["loss"].append(bmt.sum_loss(loss).item())
        optimizer.zero_grad()
        backward(loss)
        found["grads"].append({n: toys.whole(p.grad) for n, p in model.named_parameters()})
        step()
    found["params"] = {n: toys.whole(p) for n, p in model.named_parameters()}
    return found


def wrapped(kind, level):
    bmt.init_distributed(zero_level=level)
    model = bmt.BMTrainModelWrapper(hugging_face(kind).train())
    layers = model.bert.encoder.layer if kind == "bert" else model.transformer.h
    assert all(isinstance(layer, bmt.Block) for layer in layers)
    calls = []
    for module in (layers[0].attention.output.dense if kind == "bert" else layers[0].mlp.c_fc,):
        module.register_forward_hook(lambda *_: calls.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    found = optimize(model, lambda i: batch(i, bmt.rank()), optimizer, manager.backward, manager.step)
    return found, len(calls)


def expected(kind):
    model = hugging_face(kind).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def both(index):
        parts = [batch(index, rank) for rank in range(2)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return optimize(model, both, optimizer, torch.Tensor.backward, optimizer.step)


@pytest.mark.parametrize(("kind", "level"), [("bert", 3), ("gpt2", 3), ("gpt2", 2), ("bert", 0)])
def test_the_wrapper_trains_transformers_models_as_one_process(two, kind, level):
    reference = expected(kind)
    for found, calls in two.run(wrapped, kind, level):
        assert calls == 2 * toys.STEPS  # recomputed once in each backward
        torch.testing.assert_close(torch.tensor(found["loss"]), torch.tensor(reference["loss"]), rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(found["grads"], reference["grads"], strict=True):
            assert list(mine) == list(theirs)
            for name, gradient in theirs.items():
                toys.assert_close(name, mine[name], gradient, rtol=1e-4, atol=1e-6)
        for name, parameter in reference["params"].items():
            torch.testing.assert_close(found["params"][name], parameter, rtol=1e-5, atol=1e-6)


def unequal_start():
    bmt.init_distributed(seed=1, zero_level=0)
    torch.manual_seed(50 + bmt.rank())  # as dropout seeds are: the ranks build different models
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), toys.Embedding(4, 2))
    model[1].weight.data.normal_()
    own = {name: toys.whole(p) for name, p in model.named_parameters()}
    bmt.BMTrainModelWrapper(model)
    return own, {name: toys.whole(p) for name, p in model.named_parameters()}


def test_the_wrapper_trains_rank_0s_model(two):
    (own, first), (other, second) = two.run(unequal_start)
    for name, value in own.items():
        assert (
            torch.equal(first[name], value) and torch.equal(second[name], value) and not torch.equal(other[name], value)
        )


def test_the_wrapper_refuses_meta():
    with pytest.raises(ValueError, match="parameter weight is on the meta device"):
        bmt.BMTrainModelWrapper(torch.nn.Linear(1, 1, device="meta"))


class Classifier(torch.nn.Module):
    """The quick start's model: a loaded BERT and a new layer in a plain module."""

    def __init__(self):
        super().__init__()
        import modelcenter as mc

        self.bert = mc.from_config("tiny/bert", task="base", dropout=0.0, attention_dropout=0.0)
        self.dense = bmt.nn.Linear(self.bert.config.hidden_size, 2)
        bmt.init_parameters(self.dense)

    def forward(self, input_ids, attention_mask):
        return self.dense(self.bert(input_ids=input_ids, attention_mask=attention_mask).pooler_output)


def examples(ranks):
    generator = torch.Generator().manual_seed(3)
    for _ in range(toys.STEPS):
        ids = torch.randint(5, 50, (4, 6), generator=generator)
        mask = torch.ones_like(ids)
        mask[::2, 4:] = 0
        labels = (ids[:, 0] > 25).long()
        mine = slice(4 // ranks * bmt.rank(), 4 // ranks * (bmt.rank() + 1))
        yield {"input_ids": ids[mine], "attention_mask": mask[mine], "labels": labels[mine]}


def quick_start(capture=None):
    bmt.init_distributed(seed=0)
    model = Classifier()
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), eps=1e-4)
    lr_scheduler = bmt.lr_scheduler.Noam(optimizer, start_lr=3e-3, warmup_iter=2, end_iter=-1)
    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
    optim_manager = bmt.optim.OptimManager(loss_scale=1024)
    optim_manager.add_optimizer(optimizer, lr_scheduler)
    lines = []
    for _ in range(2):
        model.train()
        for data in examples(bmt.world_size()):
            logits = model(data["input_ids"], data["attention_mask"])
            loss = loss_func(logits.view(-1, logits.shape[-1]), data["labels"].view(-1))
            global_loss = bmt.sum_loss(loss).item()
            optim_manager.zero_grad()
            optim_manager.backward(loss)
            norm = optim_manager.clip_grad_norm(
                optimizer.param_groups, max_norm=10.0, scale=optimizer.scale, norm_type=2
            )
            optim_manager.step()
            lines.append((global_loss, lr_scheduler.current_lr, int(optimizer.scale), norm.item()))
        model.eval()
        with torch.no_grad():
            predicted, truth = [], []
            for data in examples(bmt.world_size()):
                logits = model(data["input_ids"], data["attention_mask"])
                predicted.extend(logits.argmax(dim=-1).cpu().tolist())
                truth.extend(data["labels"].cpu().tolist())
        predicted = bmt.gather_result(torch.tensor(predicted).int()).cpu().tolist()
        truth = bmt.gather_result(torch.tensor(truth).int()).cpu().tolist()
    names = list(model.state_dict())
    weights = {name: toys.whole(p) for name, p in model.named_parameters()}
    return lines, sorted(zip(predicted, truth, strict=True)), names, weights


def test_the_quick_start_of_modelcenter(two):
    lines, answers, names, weights = quick_start()
    assert (
        sum(line[0] for line in lines[3:]) < sum(line[0] for line in lines[:3])
        and lines[0][2] == 1024
        and len(answers) == 12
    )
    for found, found_answers, found_names, found_weights in two.run(quick_start):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(lines), rtol=1e-4, atol=1e-5)
        assert found_answers == answers and found_names == names
        for name, weight in weights.items():
            toys.assert_close(name, found_weights[name], weight, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_fused_cross_entropy_is_torchs(weighted, smoothing, reduction):
    logits = torch.randn(7, 5, requires_grad=True)
    target = torch.tensor([0, 1, -1, 4, 2, -1, 3])
    weight = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.1]) if weighted else None
    kwargs = {"ignore_index": -1, "reduction": reduction, "label_smoothing": smoothing}
    found = bmt.loss.FusedCrossEntropy(weight, **kwargs)(logits, target.int())
    expected = F.cross_entropy(logits, target, weight, **kwargs)
    torch.testing.assert_close(found, expected)
    (mine,) = torch.autograd.grad(found.sum(), logits)
    (theirs,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(mine, theirs)


def test_fused_cross_entropy_of_16_bits_of_no_labels_and_of_nonsense():
    loss = bmt.loss.FusedCrossEntropy()
    logits = torch.randn(3, 4).half().requires_grad_()
    value = loss(logits, torch.tensor([1, 2, 3]))
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, F.cross_entropy(logits.float(), torch.tensor([1, 2, 3])))
    for weight in (None, torch.ones(4)):
        nothing = bmt.loss.FusedCrossEntropy(weight)(logits, torch.full((3,), -100))
        nothing.backward()
        assert nothing.item() == 0 and logits.grad.abs().sum() == 0
    for kwargs, match in (
        ({"reduction": "average"}, "reduction is 'average'"),
        ({"label_smoothing": 2}, "label_smoothing is 2"),
        ({"parallel": True, "weight": torch.ones(2), "label_smoothing": 0.1}, "weight or label_smoothing, not both"),
        ({"weight": torch.ones(2, 2)}, r"weight has shape \(2, 2\)"),
    ):
        with pytest.raises(ValueError, match=match):
            bmt.loss.FusedCrossEntropy(**kwargs)
    with pytest.raises(ValueError, match=r"input \(3, 4\) and target \(2,\) are not"):
        loss(logits, torch.zeros(2))
