"""Tensor and sequence parallelism against one process: loss, every gradient, clip norm, parameters after 3 steps."""

import copy
import logging

import engine_toys as toys
import parallel_bert as bert
import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engine
from engine import torch_compat
from engine.loss.vocabulary import VocabularyShard
from engine.parallel import functional, mesh, rng, tensor, tensor_layers
from engine.parallel.inputs import digest
from engine.tensors import whole_of
from engine.testing import Pool, fake_ranks, run

SEQUENCE = {"sequence_parallel": True}


@pytest.fixture(scope="module")
def two():
    with Pool(2, timeout=20) as pool:
        yield pool


def check(pool, task, plan, sizes, fields=None, policy=None):
    expected = bert.train(bert.build(task, **fields or {}), plan)
    for found in pool.run(bert.trained, task, plan, sizes, fields or {}, policy):
        bert.same(found, expected)


FAST = [(t, {}) for t in ("pretraining", "multiple-choice")]
FAST += [(t, SEQUENCE) for t in ("masked-lm", "sequence-classification")]
FAST += [("masked-lm", {"recompute": "selective"})]  # keeps outputs of products, which a sum must not overwrite
OTHERS = [(t, policy) for t in bert.TASKS for policy in ({}, SEQUENCE) if (t, policy) not in FAST]


@pytest.mark.parametrize(("task", "policy"), FAST + [pytest.param(*c, marks=pytest.mark.full) for c in OTHERS])
def test_two_ranks_train_bert_as_one_process(two, task, policy):
    check(two, task, bert.TWO_PLAN, {"tp_size": 2}, policy=policy)


@pytest.mark.parametrize(
    ("task", "policy"),
    [("pretraining", {})]
    + [
        pytest.param(t, p, marks=pytest.mark.full)
        for t in bert.TASKS
        for p in (SEQUENCE, {})
        if (t, p) != ("pretraining", {})
    ],
)
def test_with_sharded_parameters(four, task, policy):
    check(four, task, bert.FOUR_PLAN, {"tp_size": 2}, policy=policy)


@pytest.mark.parametrize(
    ("level", "policy"),
    [(0, SEQUENCE), *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, {}), (1, SEQUENCE)))],
)
def test_with_each_zero_level(four, level, policy):
    check(four, "masked-lm", bert.FOUR_PLAN, {"tp_size": 2, "zero_level": level}, policy=policy)


@pytest.mark.full
def test_with_copies_of_sharded_parameters(four):
    check(four, "masked-lm", bert.FOUR_PLAN, {"tp_size": 2, "dp_replicate": 2}, policy=SEQUENCE)


def test_uneven_parts_and_an_untied_head(four):
    fields = {"tie_embeddings": False, "vocab_size": 39, "intermediate_size": 7}
    check(four, "masked-lm", bert.TWO_PLAN, {"tp_size": 4}, fields)


def test_the_input_of_several_layers_is_made_whole_once():
    made, once = [], tensor_layers.CollectiveCache()

    def whole(x, group):
        made.append(x)
        return x.clone()

    for context in (torch.enable_grad, torch.inference_mode):
        with context():
            x, between = torch.ones(2), torch.zeros(2)  # low-rank updates take others in between
            first = once(whole, x, None)
            once(whole, between, None)
            assert once(whole, x, None) is first and len(made) == 2
        once.forget()
        assert once(whole, x, None) is not first
        made.clear()
        once.forget()
    y = torch.ones(2)
    first = once(whole, y, None)
    assert once(whole, y.add_(1), None) is not first


def test_inputs_that_no_layer_ends_are_not_held_for_ever():
    once = tensor_layers.CollectiveCache()
    for _ in range(20):
        x = torch.ones(1)
        assert once(lambda x, group: x.clone(), x, None) is once(None, x, None)
    assert len(once._results) <= 8


def looked_up_in_a_split_table():
    engine.init_distributed(tp_size=2)
    table = engine.shard(torch.nn.Sequential(torch.nn.Embedding(6, 4)), tp_plan={"0": "vocab"})
    for outside in (6, -1):
        with pytest.raises(IndexError, match="the table has 6 rows"):
            table(torch.tensor([[outside]]))
    return tuple(table(torch.tensor([[5]])).shape), tuple(table(torch.empty(0, 1, dtype=torch.int64)).shape)


@pytest.mark.full
def test_numbers_outside_of_a_split_table_are_refused(two):
    assert two.run(looked_up_in_a_split_table) == [((1, 1, 4), (0, 1, 4))] * 2


def padded_table(padding):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(6, 4, padding_idx=padding))


def gradient_of_a_padded_table(padding):
    engine.init_distributed(tp_size=2)
    table = engine.shard(padded_table(padding), tp_plan={"0": "vocab"})
    out = table(torch.arange(6).repeat(2))
    (out + 1).square().sum().backward()
    return out.detach(), toys.whole(table[0].weight.grad)


@pytest.mark.parametrize("padding", [0, 4])
def test_the_row_of_padding_of_a_split_table_is_not_trained(two, padding):
    table = padded_table(padding)
    out = table(torch.arange(6).repeat(2))
    (out + 1).square().sum().backward()
    for found, gradient in two.run(gradient_of_a_padded_table, padding):
        assert torch.equal(found, out)
        torch.testing.assert_close(gradient, table[0].weight.grad)


def test_a_device_refuses_what_is_asserted_on_it():
    torch_compat.assert_on_device(torch.tensor(True), "numbers of another table")
    with pytest.raises(RuntimeError, match="numbers of another table"):
        torch_compat.assert_on_device(torch.tensor(False), "numbers of another table")


def in_inference_mode():
    engine.init_distributed(tp_size=2)
    model = engine.shard(bert.build("masked-lm")).eval()
    batch = bert.batch("masked-lm", 0, model.config)
    with torch.inference_mode():
        found = model(**batch).loss.item()
    return found, model(**batch).loss.item()


def test_inference_mode(two):
    for found, expected in two.run(in_inference_mode):
        assert found == expected


def test_modules_of_parts_may_have_no_bias():
    model = torch.nn.Sequential(torch.nn.LayerNorm(6, bias=False), torch.nn.Linear(6, 4, bias=False))
    with fake_ranks(2):
        engine.init_distributed(tp_size=2)
        engine.shard(model, tp_plan={"0": "partial", "1": "colwise_gather"})
        assert model[0].bias is model[1].bias is None
        assert model[0].weight.shape == (6,) and model[1].weight.to_local().shape == (2, 6)


def drawn_in_streams(seed, rank):
    """(what two streams of a rank draw one after the other, what is drawn after each)."""
    torch.manual_seed(seed)
    streams, inside, outside = rng.RngStreams(), [], []
    for _ in range(2):
        streams.enter("tp", rank)
        inside.append(torch.rand(()).item())
        streams.leave("cp")  # of another kind
        assert streams.depth() == 1
        streams.leave("tp")
        outside.append(torch.rand(()).item())
    return inside, outside


def test_streams_of_ranks_follow_from_the_one_around():
    (a, outside), (b, same), (c, other) = (drawn_in_streams(*case) for case in ((0, 0), (0, 1), (1, 0)))
    assert outside == same != other and len({*a, *b, *c, *outside}) == 8
    assert drawn_in_streams(0, 1) == (b, outside)


def test_at_level_0_every_rank_but_those_of_layers_has_a_copy():
    with fake_ranks(32):
        engine.init_distributed(zero_level=0, dp_replicate=2, cp_size=2, tp_size=2)
        sizes = [tuple(mesh.storage_mesh(mesh.device_mesh(), level).shape) for level in (0, 3)]
        assert sizes == [(1, 16, 1, 1, 2), (1, 2, 8, 1, 2)]


def test_layers_that_split_themselves_are_found_once(monkeypatch):
    found = []
    monkeypatch.setattr(tensor, "_self_split", lambda model: found.append(1) or {id(p) for p in model.parameters()})
    assert tensor.find_plan(toys.build(), None) == {} and len(found) == 1


# -- what a rank computes ---------------------------------------------------------------------------------------------


def outputs(sizes, policy, task="masked-lm"):
    engine.init_distributed(**sizes)
    model = engine.shard(bert.build(task), policy=engine.Policy(**policy)).eval()
    with torch.no_grad():
        out = model(**bert.batch(task, 1, model.config), output_hidden_states=True)
    return out.loss, out.logits, *out.hidden_states


@pytest.mark.parametrize("policy", [{}, SEQUENCE], ids=["tp", "sp"])
def test_outputs_are_whole_on_every_rank(two, policy):
    model = bert.build("masked-lm").eval()
    out = model(**bert.batch("masked-lm", 1, model.config), output_hidden_states=True)
    for found in two.run(outputs, {"tp_size": 2}, policy):
        for mine, theirs in zip(found, (out.loss, out.logits, *out.hidden_states), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-5)


class Operators(TorchDispatchMode):
    """Notes the operators that are given a DTensor, and the collectives."""

    def __init__(self):
        super().__init__()
        self.dispatched, self.collectives = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.collectives.append(func.__name__)
        elif any(isinstance(x, DTensor) for x in tree_leaves((args, kwargs))):
            self.dispatched.add(func.__name__)
        return func(*args, **kwargs or {})


def operators(policy):
    engine.init_distributed(tp_size=2)
    model = engine.shard(bert.build("sequence-classification"), policy=engine.Policy(**policy))
    batch = bert.batch(model.task, 0, model.config)
    with Operators() as seen:
        model(**batch).loss.backward()
    local = model.layers[0].attn.q.weight.to_local()
    return seen.dispatched, [name for name in seen.collectives if "reduce" in name or "alltoall" in name], local.shape


def test_layers_compute_on_local_tensors(two):
    for dispatched, collectives, shape in two.run(operators, {}):
        assert shape == (12, 24)
        assert dispatched <= {"detach.default", "split.Tensor", "view.default"}, dispatched
        # One in forward and one in backward for each of 2 x (attention, mlp): q, k and v share theirs. The embedding's
        # is the ninth; the rest are FSDP's, which has nothing to sum over one rank.
        assert sum("allreduce" in name for name in collectives) == 9, collectives


# -- dropout ----------------------------------------------------------------------------------------------------------


def given_gradients():
    """What gradients that were handed to sums over the ranks are afterwards; and those that come out."""
    engine.init_distributed(tp_size=2)
    group, found = mesh.device_mesh()["tp"].get_group(), []
    for collective in (functional.copy_to, functional.sum_over):
        x, gradient = torch.ones(3, requires_grad=True), torch.ones(3)
        collective(x, group).backward(gradient)
        found.append((gradient.tolist(), x.grad.tolist()))
    return found


def test_sums_leave_gradients_that_others_hold(two):
    assert two.run(given_gradients) == [[([1.0] * 3, [2.0] * 3)] * 2] * 2


def masks(sizes, policy, task):
    """Dropout masks of two forwards, told apart by their number of dimensions; and the losses."""
    engine.init_distributed(**sizes, seed=3)
    with bert.noted_masks() as drawn:
        model = bert.build(task, dropout=0.3, attention_dropout=0.4)
        model = engine.shard(model, policy=engine.Policy(**policy))
        batch = bert.batch(task, 0, model.config)
        losses = [model(**batch).loss.item() for _ in range(2)]
    after = torch.rand(4)
    assert rng.rng_streams.depth() == 0
    return drawn, losses, after


def test_dropout_repeats_on_replicated_activations_and_nowhere_else(two):
    (a, losses, after), (b, other, after_b) = two.run(masks, {"tp_size": 2}, {}, "sequence-classification")
    assert losses == other and losses[0] != losses[1] and torch.equal(after, after_b)
    assert {mask.dim() for mask in a} == {2, 3}
    for mine, theirs in zip(a, b, strict=True):
        assert torch.equal(mine, theirs) == (mine.dim() == 2)
    # The two forwards, and the layers of one, differ too.
    attention = [mask for mask in a if mask.dim() == 3]
    assert not any(torch.equal(x, y) for i, x in enumerate(attention) for y in attention[:i] if x.shape == y.shape)


def test_dropout_differs_on_rows_that_are_split(two):
    (a, losses, _), (b, other, _) = two.run(masks, {"tp_size": 2}, SEQUENCE, "sequence-classification")
    assert losses == other
    hidden = [(x, y) for x, y in zip(a, b, strict=True) if x.dim() == 2]
    tokens = hidden[0][0].shape[0]
    for x, y in hidden:  # whole at the embedding and the head
        assert torch.equal(x, y) == (x.shape[0] in (tokens, 6))


@pytest.mark.parametrize("policy", [{}, SEQUENCE], ids=["tp", "sp"])
def test_bf16_computes_in_16_bits_and_keeps_parameters_in_fp32(two, policy):
    expected = bert.train(bert.build("masked-lm"), bert.TWO_PLAN)
    for found in two.run(bert.trained, "masked-lm", bert.TWO_PLAN, {"tp_size": 2}, {}, {"precision": "bf16", **policy}):
        assert found["loss"] == pytest.approx(expected["loss"], rel=0.02)
        assert found["loss"] != pytest.approx(expected["loss"], rel=1e-6)
        assert found["norm"] == pytest.approx(expected["norm"], rel=0.1)
        assert all(p.dtype == torch.float32 for p in found["params"].values())


def gathered():
    engine.init_distributed(tp_size=2)
    rank = engine.data_rank()
    return rank, engine.data_size(), engine.gather_result(torch.arange(2 + rank) + 10 * rank).tolist()


def test_results_come_once_from_ranks_that_compute_together(four):
    assert four.run(gathered) == [(rank, 2, [0, 1, 10, 11, 12]) for rank in (0, 0, 1, 1)]


# -- errors -----------------------------------------------------------------------------------------------------------


def refused(what):
    try:
        if what == "world":
            engine.init_distributed(tp_size=3)
        elif what == "sizes":
            engine.init_distributed(tp_size=2, cp_size=2)
        elif what == "zero":
            engine.init_distributed(tp_size=0)
        else:
            engine.init_distributed(tp_size=2)
        if what == "heads":
            engine.shard(bert.build("masked-lm", num_heads=3))
        if what == "hf-heads":
            config = transformers.LlamaConfig(**{**toys.LLAMA, "num_key_value_heads": 1})
            engine.shard(transformers.LlamaForCausalLM(config))
        if what == "no plan":
            engine.shard(toys.build())
        if what == "style":
            engine.shard(toys.build(), tp_plan={"embed": "diagonal"})
        if what == "name":
            engine.shard(toys.build(), tp_plan={"layer.*.up": "colwise"})
        if what == "kind":
            engine.shard(toys.build(), tp_plan={"layers.*.norm": "rowwise"})
        if what == "norm":
            engine.shard(toys.build(), tp_plan={"layers.*.norm": "norm"})
        if what == "sequence":
            engine.shard(toys.build(), tp_plan=toys.TP_PLAN, policy=engine.Policy(sequence_parallel=True))
        if what in ("too large", "negative"):
            model = engine.shard(bert.build("masked-lm"))
            model(input_ids=torch.full((1, 3), 10**6 if what == "too large" else -1))
        if what in ("inputs", "shapes"):
            model = engine.shard(bert.build("masked-lm"))
            model(input_ids=torch.full((1, 3 + (what == "shapes") * engine.rank()), 1 + engine.rank()))
        if what == "microbatches":
            model = engine.shard(bert.build("masked-lm"))
            plan = [[0]] if engine.rank() else [[0, 1]]
            forward = lambda b, totals: model(**b, loss_counts=totals).loss  # noqa: E731
            batches = [bert.batch(model.task, i, model.config) for i in plan[0]]
            engine.accumulate(model, batches, forward, model.loss_counts, model.empty_batch)
    except ValueError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("world", "tp_size is 3 but there are 2 ranks: it must divide them"),
        ("sizes", "tp_size * cp_size is 4 but there are 2 ranks: it must divide them"),
        ("zero", "tp_size is 0, expected a whole number of at least 1"),
        ("heads", "layers.0.attn has num_heads=3, which tp_size=2 does not divide"),
        ("hf-heads", "model.layers.0.self_attn has num_key_value_heads=1, which tp_size=2 does not divide"),
        ("no plan", "Toy does not define how it is split: give it a tp_plan()"),
        ("style", "tp_plan has the style 'diagonal' for embed, expected one of: colwise"),
        ("name", "tp_plan names 'layer.*.up', but no module or parameter of Toy matches"),
        ("kind", "tp_plan gives layers.0.norm the style 'rowwise', which is for Linear, but it is a LayerNorm"),
        ("norm", "tp_plan gives layers.0.norm the style 'norm', which is for a root-mean-square norm with a weight"),
        ("sequence", "sequence_parallel is True, but Toy has no attribute token_split"),
        ("too large", "input_ids: got numbers from 1000000 to 1000000, expected 0 to"),
        ("negative", "input_ids: got numbers from -1 to -1, expected 0 to"),
        ("inputs", "its inputs differ from those of number"),
        ("shapes", "its inputs differ from those of number"),
        ("microbatches", "ranks 0 and 1 compute one batch together"),
    ],
)
def test_errors_say_what_to_do(two, what, words):
    for message in two.run(refused, what):
        assert words in message


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.bool], ids=str
)
def test_inputs_of_each_dtype_are_told_apart_by_values(dtype):
    zeros, other = torch.zeros(2, 3), torch.zeros(2, 3)
    other[1, 2] = 1
    numbers = {digest({"x": x.to(dtype)}) for x in (zeros, other, other.t().contiguous().t(), other.t())}
    assert len(numbers) == 3  # how they lie in memory is all the same


# -- the comparison notices -------------------------------------------------------------------------------------------


def mutated(mutation, task, plan, sizes, policy):
    """Trains with one thing wrong, or says how that failed."""
    kept = {name: getattr(functional, name) for name in ("copy_to", "gather_rows")}
    rowwise, columns = tensor_layers.Rowwise.forward, VocabularyShard.columns
    linear = tensor_layers.linear
    try:
        if mutation == "no all-reduce of the input's gradient":
            functional.copy_to = lambda x, group: x
        elif mutation == "bias on every rank":
            tensor_layers.Rowwise.forward = lambda self, x: functional.reduce_from(
                linear(x, tensor_layers.local(self.weight), self.bias), self.tp_group.group
            )
        elif mutation == "every rank takes the target":
            VocabularyShard.columns = lambda self, targets, n: (
                (targets[:, None] - self.first).clamp(0, n - 1),
                torch.ones_like(targets[:, None], dtype=torch.bool),
            )
        elif mutation == "norms' gradients are not summed":
            tensor_layers.Partial = lambda: torch.distributed.tensor.Replicate()
        elif mutation == "gradient of rows is not summed":
            functional.gather_rows = functional.join_rows
        return bert.trained(task, plan, sizes, {}, policy)
    finally:
        for name, value in kept.items():
            setattr(functional, name, value)
        tensor_layers.Rowwise.forward, VocabularyShard.columns = rowwise, columns
        tensor_layers.Partial = torch.distributed.tensor.Partial


@pytest.mark.parametrize(
    ("mutation", "policy"),
    [
        ("no all-reduce of the input's gradient", {}),
        ("bias on every rank", {}),
        ("every rank takes the target", {}),
        ("norms' gradients are not summed", SEQUENCE),
        ("gradient of rows is not summed", SEQUENCE),
    ],
)
def test_a_mutation_is_noticed(two, mutation, policy):
    expected = bert.train(bert.build("masked-lm"), bert.TWO_PLAN)
    for found in two.run(mutated, mutation, "masked-lm", bert.TWO_PLAN, {"tp_size": 2}, policy):
        with pytest.raises(AssertionError):
            bert.same(found, expected)


def test_the_model_that_was_given_stays_usable_in_one_process():
    model = bert.build("masked-lm")
    before = copy.deepcopy(model)
    assert engine.shard(model) is model and type(model.layers[0].attn.q) is type(before.layers[0].attn.q)


def messages_of_gathering():
    engine.init_distributed(tp_size=2)
    model = engine.shard(toys.build(), tp_plan=toys.TP_PLAN)
    logger, records = logging.getLogger("torch.distributed.tensor._redistribute"), []
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    for held in engine.checkpoint.named_tensors(model).values():
        whole_of(held)
    logger.removeHandler(handler)
    return [record.getMessage() for record in records]


def test_to_gather_what_is_split_twice_says_nothing():
    """On ranks of their own: torch says it once for each mesh."""
    assert run(messages_of_gathering, 2) == [[], []]
