"""Layers that run several times: in the engine they are the root's, recomputed and compiled by themselves, with dropout
masks of their own in each run; a pipeline sums their gradients over its stages."""

import itertools

import engine_toys as toys
import pytest
import torch
import torch._dynamo  # before the ranks are forked: they all need it
from parallel_bert import noted_masks

import engine
import modelcenter as mc
from engine.notes import stages_of
from engine.ops import dropout_key, dropout_rows
from modelcenter.compare import pack_rows, rows_for
from modelcenter.testing import assert_same, randomize_

FIELDS = {"num_layers": 4, "num_groups": 2, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
LENGTHS = (5, 3, 7, 2, 4, 6, 2, 9)
ONE_BATCH = [[[0, 1, 2, 3, 4, 5, 6, 7]]]
CUTS = [[[0, 7], [2]], [[1, 3, 5], [6, 4]]]  # ranks -> microbatches -> rows
TASK = "pretraining"


@pytest.fixture(scope="module")
def two():
    with engine.testing.Pool(2, timeout=120) as pool:
        yield pool


def built(**fields):
    return randomize_(mc.from_config("tiny/albert", TASK, policy=False, **{**FIELDS, **fields})).train()


def gradients(cut, sizes=None, policy=None, **fields):
    """Loss, norm and gradients of one step on these rows, cut so."""
    torch._dynamo.reset()
    if sizes is not None:
        engine.init_distributed(**sizes)
    model = built(**fields)
    if policy is not None:
        model = engine.shard(model, policy=engine.Policy(**policy))
    rows = rows_for(TASK, model.config, lengths=LENGTHS)
    shared = sizes is None or engine.data_size() == 1
    own = [part for rank in cut for part in rank] if shared else cut[engine.data_rank()]
    batches = [{**pack_rows(TASK, [rows[i] for i in part]), "row_ids": torch.tensor(part) + 1000} for part in own]
    with dropout_key(11, 4):
        loss = mc.training.accumulate(model, batches).item()
    norm = engine.optim.clip_grad_norm_(model.parameters(), 1e9).item()
    return loss, norm, {n: toys.whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def same(found, expected, tolerance=2e-5):
    assert found[:2] == pytest.approx(expected[:2], rel=tolerance)
    for name, gradient in found[2].items():
        assert_same(name, gradient, expected[2][name], max(tolerance, 5e-5))


def several(ways):
    return [gradients(CUTS, *way) for way in ways]


@pytest.fixture(scope="module")
def expected():
    return gradients(ONE_BATCH)


FAST = [
    ({"zero_level": 3}, {}),
    ({"zero_level": 1}, {"recompute": "full"}),
    ({"tp_size": 2}, {"sequence_parallel": True, "recompute": "full"}),
    ({"cp_size": 2}, {}),
    ({"pp_size": 2}, {}),
    ({"pp_size": 2, "pp_chunks": 2}, {"recompute": "full"}),
]
RECOMPUTE = ("none", "cheap", "full", "selective", "offload")
# Each kind of recomputation at both levels, compiled at one of them.
COMPILED = [
    ({"zero_level": level}, {"recompute": kind, "compile": "aot_eager" if (number + level) % 2 else False})
    for level in (0, 3)
    for number, kind in enumerate(RECOMPUTE)
]
MORE = [
    *COMPILED,
    ({"zero_level": 2}, {"offload": "all"}),
    ({"tp_size": 2}, {}),
    ({"pp_size": 2, "zero_level": 0}, {"compile": "aot_eager"}),
    ({"pp_size": 2, "pp_chunks": 2, "zero_level": 1}, {}),
]


def test_each_two_settings_meet():
    ways = [(sizes["zero_level"], policy["recompute"], policy["compile"]) for sizes, policy in COMPILED]
    axes = ((0, 3), RECOMPUTE, (False, "aot_eager"))
    for i, j in itertools.combinations(range(3), 2):
        assert {(way[i], way[j]) for way in ways} == set(itertools.product(axes[i], axes[j]))


@pytest.mark.parametrize("ways", [FAST, pytest.param(MORE, marks=pytest.mark.full)], ids=["fast", "more"])
def test_two_ranks_train_as_one_process(two, ways, expected):
    """With dropout, whose masks depend neither on ranks nor on microbatches."""
    same(gradients(CUTS), expected)
    for rank in two.run(several, ways):
        for found in rank:
            same(found, expected)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"pp_size": 4}, {"pp_size": 2, "tp_size": 2}, {"pp_size": 2, "cp_size": 2}], ids=str)
def test_four_ranks_train_as_one_process(sizes, expected):
    with engine.testing.Pool(4) as four:
        for found in four.run(gradients, CUTS, sizes, {}):
            same(found, expected)


def with_fields(sizes, fields):
    return gradients(CUTS, sizes, {}, **fields)


OF_ONE_RUN = [{"num_groups": 4}, {"num_groups": 3}, {"num_layers": 2, "num_groups": 1, "group_layers": 2}]


@pytest.mark.full
@pytest.mark.parametrize("fields", OF_ONE_RUN, ids=str)
@pytest.mark.parametrize("sizes", [{"pp_size": 2}, {"pp_size": 2, "pp_chunks": 2, "zero_level": 1}], ids=str)
def test_stages_of_layers_of_which_some_run_once(two, sizes, fields):
    """Those are units that are gathered by themselves, beside others that are the root's."""
    expected = gradients(ONE_BATCH, **fields)
    for found in two.run(with_fields, sizes, fields):
        same(found, expected)


def test_16_bits_in_one_process():
    """A layer that is computed again sees the root's casts, which are made once; so do all its runs."""
    plain = gradients(CUTS, None, {"precision": "bf16"})
    for recompute in ("full", "selective", "offload"):
        assert gradients(CUTS, None, {"precision": "bf16", "recompute": recompute})[0] == plain[0]
        same(gradients(CUTS, None, {"precision": "bf16", "recompute": recompute}), plain, 2e-2)
    for recompute in ("none", "full"):
        model = engine.shard(built(), policy=engine.Policy(precision="bf16", recompute=recompute))
        seen = weights_of_runs(model)
        assert {dtype for dtype, _ in seen} == {torch.bfloat16} and len(seen) == 4
        assert len({id(weight) for _, weight in seen}) == 2 and seen[0][1].dtype == torch.bfloat16


def weights_of_runs(model):
    """(dtype of what the attention of each run is given, the weight it uses)."""
    seen = []
    for layer in model.layers:
        layer.attn.q.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.weight)))
    model(**pack_rows(TASK, rows_for(TASK, model.config, lengths=LENGTHS)))
    return seen


def test_runs_of_a_layer_drop_different_weights():
    model = built(num_groups=1, hidden_dropout_prob=0.4)
    batch = pack_rows(TASK, rows_for(TASK, model.config, lengths=(9, 9)))
    batch |= {"output_logits": True, "output_hidden_states": True}  # so that the last run computes all tokens
    for keyed in (True, False):
        torch.manual_seed(3)
        with noted_masks() as drawn, dropout_key(1, 1), dropout_rows(torch.arange(2) if keyed else None):
            model(**batch)
        for shape in ((18, 48), (12, 9, 9)):  # of what attention adds; of its weights, by sequence and head
            masks = [mask for mask in drawn if mask.shape == shape]
            assert len(masks) == 4
            assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


FSDPS = ("allgather", "reduce_scatter")


def laid_out(level):
    engine.init_distributed(zero_level=level)
    model = engine.shard(built())
    batch = pack_rows(TASK, rows_for(TASK, model.config, lengths=LENGTHS))
    with toys.Collectives() as seen:
        model(**batch).loss.backward()
    return engine.describe(model, show=False).gathers, [name for name, _ in seen.made if name in FSDPS]


def test_shared_layers_are_gathered_and_reduced_once(two):
    """With all that is the root's, however often they run."""
    for level in (1, 3):
        for gathers, made in two.run(laid_out, level):
            assert gathers == {"(root)": 1} and made == list(FSDPS)


def held(sizes):
    engine.init_distributed(**sizes)
    model = engine.shard(built(num_layers=5, num_groups=2))  # runs 0, 0, 0, 1, 1
    names = {name.split(".")[0] for name, _ in model.named_parameters() if not name.startswith("layers")}
    layers = {int(name.split(".")[1]) for name, _ in model.named_parameters() if name.startswith("layers")}
    return names, layers, {name.split(".")[1] for name in stages_of(model).copies if name.startswith("layers")}


def test_a_stage_has_the_layers_that_it_runs(two):
    begin, end = {"embed", "position", "token_type", "embed_norm", "project_in"}, {"embed", "pooler", "head"}
    # Of three runs and two, and of two, one, one and one.
    assert two.run(held, {"pp_size": 2}) == [(begin, {0}, set()), (end, {1}, set())]
    assert two.run(held, {"pp_size": 2, "pp_chunks": 2}) == [(begin, {0, 1}, set()), (end, {0, 1}, {"0", "1"})]


def saved_by(sizes, path):
    if sizes:
        engine.init_distributed(**sizes)
    model = engine.shard(built())
    model.save_pretrained(path / "hf")
    engine.checkpoint.save_model(path / "distributed", model)


def test_checkpoints_are_those_of_one_process(two, tmp_path):
    saved_by({}, tmp_path / "one")
    whole = (tmp_path / "one" / "hf" / "model.safetensors").read_bytes()
    for i, sizes in enumerate(({"pp_size": 2}, {"zero_level": 3})):
        two.run(saved_by, sizes, tmp_path / str(i))
        assert (tmp_path / str(i) / "hf" / "model.safetensors").read_bytes() == whole
        back = mc.from_config("tiny/albert", TASK, policy=False, **FIELDS)
        engine.checkpoint.load_model(tmp_path / str(i) / "distributed", back)
        assert_same_state(back, built())


def assert_same_state(found, wanted):
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def adapted(sizes, path):
    """Two steps of LoRA with dropout: the loss of each, and the norm of the gradients."""
    from modelcenter.adapters import Lora

    if sizes:
        engine.init_distributed(**sizes)
    model = mc.from_pretrained(path, adapter=Lora(3, dropout=0.3)).train()
    rows = rows_for(TASK, model.config, lengths=LENGTHS)
    cut = CUTS if sizes is None or engine.data_size() == 1 else [CUTS[engine.data_rank()]]
    parts = [part for rank in cut for part in rank]
    batches = [{**pack_rows(TASK, [rows[i] for i in part]), "row_ids": torch.tensor(part)} for part in parts]
    optimizer = engine.optim.AdamOptimizer([p for p in model.parameters() if p.requires_grad], lr=0.05)
    found = []
    for step in range(2):
        with dropout_key(11, step):
            found.append(mc.training.accumulate(model, batches).item())
        found.append(engine.optim.clip_grad_norm_(model.parameters(), 1e9).item())
        optimizer.step()
        optimizer.zero_grad()
    return found, model.num_parameters(only_trainable=True)


def test_low_rank_updates_are_shared_as_the_layers_are(two, tmp_path):
    pytest.importorskip("peft")
    built(classifier_dropout=0.0).save_pretrained(tmp_path)
    alone, trained = adapted(None, tmp_path)
    assert trained == 2 * 3 * (4 * 96 + 2 * 128) + 3 * (20 + 48)  # of two layers, and of what projects embeddings
    for sizes in ({"zero_level": 3}, {"pp_size": 2}):
        for found, count in two.run(adapted, sizes, tmp_path):
            assert count == trained and found == pytest.approx(alone, rel=1e-4)
