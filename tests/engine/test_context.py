"""Context parallelism against one process: ragged packed and padded rows, both forms of attention, every head."""

import functools

import engine_toys as toys
import parallel_bert as bert
import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import engine
from engine.parallel import context, functional, rng
from modelcenter.layers import capped_attention
from modelcenter.layers.mask import Mask
from modelcenter.layers.packed_attention import packed_attention
from modelcenter.layers.packing import Packed

# Two ranks divide four heads, which they exchange for tokens; with three heads they gather keys and values.


def check(pool, task, plan, sizes, heads, policy=None):
    fields = {"num_heads": heads}
    expected = bert.train(bert.build(task, **fields), plan)
    for found in pool.run(bert.trained, task, plan, sizes, fields, policy):
        bert.same(found, expected)


FAST = [(t, 4) for t in ("pretraining", "multiple-choice")] + [("masked-lm", 3)]
OTHERS = [(t, heads) for t in bert.TASKS for heads in (4, 3) if (t, heads) not in FAST]


@pytest.mark.parametrize(("task", "heads"), FAST + [pytest.param(*c, marks=pytest.mark.full) for c in OTHERS])
def test_two_ranks_train_bert_as_one_process(two, task, heads):
    check(two, task, bert.TWO_PLAN, {"cp_size": 2}, heads)


# Each head and each level once; test_combinations.py has every level with context parallelism.
LEVELS = list(zip(bert.TASKS, (4, 3, 4, 3, 4, 3), (1, 3, 0, 2, 3, 2), strict=True))


@pytest.mark.parametrize(
    ("task", "heads", "level"),
    [pytest.param(*case, marks=() if case[0] == "pretraining" else pytest.mark.full) for case in LEVELS],
)
def test_with_sharded_parameters(four, task, heads, level):
    check(four, task, bert.FOUR_PLAN, {"cp_size": 2, "zero_level": level}, heads)


def gated(sizes):
    """Trained by the engine; and the gradient in a loop of one's own."""
    if sizes:
        engine.init_distributed(**sizes)
    model = bert.build("masked-lm")
    model.gate = torch.nn.Parameter(torch.tensor(1.5))
    model.units[0].register_forward_hook(lambda unit, args, output: output * model.gate)
    engine.shard(model)(**bert.batch("masked-lm", 0, model.config)).loss.backward()
    own = model.gate.grad.item()
    return bert.train(model, bert.TWO_PLAN), own


def test_a_single_number(two):
    expected, own = gated({})
    for found, of_rank in two.run(gated, {"cp_size": 2}):
        bert.same(found, expected)
        assert of_rank == pytest.approx(own, rel=1e-4)


SPLIT = ("question-answering", True)


@pytest.mark.parametrize(
    ("task", "sequence"),
    [pytest.param(t, s, marks=pytest.mark.full) for t in bert.TASKS for s in (True, False) if (t, s) != SPLIT]
    + [SPLIT],
)
def test_with_split_layers(four, task, sequence):
    check(four, task, bert.TWO_PLAN, {"cp_size": 2, "tp_size": 2}, 4, {"sequence_parallel": sequence})


@pytest.mark.parametrize("heads", [pytest.param(4, marks=pytest.mark.full), 6])
def test_four_ranks_share_the_tokens(four, heads):
    check(four, "pretraining", bert.TWO_PLAN, {"cp_size": 4}, heads)


# -- attention alone --------------------------------------------------------------------------------------------------

KINDS = ("plain", "causal", "window", "near", "bias", "causal bias", "cross", "grouped", "capped", "capped cross")


def problem(lengths, heads, kind):
    """Sequences, those they attend to, and q, k, v, bias, gradient of the output."""
    rng = torch.Generator().manual_seed(sum(lengths))
    keys = [n and 1 + (3 * n) % 7 for n in lengths] if "cross" in kind else list(lengths)
    of_keys = heads // 2 if kind in ("grouped", "capped") else heads
    shapes = [(sum(lengths), heads * 4), (sum(keys), of_keys * 4), (sum(keys), of_keys * 4), (sum(lengths), heads * 4)]
    q, k, v, grad = (torch.randn(shape, generator=rng) for shape in shapes)
    bias = torch.randn(heads, 2 * max(lengths) + 3, generator=rng) if "bias" in kind else None
    return keys, of_keys, (q, k, v), bias, grad


def attended(lengths, heads, kind, split=None):
    keys, of_keys, parts, bias, grad = problem(lengths, heads, kind)
    packed, memory = (
        Packed.from_cu_seqlens(torch.tensor([0, *n]).cumsum(0).int(), None, sum(n)) for n in (lengths, keys)
    )
    q, k, v = parts
    if split is not None:
        packed, memory = packed.split_over(split), memory.split_over(split)

        def own(x, ctx):
            return split.local(torch.cat([x, x.new_ones(ctx.sequences.dummy, x.shape[1])]))

        q, k, v = own(q, packed), own(k, memory), own(v, memory)
        grad = torch.cat([grad, grad.new_zeros(packed.sequences.dummy, grad.shape[1])]).chunk(split.size)[split.rank]
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    bias = None if bias is None else bias.requires_grad_()
    window = 3 if kind in ("window", "near", "capped") else None
    mask = Mask("causal" in kind or kind in ("window", "grouped"), window, bias)
    among, cap = memory.sequences if "cross" in kind else None, 0.7 if "capped" in kind else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capped_attention, "_KEPT", 40)  # as if sequences were long: of some queries at a time
        out = packed_attention(q, k, v, packed, heads, kv_heads=of_keys, mask=mask, memory=among, cap=cap)
        out.backward(grad)
    found = [packed.gather(out), packed.gather(q.grad), memory.gather(k.grad), memory.gather(v.grad)]
    if bias is not None:
        found.append(bias.grad if split is None else split.sum(bias.grad))
    return [x.detach() for x in found]


def attend(lengths, heads, kind):
    engine.init_distributed(cp_size=engine.world_size())
    return attended(lengths, heads, kind, context.TokenSplit(engine.parallel.mesh.device_mesh()))


LENGTHS = [(13,), (1, 1, 1), (4, 4, 4, 4), (2, 0, 9, 0), (3, 5, 1, 1, 7, 2), (0, 21, 0)]


def attend_all(heads, kind):
    return [attend(lengths, heads, kind) for lengths in LENGTHS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [8, 6], ids=["exchanged", "gathered"])
def test_attention_of_any_lengths(four, heads, kind):
    for of_rank in four.run(attend_all, heads, kind):
        for lengths, found in zip(LENGTHS, of_rank, strict=True):
            for mine, theirs in zip(found, attended(lengths, heads, kind), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=lambda m, n=lengths: f"{n}: {m}")


def outputs(task, index, sizes, policy):
    engine.init_distributed(**sizes)
    model = engine.shard(bert.build(task), policy=engine.Policy(**policy)).eval()
    with torch.no_grad():
        out = model(**bert.batch(task, index, model.config), output_hidden_states=True)
    return {name: x for name, x in out.items() if isinstance(x, torch.Tensor)} | {"states": out.hidden_states}


@pytest.mark.parametrize("index", [0, 1, 3], ids=["packed", "right", "left"])
@pytest.mark.parametrize("task", ["masked-lm", "question-answering", "token-classification", "sequence-classification"])
def test_outputs_are_whole_on_every_rank(two, task, index):
    model = bert.build(task).eval()
    expected = model(**bert.batch(task, index, model.config), output_hidden_states=True)
    for found in two.run(outputs, task, index, {"cp_size": 2}, {}):
        states = found.pop("states")
        assert found.keys() == {name for name in expected if name != "hidden_states"}
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(states, expected.hidden_states, strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-5)


# -- dropout and recomputation ----------------------------------------------------------------------------------------


def masks(task, heads):
    engine.init_distributed(cp_size=2, seed=3)
    with bert.noted_masks() as drawn:
        model = engine.shard(bert.build(task, dropout=0.3, attention_dropout=0.4, num_heads=heads))
        loss = model(**bert.batch(task, 0, model.config)).loss.item()
    return drawn, loss, torch.rand(4), rng.rng_streams.depth()


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification"])
def test_dropout_repeats_nowhere_but_where_all_ranks_compute_the_same(two, task):
    (a, loss, after, depth), (b, other, after_b, _) = two.run(masks, task, 4)
    assert loss == other and torch.equal(after, after_b) and depth == 0
    equal = [torch.equal(x, y) for x, y in zip(a, b, strict=True) if x.shape == y.shape and x.numel() > 30]
    assert len(equal) > 4
    # The classifier's own, over one row for each sequence, is the last.
    assert equal[-1] == (task == "sequence-classification") and not any(equal[:-1])


def gradients(sizes, policy, recompute):
    engine.init_distributed(**sizes, seed=1)
    model = bert.build("token-classification", dropout=0.2, attention_dropout=0.3)
    if recompute:
        for layer in model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    model = engine.shard(model, policy=engine.Policy(**policy))
    with set_checkpoint_early_stop(False):
        model(**bert.batch(model.task, 0, model.config)).loss.backward()
    return {n: toys.whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}, torch.rand(3)


@pytest.mark.parametrize(
    ("sizes", "policy"),
    [({"tp_size": 2}, {}), ({"tp_size": 2}, {"sequence_parallel": True}), ({"cp_size": 2}, {})],
    ids=["tp", "sp", "cp"],
)
def test_recomputed_blocks_repeat_their_dropout(two, sizes, policy):
    kept, recomputed = two.run(gradients, sizes, policy, False), two.run(gradients, sizes, policy, True)
    for (mine, after), (theirs, after_theirs) in zip(recomputed, kept, strict=True):
        assert torch.equal(after, after_theirs)
        for name, grad in theirs.items():
            torch.testing.assert_close(mine[name], grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


# -- errors, and what the comparison notices --------------------------------------------------------------------------


def refused():
    engine.init_distributed(cp_size=2)
    try:
        engine.shard(toys.build())
    except ValueError as error:
        return str(error)


def test_a_model_that_cannot_split_its_tokens_is_refused(two):
    for message in two.run(refused):
        assert "cp_size is 2" in message and "Toy has no attribute token_split" in message


def mutated(mutation, heads):
    split = context.TokenSplit
    kept = {name: getattr(split, name) for name in ("sum", "local", "to_tokens")}
    gather_rows = functional.gather_rows
    if mutation == "the loss is this rank's part":
        split.sum = lambda self, x: x
    elif mutation == "gradients of keys and values are not summed":
        functional.gather_rows = functional.join_rows
    elif mutation == "ranks take each other's tokens":
        split.local = lambda self, x: x.chunk(self.size)[1 - self.rank]
    elif mutation == "heads come back to the wrong ranks":
        split.to_tokens = lambda self, x: (
            functional.all_to_all(x.unflatten(0, (self.size, -1)).flip(0), self._group).movedim(0, 1).flatten(1)
        )
    try:
        return bert.trained("masked-lm", bert.TWO_PLAN, {"cp_size": 2}, {"num_heads": heads})
    finally:
        functional.gather_rows = gather_rows
        for name, value in kept.items():
            setattr(split, name, value)


@pytest.mark.parametrize(
    ("mutation", "heads"),
    [
        ("the loss is this rank's part", 4),
        ("gradients of keys and values are not summed", 3),
        ("ranks take each other's tokens", 3),
        ("heads come back to the wrong ranks", 4),
    ],
)
def test_a_mutation_is_noticed(two, mutation, heads):
    expected = bert.train(bert.build("masked-lm", num_heads=heads), bert.TWO_PLAN)
    for found in two.run(mutated, mutation, heads):
        with pytest.raises(AssertionError):
            bert.same(found, expected)
