"""Tensor parallelism of models that are not ours, and initial values and checkpoints that do not depend on it."""

import engine_toys as toys
import parallel_bert as bert
import pytest
import torch
import transformers

import engine
import modelcenter as mc

SEQUENCE = {"sequence_parallel": True}

# -- other models -----------------------------------------------------------------------------------------------------

HF_BERT_PLAN = {
    "bert.embeddings.word_embeddings": "embedding_rowwise",
    **{f"bert.encoder.layer.*.attention.self.{name}": "colwise" for name in ("query", "key", "value")},
    "bert.encoder.layer.*.attention.output.dense": "rowwise",
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
}


def foreign(kind):
    torch.manual_seed(5)
    if kind == "bert":
        config = transformers.BertConfig(
            vocab_size=35,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=22,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        model = transformers.BertForMaskedLM(config)
    elif kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**toys.LLAMA, tie_word_embeddings=False))
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**toys.LLAMA, tie_word_embeddings=kind == "tied")
        )
    return bert.randomize_(model)


def foreign_step(model):
    ids = torch.randint(1, 35, (2, 9), generator=torch.Generator().manual_seed(engine.data_rank()))
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    out.loss.backward()
    norm = engine.optim.clip_grad_norm_(model.parameters(), 1e9).item()
    return out.loss.item(), norm, out.logits.detach(), {n: toys.whole(p.grad) for n, p in model.named_parameters()}


def foreign_trained(kind, plan):
    engine.init_distributed(tp_size=2)
    return foreign_step(engine.shard(foreign(kind), tp_plan=plan))


@pytest.mark.parametrize(("kind", "plan"), [("untied", None), ("tied", None), ("qwen3", None), ("bert", HF_BERT_PLAN)])
def test_models_of_transformers(two, kind, plan):
    loss, norm, logits, grads = foreign_step(foreign(kind))
    for mine in two.run(foreign_trained, kind, plan):
        assert mine[0] == pytest.approx(loss, rel=1e-5) and mine[1] == pytest.approx(norm, rel=1e-5)
        torch.testing.assert_close(mine[2], logits, rtol=1e-4, atol=1e-5)
        assert mine[3].keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(mine[3][name], grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def toy_trained(plan, kwargs):
    engine.init_distributed(tp_size=2)
    return toys.train(engine.shard(toys.build(**kwargs), tp_plan=toys.TP_PLAN), plan)


@pytest.mark.parametrize("kwargs", [{}, {"tied": True}, {"frozen": True}], ids=["plain", "tied", "frozen"])
def test_plain_modules_by_an_argument(four, kwargs):
    plan = [[[0], [1]], [[2, 3, 4], [5]], [[6], []]]
    for found in four.run(toy_trained, plan, kwargs):
        toys.assert_same(found, toys.truth(toys.build(**kwargs), plan))


# -- initial values and checkpoints -----------------------------------------------------------------------------------


def made(sizes, path=None, policy=None, save=(), load=None):
    """A model that is built, loaded by name or from a checkpoint; what this rank holds of it, and the whole."""
    engine.init_distributed(**sizes)
    policy = engine.Policy(**policy or {})
    if path is None:
        model = mc.from_config("tiny/bert", "masked-lm", policy=policy, vocab_size=37)
    else:
        model = mc.from_pretrained(path, policy=policy)
    if load is not None:
        engine.checkpoint.load_model(load, model)
    for target, kind in save:
        if kind == "model":
            engine.checkpoint.save_model(target, model)
        else:
            model.save_pretrained(target, format=kind)
    held = [(n, o, t.clone()) for n, o, t in engine.local_slices(model)]
    owned = [(n, o, t.clone()) for n, o, t in engine.local_slices(model, owned=True)]
    whole = {n: toys.whole(t) for n, t in engine.checkpoint.named_tensors(model).items()}
    read = model.load_report.bytes_read if path is not None else 0
    return held, owned, whole, read


def alone(**kwargs):
    return {n: p.detach() for n, p in mc.from_config("tiny/bert", "masked-lm", vocab_size=37).named_parameters()}


@pytest.mark.parametrize(
    ("sizes", "policy"),
    [({"tp_size": 2}, SEQUENCE), ({"tp_size": 2, "cp_size": 2}, {})]
    + [
        pytest.param({"tp_size": 2, "dp_replicate": 2}, SEQUENCE, marks=pytest.mark.full),
        pytest.param({"tp_size": 2}, {}, marks=pytest.mark.full),
        pytest.param({"tp_size": 2, "cp_size": 2}, SEQUENCE, marks=pytest.mark.full),
    ],
)
def test_initial_values_and_slices_do_not_depend_on_the_mesh(four, sizes, policy):
    expected = alone()
    seen = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    for held, owned, whole, _ in four.run(made, sizes, None, policy):
        for name, tensor_ in expected.items():
            assert torch.equal(whole[name], tensor_), name
        for name, offset, part in held:
            box = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            assert torch.equal(expected[name][box], part), name
        for name, offset, part in owned:
            seen[name][tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))] += 1
    assert all(bool((count == 1).all()) for count in seen.values())


def test_checkpoints_and_exports_do_not_depend_on_the_mesh(two, four, tmp_path):
    one = mc.from_config("tiny/bert", "masked-lm", vocab_size=37, seed=9)
    bert.randomize_(one)
    expected = {n: p.detach() for n, p in one.named_parameters()}
    one.save_pretrained(tmp_path / "hf")
    engine.checkpoint.save_model(tmp_path / "one", one)
    total = (tmp_path / "hf" / "model.safetensors").stat().st_size

    def same(results):
        for _, _, whole, _ in results:
            assert whole.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(whole[name], value), name

    tp2, fsdp2_tp2 = {"tp_size": 2}, {"tp_size": 2}
    # One process -> tp2, by the hub's files and by a checkpoint; there written again.
    results = two.run(made, tp2, tmp_path / "hf", None, [(tmp_path / "hf2", "hf"), (tmp_path / "dist2", "distributed")])
    same(results)
    assert all(read < 0.7 * total for *_, read in results)
    same(two.run(made, tp2, None, SEQUENCE, [(tmp_path / "two", "model")], tmp_path / "one"))
    # tp2 -> fsdp2 x tp2 -> one process, and tp2.
    results = four.run(made, fsdp2_tp2, None, None, [(tmp_path / "four", "model")], tmp_path / "two")
    same(results)
    same(two.run(made, tp2, None, None, [], tmp_path / "four"))
    same(four.run(made, fsdp2_tp2, tmp_path / "dist2"))
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "hf2")]
    assert files[0] == files[1]
    back = mc.from_config("tiny/bert", "masked-lm", vocab_size=37)
    engine.checkpoint.load_model(tmp_path / "four", back)
    for name, parameter in back.named_parameters():
        assert torch.equal(parameter, expected[name]), name
