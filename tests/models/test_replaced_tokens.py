"""A generator and a discriminator as one model, against transformers' nets in a plain loop over the same draws."""

import itertools
from contextlib import nullcontext

import pytest
import replaced_toys as toys
import torch
from torch.func import functional_call

import engine
import modelcenter as mc
from modelcenter.layers.dropout import Dropout
from modelcenter.models.replaced_tokens import ReplacedTokenPair
from modelcenter.testing import assert_same

LENGTHS = (7, 3, 11, 5, 1, 8, 4)
WORDS = {"electra": "electra", "deberta-v2": "deberta"}


@pytest.fixture(scope="module")
def two():
    with engine.testing.Pool(2) as pool:
        yield pool


def grads_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(pair, folder, batch, weight=50.0):
    """Tokens that are drawn, logits, losses and every gradient are those of transformers' nets, which share their
    embeddings as the pair does."""
    generator, discriminator = toys.in_transformers(pair, folder)
    share, name = pair.share_embeddings, WORDS[pair.config.model_type]
    table = getattr(generator, name).embeddings.word_embeddings.weight
    words = f"{name}.embeddings.word_embeddings.weight"
    call, delta = discriminator, None
    if share == "tied":
        getattr(discriminator, name).embeddings = getattr(generator, name).embeddings
    elif share == "disentangled":
        own = dict(discriminator.named_parameters())[words]
        delta = (own.detach() - table.detach()).requires_grad_()

        def call(*args, **kwargs):
            return functional_call(discriminator, {words: table.detach() + delta}, args, kwargs)

    out = pair(**batch)
    theirs = toys.their_loss(generator, call, batch, out["corrupted_ids"])
    mask = batch["attention_mask"].bool()
    assert torch.equal(out["corrupted_ids"][mask], toys.drawn(theirs["guesses"], batch)[mask])
    kept = out["corrupted_ids"] == torch.where(batch["labels"] >= 0, batch["labels"], batch["input_ids"])
    assert torch.equal(out["replaced"], torch.where(mask, (~kept).long(), -100))
    assert_same("logits", out.logits[mask], theirs["told"][mask], 1e-5)
    assert_same("the generator's loss", out["generator_loss"], theirs["generator"], 1e-5)
    assert_same("the discriminator's loss", out["discriminator_loss"], theirs["discriminator"], 1e-5)
    wanted = theirs["generator"] + weight * theirs["discriminator"]
    assert_same("loss", out.loss, wanted, 1e-5)
    pair.zero_grad()
    out.loss.backward()
    wanted.backward()
    mine = toys.gradients(pair, grads_of(pair))
    plain = toys.nets(pair.config.model_type, tie_embeddings=pair.generator.config.tie_embeddings)
    for ours, net, other in zip(mine, plain, (generator, discriminator), strict=True):
        expected = toys.their_gradients(other, net)
        if delta is not None and other is discriminator:
            expected[words] = delta.grad
        assert set(ours) == set(expected), set(ours) ^ set(expected)
        for key, grad in expected.items():
            assert_same(key, ours[key], grad, 2e-5)


FAMILIES, SHARES = tuple(toys.SIZES), ("tied", "disentangled", "none")
CASES = [(family, share) for family in FAMILIES for share in SHARES]
FAST = {("electra", "tied"), ("deberta-v2", "disentangled")}


@pytest.mark.parametrize(
    ("family", "share"), [pytest.param(*c, marks=() if c in FAST else pytest.mark.full) for c in CASES]
)
def test_loss_and_gradients_are_those_of_transformers(family, share, tmp_path):
    batch = toys.padded(toys.rows_of_tokens(LENGTHS))
    check(toys.joined(family, share), tmp_path, batch)
    check(toys.joined(family, share, 3.0), tmp_path / "other", batch, 3.0)


@pytest.mark.full
def test_a_generator_with_a_matrix_of_its_own(tmp_path):
    batch = toys.padded(toys.rows_of_tokens(LENGTHS))
    check(toys.joined("electra", "tied", tie_embeddings=False), tmp_path, batch)


def spoil_gradient(pair):
    """The discriminator's gradient reaches the generator's table."""
    table = pair.discriminator.embed
    table.forward = lambda ids: table.shared(ids) + table.delta(ids)


def spoil_weight(pair):
    pair.discriminator_weight = 49.0


def spoil_draws(pair):
    """Each token is drawn with its neighbour's number."""
    run = pair.generator.run
    pair.generator.run = lambda batch: run({**batch, "draws": batch["draws"].roll(1)})


def spoil_norm(pair):
    pair.discriminator.embed_norm = type(pair.generator.embed_norm)(20, 1e-2)


def spoil_context(pair):
    """The first token of the batch, not of the sequence."""
    head = pair.discriminator.head
    head.transform = lambda x, ctx: head.activation(head.dense(head.norm(x + x[:1])))


@pytest.mark.parametrize(
    ("spoil", "family"),
    [
        (spoil_gradient, "deberta-v2"),
        (spoil_weight, "electra"),
        (spoil_draws, "electra"),
        (spoil_norm, "electra"),
        (spoil_context, "deberta-v2"),
    ],
)
def test_mistakes_are_noticed(spoil, family, tmp_path):
    pair = toys.joined(family, "tied" if family == "electra" else "disentangled")
    copy = toys.joined(family, pair.share_embeddings)
    spoil(pair)
    with pytest.raises(AssertionError), pytest.MonkeyPatch.context() as patch:
        found = toys.in_transformers
        patch.setattr(toys, "in_transformers", lambda _, folder: found(copy, folder))
        check(pair, tmp_path, toys.padded(toys.rows_of_tokens(LENGTHS)))


def test_a_token_drawn_as_it_was_counts_as_original():
    pair = toys.joined("electra", "tied")
    rows = toys.rows_of_tokens(LENGTHS)
    batch = toys.packed(rows)
    first = pair(**batch)
    batch["labels"] = torch.where(batch["labels"] >= 0, first["corrupted_ids"], -100)
    again = pair(**batch)
    assert torch.equal(again["corrupted_ids"], first["corrupted_ids"])
    assert first["replaced"].sum() > 0 and again["replaced"].sum() == 0
    assert pair.loss_counts(batch) == {"generator": int((batch["labels"] >= 0).sum()), "discriminator": sum(LENGTHS)}


def test_padded_and_packed_rows_are_the_same():
    pair, rows = toys.joined("deberta-v2", "disentangled"), toys.rows_of_tokens(LENGTHS)
    one, other = pair(**toys.packed(rows)), pair(**(batch := toys.padded(rows)))
    mask = batch["attention_mask"].bool()
    assert torch.equal(one["corrupted_ids"][0], other["corrupted_ids"][mask])
    assert (other["replaced"][~mask] == -100).all()
    assert_same("loss", one.loss, other.loss, 1e-5)
    assert_same("logits", one.logits[0], other.logits[mask], 1e-5)


# -- however a batch is cut --------------------------------------------------------------------------------------------


def accumulated(family, share, cut, level=None, sizes=None):
    """(loss, whole gradients) of rows that are dealt to the ranks, in microbatches of so many."""
    pair = toys.joined(family, share)
    if level is not None:
        engine.init_distributed(**(sizes or {}))
        engine.shard(pair, policy=engine.Policy(zero_level=level))
    rows = toys.rows_of_tokens(LENGTHS)[engine.data_rank() :: engine.data_size()]
    loss = mc.training.accumulate(pair, [toys.packed(rows[i : i + cut]) for i in range(0, len(rows), cut)])
    whole = {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in grads_of(pair).items()}
    return loss, {name: g.clone() for name, g in whole.items()}


@pytest.fixture(scope="module")
def alone():
    return {case: accumulated(*case, len(LENGTHS)) for case in CASES}


@pytest.mark.parametrize(("family", "share"), CASES)
def test_microbatches_change_nothing(alone, family, share):
    loss, wanted = alone[family, share]
    found, grads = accumulated(family, share, 2)
    assert_same("loss", found, loss, 1e-5)
    assert set(grads) == set(wanted)
    for name, grad in wanted.items():
        assert_same(name, grads[name], grad, 2e-5)


MESHES = {
    "level 0": (0,),
    "level 2": (2,),
    "level 3": (3,),
    "tensor": (3, {"tp_size": 2}),
    "context": (3, {"cp_size": 2}),
}
QUICK = {("electra", "tied", "level 3"), ("deberta-v2", "disentangled", "tensor"), ("deberta-v2", "tied", "context")}
# Each way to share embeddings on each mesh with one family, and each family on each mesh.
OVER_RANKS = [(FAMILIES[(i + j) % 2], share, mesh) for i, share in enumerate(SHARES) for j, mesh in enumerate(MESHES)]
OVER_RANKS += sorted(QUICK - set(OVER_RANKS))


def test_each_two_axes_meet():
    for i, j in itertools.combinations(range(3), 2):
        axes = [FAMILIES, SHARES, MESHES]
        assert {(case[i], case[j]) for case in OVER_RANKS} == set(itertools.product(axes[i], axes[j]))


@pytest.mark.parametrize(
    ("family", "share", "mesh"), [pytest.param(*c, marks=() if c in QUICK else pytest.mark.full) for c in OVER_RANKS]
)
def test_two_ranks_change_nothing(alone, two, family, share, mesh):
    loss, wanted = alone[family, share]
    for found, grads in two.run(accumulated, family, share, 2, *MESHES[mesh]):
        assert_same("loss", found, loss, 1e-5)
        assert set(grads) == set(wanted)
        for name, grad in wanted.items():
            assert_same(name, grads[name], grad, 5e-5)


def test_an_empty_batch_trains_nothing():
    pair = toys.joined("deberta-v2", "disentangled").train()
    out = pair(**pair.empty_batch())
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert not any(grad.any() for grad in grads_of(pair).values())
    assert set(grads_of(pair)) == {name for name, _ in pair.named_parameters()}


def test_nets_of_one_size_draw_masks_of_their_own():
    """Their dropouts are told apart by where they are in the pair."""
    pair = ReplacedTokenPair(*toys.nets("deberta-v2", dropout=0.3), "disentangled").train()
    with engine.ops.dropout_key(3, 4), engine.ops.dropout_rows(torch.arange(len(LENGTHS))):
        pair(**toys.packed(toys.rows_of_tokens(LENGTHS)))
    sites = [module.site for module in pair.modules() if isinstance(module, Dropout)]
    assert len(set(sites)) == len(sites) > 4


@pytest.mark.parametrize(("family", "share"), sorted(FAST))
def test_a_step_asks_nothing_of_the_device(family, share, monkeypatch):
    """On `meta`, whose tensors cannot be read: what is drawn, too, stays there."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())  # there is none for meta
    pair = toys.joined(family, share, dropout=0.1).train()
    batch = {**toys.packed(toys.rows_of_tokens((5, 3, 7))), "row_ids": torch.arange(3)}
    with engine.ops.dropout_key(1, 2):
        loss = mc.training.accumulate(pair.to("meta"), [batch])
    assert loss.is_meta and set(grads_of(pair)) == {name for name, _ in pair.named_parameters()}


# -- what does not fit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "share", "says"),
    [
        ({"vocab_size": 90}, "none", "generator: it has 90 words and the discriminator 131"),
        ({"embedding_size": 12}, "tied", r"share_embeddings: tied needs tables of one shape, but embed of the gen"),
        ({"max_positions": 40}, "disentangled", "share_embeddings: disentangled needs tables of one shape, but positi"),
        ({"norm_eps": 1e-3}, "tied", "share_embeddings: tied shares the norm of the embeddings, but norm_eps of the"),
        ({}, "both", "share_embeddings: got 'both', expected one of tied, disentangled, none"),
    ],
)
def test_nets_that_do_not_fit(changes, share, says):
    generator = mc.from_config("tiny/electra", "masked-lm", **toys.SIZES["electra"] | changes)
    discriminator = mc.from_config("tiny/electra", "pretraining", **toys.SIZES["electra"])
    with pytest.raises(ValueError, match=says):
        ReplacedTokenPair(generator, discriminator, share)


def test_models_that_are_no_such_nets():
    generator, discriminator = toys.nets("electra")
    bert = mc.from_config("tiny/bert", "pretraining")
    for nets, says in (
        ((discriminator, discriminator), "generator: got a model of task 'pretraining', expected 'masked-lm'"),
        ((generator, bert), "discriminator: got a Bert, whose pretraining is another; expected an Electra"),
    ):
        with pytest.raises(ValueError, match=says):
            ReplacedTokenPair(*nets)
    pair, batch = ReplacedTokenPair(generator, discriminator), toys.packed(toys.rows_of_tokens((4,)))
    for name in ("input_ids", "labels", "draws"):
        with pytest.raises(ValueError, match=f"^{name}: "):
            pair(**{key: value for key, value in batch.items() if key != name})
    with pytest.raises(ValueError, match="draws: got shape"):
        pair(**batch | {"draws": batch["draws"][:, 1:]})
    with pytest.raises(ValueError, match="two nets that are trained together cannot be split into stages"):
        pair.stage_homes()
