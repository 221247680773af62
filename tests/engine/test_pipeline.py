"""Pipelines against one process: loss, every gradient, clip norm, parameters after 3 steps."""

import itertools

import engine_toys as toys
import parallel_bert as bert
import pytest
import torch
from engine_toys import union
from parallel_bert import FOUR_LAYERS, INTERLEAVED, PP

import engine
import modelcenter as mc
from engine.notes import LEAVES_UNUSED
from engine.testing import Pool
from modelcenter.models.gpt2 import GPT2, GPT2Config
from modelcenter.training import evaluation, metrics

# Other token counts in each step; with two parts of the data, other numbers of microbatches too.
ONE_PART = [[[0, 1, 2]], [[3]], [[4, 2, 1, 0, 3]]]
TWO_PARTS = [[[0, 1], [2]], [[3], [4, 1]], [[2, 0, 1], []]]


@pytest.fixture(scope="module")
def eight():
    with Pool(8, timeout=120) as pool:
        yield pool


def joined(results):
    """What the stages have together; what several ranks have must be equal."""
    found = {key: results[0][key] for key in ("loss", "norm")}
    for other in results:
        assert other["loss"] == found["loss"] and other["norm"] == found["norm"]
    steps = [r["grads"] for r in results]
    found["grads"] = [union([r[i] for r in steps]) for i in range(len(steps[0]))]
    found["params"] = union([r["params"] for r in results])
    return found


def check(pool, task, plan, sizes, policy=None, **fields):
    fields = {**FOUR_LAYERS, **fields}
    expected = bert.train(bert.build(task, **fields), plan)
    results = pool.run(bert.trained, task, plan, sizes, fields, policy)
    assert all(len(r["params"]) < len(expected["params"]) for r in results)
    bert.same(joined(results), expected)


@pytest.mark.parametrize(("task", "sizes"), [("masked-lm", PP), ("pretraining", INTERLEAVED)])
def test_two_stages_train_as_one_process(two, task, sizes):
    check(two, task, ONE_PART, sizes)


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(t, marks=() if t == "question-answering" else pytest.mark.full)
        for t in bert.TASKS
        if t != "masked-lm"
    ],
)
def test_every_head(two, task):
    check(two, task, ONE_PART, PP)


@pytest.mark.parametrize("sizes", [pytest.param(PP, marks=pytest.mark.full), INTERLEAVED], ids=["1f1b", "interleaved"])
def test_an_untied_head(two, sizes):
    check(two, "masked-lm", ONE_PART, sizes, tie_embeddings=False)


# Each schedule and each level with recomputation, and without.
SHARDED = [
    ({**sizes, "zero_level": level}, {"recompute": "full"} if (i // 2 + level) % 2 else {})
    for i, sizes in enumerate((PP, INTERLEAVED, {**INTERLEAVED, "dp_replicate": 2}))
    for level in range(4)
]


@pytest.mark.parametrize(
    ("sizes", "policy"),
    [
        ({**PP, "zero_level": 3}, {}),
        ({**INTERLEAVED, "zero_level": 2, "dp_replicate": 2}, {}),
    ]
    + [pytest.param(*case, marks=pytest.mark.full) for case in SHARDED],
)
def test_with_sharded_parameters(four, sizes, policy):
    check(four, "pretraining", TWO_PARTS, sizes, policy)


@pytest.mark.parametrize(
    ("sizes", "policy"),
    [({**INTERLEAVED, "tp_size": 2}, {"sequence_parallel": True})]
    + [
        pytest.param({**s, **other}, p, marks=pytest.mark.full)
        for s in (PP, INTERLEAVED)
        for other, p in (({"tp_size": 2}, {}), ({"tp_size": 2}, {"sequence_parallel": True}), ({"cp_size": 2}, {}))
        if s == PP or "sequence_parallel" not in p
    ],
)
def test_with_split_layers_and_tokens(four, sizes, policy):
    check(four, "masked-lm", ONE_PART, sizes, policy)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"pp_size": 4}, marks=pytest.mark.full, id="1f1b"),
        pytest.param({"pp_size": 4, "pp_chunks": 2}, id="interleaved"),
    ],
)
def test_four_stages(four, sizes):
    check(four, "masked-lm", ONE_PART, sizes, num_layers=9)


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "policy"),  # test_combinations.py has 1f1b with the first two
    [(INTERLEAVED, {}), (INTERLEAVED, {"sequence_parallel": True})]
    + [(sizes, {"recompute": "selective"}) for sizes in (PP, INTERLEAVED)],
)
def test_in_three_dimensions(eight, sizes, policy):
    check(eight, "pretraining", TWO_PARTS, {**sizes, "tp_size": 2}, policy)


def twice(sizes):
    """Gradients of two calls of accumulate, the first one's with a loss_fn of the caller's."""
    if sizes:
        engine.init_distributed(**sizes)
    model = engine.shard(bert.build("masked-lm", **FOUR_LAYERS))
    batches = [bert.batch("masked-lm", i, model.config) for i in range(4)]
    calls = []

    def loss_fn(output, batch, totals):
        calls.append(totals)
        return output.loss * 2

    first = mc.training.accumulate(model, batches[:3], loss_fn)
    second = mc.training.accumulate(model, batches[3:])
    grads = {n: toys.whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return [first.item(), second.item()], grads, len(calls)


@pytest.mark.parametrize("sizes", [PP, {**INTERLEAVED, "zero_level": 1}], ids=["1f1b", "interleaved"])
def test_gradients_of_several_calls_add_up(two, sizes):
    losses, expected, calls = twice({})
    results = two.run(twice, sizes)
    assert [r[2] for r in results] == [0, calls + sizes.get("pp_chunks", 1) - 1]  # filled up by an empty one
    grads = union([r[1] for r in results])
    assert grads.keys() == expected.keys()
    for result in results:
        assert result[0] == pytest.approx(losses, rel=1e-5)
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def with_some_labels_of_the_second_head(sizes):
    """Gradients of two steps. Of the first, one microbatch has such labels, of the second none."""
    if sizes:
        engine.init_distributed(**sizes)
    model, steps = engine.shard(bert.build("pretraining", **FOUR_LAYERS)), []
    for plan in ([[0], [1, 2]], [[3], [4, 5]]):
        model.zero_grad()
        own = plan[engine.data_rank()] if engine.data_size() > 1 else [*itertools.chain(*plan)]
        batches = [bert.batch("pretraining", i, model.config) for i in own]
        for index, batch in zip(own, batches, strict=True):
            if index != 1:
                del batch["next_sentence_label"]
        mc.training.accumulate(model, batches)
        steps.append({n: None if p.grad is None else toys.whole(p.grad) for n, p in model.named_parameters()})
    return steps


@pytest.mark.parametrize(
    "sizes",
    [{**INTERLEAVED, "zero_level": 3}, pytest.param({**PP, "zero_level": 1}, marks=pytest.mark.full)],
    ids=["interleaved", "1f1b"],
)
def test_microbatches_that_use_different_parameters(four, sizes):
    expected = with_some_labels_of_the_second_head({})
    assert [sum(g is None for g in step.values()) for step in expected] == [0, 4]
    for step, parts in zip(
        expected, zip(*four.run(with_some_labels_of_the_second_head, sizes), strict=True), strict=True
    ):
        grads = {}
        for name, grad in itertools.chain.from_iterable(part.items() for part in parts):
            grads[name] = grad
            torch.testing.assert_close(grad, step[name], rtol=1e-4, atol=1e-5, msg=f"{name}: {grad} and {step[name]}")
        assert grads.keys() == step.keys()


def filled_up(level):
    """Names of parameters without a gradient: a fourth microbatch, which is empty, alone has labels of one head."""
    if level is not None:
        engine.init_distributed(**INTERLEAVED, zero_level=level)
    model = engine.shard(bert.build("pretraining", **FOUR_LAYERS))
    for _ in range(2):
        model.zero_grad()
        batches = [bert.batch("pretraining", i, model.config) for i in range(3)]
        for batch in batches:
            del batch["next_sentence_label"]
        mc.training.accumulate(model, batches)
    return {name for name, parameter in model.named_parameters() if parameter.grad is None}


@pytest.mark.parametrize("level", [1, pytest.param(3, marks=pytest.mark.full)])
def test_what_only_an_empty_microbatch_uses_has_no_gradient(two, level):
    expected = filled_up(None)
    assert len(expected) == 4 and set.union(*two.run(filled_up, level)) == expected


def leaves_unused(level):
    engine.init_distributed(**INTERLEAVED, zero_level=level)
    model = engine.shard(bert.build("pretraining", **FOUR_LAYERS))
    bert.train(model, TWO_PARTS, steps=2)
    return LEAVES_UNUSED.get(model)


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_parts_that_use_nothing_outside_the_units_reduce_nothing_of_it(four, level):
    assert four.run(leaves_unused, level) == [False] * 4


def decoder_step(sizes):
    if sizes:
        engine.init_distributed(**sizes)
    config = GPT2Config(vocab_size=61, hidden_size=24, num_layers=4, num_heads=4, max_positions=64)
    model = engine.shard(bert.randomize_(GPT2(config, "causal-lm"))).eval()
    ids = torch.randint(5, 60, (3, 12), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": part, "labels": part} for part in (ids[:1], ids[:, :7], ids[1:, 3:])]
    loss = mc.training.accumulate(model, batches)
    norm = engine.optim.clip_grad_norm_(model.parameters(), 1e9)
    return loss.item(), norm.item(), {n: toys.whole(p.grad) for n, p in model.named_parameters()}


@pytest.mark.parametrize("sizes", [PP, INTERLEAVED], ids=["1f1b", "interleaved"])
def test_a_decoder(two, sizes):
    loss, norm, expected = decoder_step({})
    results = two.run(decoder_step, sizes)
    grads = union([r[2] for r in results])
    assert grads.keys() == expected.keys()
    for result in results:
        assert result[:2] == pytest.approx((loss, norm), rel=1e-5)
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def drawn():
    engine.init_distributed(pp_size=2, tp_size=2)
    return engine.runtime.stage(), engine.data_rank(), engine.data_size(), torch.rand(3).tolist()


def test_stages_draw_different_numbers_and_have_the_same_data(four):
    (a, *first), (b, *second), (c, *third), (d, *fourth) = four.run(drawn)
    assert (a, b, c, d) == (0, 0, 1, 1)
    assert first == second and third == fourth and first[:2] == third[:2] == [0, 1] and first[2] != third[2]


@pytest.mark.parametrize("precision", ["bf16", pytest.param("bf16-params", marks=pytest.mark.full)])
def test_in_16_bits(two, precision):
    fields, policy = FOUR_LAYERS, {"precision": precision}
    expected = bert.train(bert.build("masked-lm", **fields), ONE_PART)
    found = joined(two.run(bert.trained, "masked-lm", ONE_PART, PP, fields, policy))
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.03)
    assert found["loss"] != pytest.approx(expected["loss"], rel=1e-6)
    assert found["norm"] == pytest.approx(expected["norm"], rel=0.15)
    kept = torch.bfloat16 if precision == "bf16-params" else torch.float32
    assert {p.dtype for p in found["params"].values()} == {kept}


def gradients_in_16_bits(sizes):
    engine.init_distributed(**sizes)
    config = GPT2Config(vocab_size=61, hidden_size=24, num_layers=4, num_heads=4, max_positions=64)
    model = bert.randomize_(GPT2(config, "causal-lm"))
    model = engine.shard(model, policy=engine.Policy(precision="bf16-params")).eval()
    ids = torch.randint(5, 60, (1, 12), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        mc.training.accumulate(model, [{"input_ids": ids, "labels": ids}] * 20)
    return {n: toys.whole(p.grad) for n, p in model.named_parameters()}


@pytest.mark.full
def test_gradients_in_16_bits_do_not_depend_on_the_level(two):
    """Reduced once a step, or at each of 20 microbatches."""
    once, each = (union(two.run(gradients_in_16_bits, {**PP, "zero_level": level})) for level in (1, 3))
    assert once.keys() == each.keys()
    for name, gradient in once.items():
        assert torch.equal(gradient, each[name]), name


# -- values in and out -------------------------------------------------------------------------------------------------


def made(sizes, path=None, save=(), load=None):
    """A model of these ranks, made, loaded by name or from a checkpoint; what it holds, and what it read."""
    engine.init_distributed(**sizes)
    if path is None:
        model = mc.from_config("tiny/bert", "masked-lm", num_layers=5, vocab_size=37)
    else:
        model = mc.from_pretrained(path)
    if load is not None:
        engine.checkpoint.load_model(load, model)
    for target, kind in save:
        if kind == "model":
            engine.checkpoint.save_model(target, model)
        elif kind == "pt":
            engine.save(model, target)
        else:
            model.save_pretrained(target, format=kind)
    owned = [(n, o, t.clone()) for n, o, t in engine.local_slices(model, owned=True)]
    whole = {n: toys.whole(t) for n, t in engine.checkpoint.named_tensors(model).items()}
    read = model.load_report.bytes_read if path is not None else 0
    assert f"stage {engine.runtime.stage()} of {engine.runtime.stages()}" in engine.describe(model, show=False).title
    return owned, whole, read, model.num_parameters(), engine.inspect.inspect_model(model, "*embed*")


@pytest.mark.parametrize(
    "sizes",
    [{"pp_size": 4}, {**INTERLEAVED, "tp_size": 2}, pytest.param({**PP, "dp_replicate": 2}, marks=pytest.mark.full)],
)
def test_initial_values_and_slices_do_not_depend_on_the_mesh(four, sizes):
    one = mc.from_config("tiny/bert", "masked-lm", num_layers=5, vocab_size=37)
    expected = {n: p.detach() for n, p in one.named_parameters()}
    seen = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    results = four.run(made, sizes)
    for name, tensor in union([whole for _, whole, *_ in results]).items():
        assert torch.equal(expected[name], tensor), name
    summary = engine.inspect.inspect_model(one, "*embed*")
    for owned, _, _, parameters, inspected in results:
        assert parameters == one.num_parameters()
        for mine, theirs in zip(inspected, summary, strict=True):
            assert mine["name"] == theirs["name"] and mine["std"] == pytest.approx(theirs["std"], rel=1e-5)
        for name, offset, part in owned:
            seen[name][tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))] += 1
    assert all(bool((count == 1).all()) for count in seen.values())


def test_checkpoints_and_exports_do_not_depend_on_the_mesh(two, four, tmp_path):
    one = bert.randomize_(mc.from_config("tiny/bert", "masked-lm", num_layers=5, vocab_size=37))
    expected = {n: p.detach() for n, p in one.named_parameters()}
    one.save_pretrained(tmp_path / "hf")
    engine.checkpoint.save_model(tmp_path / "one", one)
    total = (tmp_path / "hf" / "model.safetensors").stat().st_size

    def same(results):
        whole = union([whole for _, whole, *_ in results])
        assert whole.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(whole[name], value), name
        return results

    # One process -> two stages, by the hub's files and by a checkpoint; there written again.
    files = [(tmp_path / f"{kind}2", kind) for kind in ("hf", "distributed", "pt")]
    results = same(two.run(made, PP, tmp_path / "hf", files))
    assert all(read < 0.7 * total for _, _, read, *_ in results)
    same(two.run(made, INTERLEAVED, None, [(tmp_path / "two", "model")], tmp_path / "one"))
    # Two stages -> two stages of two ranks -> one process.
    same(four.run(made, {**PP, "tp_size": 2}, None, [(tmp_path / "four", "model")], tmp_path / "two"))
    same(four.run(made, {"pp_size": 4}, tmp_path / "distributed2", [(tmp_path / "hf4", "hf")]))
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "hf2", "hf4")]
    assert written[0] == written[1] == written[2]
    back = mc.from_config("tiny/bert", "masked-lm", num_layers=5, vocab_size=37)
    engine.checkpoint.load_model(tmp_path / "four", back)
    stored = torch.load(tmp_path / "pt2")
    assert set(stored) == set(expected)
    for name, parameter in back.named_parameters():
        assert torch.equal(parameter, expected[name]) and torch.equal(stored[name], expected[name]), name


def continued(sizes, steps, save=None, load=None):
    """Train these steps, from and to a checkpoint; the losses and parameters."""
    if sizes:
        engine.init_distributed(**sizes)
    model = engine.shard(bert.build("masked-lm", **FOUR_LAYERS))
    manager = engine.optim.OptimManager(loss_scale=8.0)
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) is wide]} for wide in (True, False)]
    manager.add_optimizer(engine.optim.AdamOptimizer(groups, lr=1e-2, eps=1e-4))
    if load is not None:
        engine.load_checkpoint(load, model, manager)
    losses = []
    for step in steps:
        manager.zero_grad()
        batches = [bert.batch("masked-lm", i, model.config) for i in ONE_PART[step][0]]
        losses.append(mc.training.accumulate(model, batches, backward=manager.backward).item())
        manager.clip_grad_norm(manager.optimizers[0].param_groups, 0.5)
        manager.step()
    if save is not None:
        engine.save_checkpoint(save, model, manager)
    return losses, {n: toys.whole(p) for n, p in model.named_parameters()}


def sharded_at_the_second_try():
    engine.init_distributed(**PP)
    model = bert.build("masked-lm", **FOUR_LAYERS)
    hook = model.head.bias.register_post_accumulate_grad_hook(lambda parameter: None)  # of the last stage
    with pytest.raises(ValueError, match="parameter head.bias has a hook on its gradient"):
        engine.shard(model)
    hook.remove()
    return bert.train(engine.shard(model), ONE_PART), model.num_parameters()


def test_a_model_that_was_refused_is_whole(two):
    model = bert.build("masked-lm", **FOUR_LAYERS)
    results = two.run(sharded_at_the_second_try)
    assert [elements for _, elements in results] == [model.num_parameters()] * 2
    bert.same(joined([found for found, _ in results]), bert.train(model, ONE_PART))


def clipped_apart():
    """Only one of two optimizers is clipped, and the other has no parameters on one of the stages."""
    engine.init_distributed(**PP)
    model = engine.shard(bert.build("masked-lm", **FOUR_LAYERS))
    embeddings = [p for n, p in model.named_parameters() if n.startswith("position")]
    rest = [p for n, p in model.named_parameters() if not n.startswith("position")]
    manager = engine.optim.OptimManager()
    for params in (rest, embeddings):
        manager.add_optimizer(engine.optim.AdamOptimizer([{"params": params}], lr=1e-2))
    mc.training.accumulate(model, [bert.batch("masked-lm", 0, model.config)])
    manager.clip_grad_norm(manager.optimizers[0].param_groups, 0.5)
    manager.step()
    return len(embeddings), engine.sum_loss(torch.tensor(1.0)).item()  # the next collective of both


def test_an_optimizer_may_have_no_parameters_on_a_stage(two):
    assert two.run(clipped_apart) == [(1, 1.0), (0, 1.0)]


def test_training_goes_on_with_other_stages(two, tmp_path):
    losses, expected = continued({}, range(3))
    continued({}, range(2), save=tmp_path / "one")
    for load, save, sizes in ((None, "two", PP), ("two", None, INTERLEAVED), ("one", None, PP)):
        steps = range(2) if load is None else range(2, 3)
        load, save = load and tmp_path / load, save and tmp_path / save
        results = two.run(continued, sizes, steps, save, load)
        assert results[0][0] == results[1][0] == pytest.approx([losses[step] for step in steps], rel=1e-5)
    found = continued({}, range(2, 3), load=tmp_path / "two")
    for params in (union([r[1] for r in results]), found[1]):
        assert params.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value, rtol=2e-5, atol=2e-5)


def evaluated(sizes):
    if sizes:
        engine.init_distributed(**sizes)
    model = engine.shard(bert.build("sequence-classification", **FOUR_LAYERS))
    batches = [bert.batch(model.task, i, model.config) for i in (0, 1, 2)[engine.data_rank() :: engine.data_size()]]
    scores = metrics.SingleLabel(5)
    result = mc.training.evaluate(model, batches, scores)
    where = range(0, 30, 10)[engine.data_rank() :: engine.data_size()]
    places = [torch.arange(len(b["labels"])) + at for at, b in zip(where, batches, strict=True)]
    return result, evaluation.logits_of(model, batches, places, 30, 5), model.training


@pytest.mark.parametrize("sizes", [{**PP, "tp_size": 2}, INTERLEAVED, {"tp_size": 2}], ids=["tp", "interleaved", "no"])
def test_evaluation(four, sizes):
    expected, logits, _ = evaluated({})
    for result, found, training in four.run(evaluated, sizes):
        assert result == pytest.approx(expected, rel=1e-5) and training
        torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
