"""Longformer against transformers' model and its heads."""

from dataclasses import replace

import pytest
import torch
from harness import assert_same
from roberta_reference import RobertaTests

import modelcenter as mc
from modelcenter.adapters import PromptTuning
from modelcenter.compare import parameters_by_file_name
from modelcenter.compare.gradients import gradients_of, hub_gradients
from modelcenter.layers import global_attention
from modelcenter.layers.global_tokens import GlobalTokens
from modelcenter.layers.sequences import Sequences
from modelcenter.models.longformer import Longformer, LongformerConfig

SEPARATOR = 3


def _widen(model):
    model.layers[1].attn.window += 1


def _attend_to_all(model):
    for layer in model.layers:
        layer.attn.window = 100


def _attend_alike(model):
    for layer in model.layers:
        layer.attn.q_global = layer.attn.q


def _swap_global(model):
    attn = model.layers[1].attn
    attn.k_global, attn.v_global = attn.v_global, attn.k_global


def _mark_none(model):
    model.global_tokens = lambda *_: None


def _cross_boundaries(model):
    """Attention as if the batch were one sequence, while the head still reads each."""

    def crossing(forward):
        def call(x, ctx):
            whole = Sequences.of_lengths([ctx.num_tokens], x.device)
            return forward(x, replace(ctx, sequences=whole, globals=GlobalTokens(ctx.globals.tokens, whole)))

        return call

    for layer in model.layers:
        layer.attn.forward = crossing(layer.attn.forward)


WINDOWS = {"a wider window": _widen, "no window": _attend_to_all}


class LongformerTests(RobertaTests):
    hf_config = {
        "model_type": "longformer",
        "vocab_size": 131,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 80,
        "hidden_act": "silu",
        "max_position_embeddings": 137,
        "type_vocab_size": 3,
        "layer_norm_eps": 1e-2,
        "pad_token_id": 2,
        "sep_token_id": SEPARATOR,
        "attention_window": [4, 8, 4],
    }
    padding = 2

    def rows(self, task, config, lengths=None, seed=0):
        """A question has three separators, as transformers requires: two behind it, and one at the end."""
        if task not in ("question-answering", "multiple-choice"):
            return super().rows(task, config, lengths, seed)
        rows = super().rows(task, config, [max(n, 3) for n in lengths or self.row_lengths], seed)
        for row in rows:
            ids = [token if token != SEPARATOR else SEPARATOR + 1 for token in row.input_ids]
            end = (len(ids) - 1) // 3
            ids[end] = ids[end + 1] = ids[-1] = SEPARATOR
            row.input_ids[:] = ids
        return rows


class TestLongformer(LongformerTests):
    mutations = RobertaTests.mutations | WINDOWS


class TestLongformerWithGlobalTokens(LongformerTests):
    """What the other class tests by a language model, whose tokens are not global."""

    tasks = ("sequence-classification",)
    mutations = WINDOWS | {
        "global tokens attend as others": _attend_alike,
        "global keys and values swapped": _swap_global,
        "no global tokens": _mark_none,
        "attention across rows": _cross_boundaries,
    }
    test_matches_transformers = test_base_matches_transformers = test_packed_equals_separate = None
    test_training_leaves_vocabulary_logits_out = test_dropout = test_empty_batch = test_bfloat16 = None
    test_gradients_do_not_depend_on_the_cut = test_two_ranks_equal_one = test_dropout_is_where_transformers_has_it = (
        None
    )
    test_export_is_exact = test_distributed_checkpoint = None


def _batch(lengths, share, seed=0, side="right"):
    """Padded rows, of whose tokens about this share is global."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 131, (len(lengths), max(lengths)), generator=draw)
    length, place = torch.tensor(lengths)[:, None], torch.arange(max(lengths))
    mask = (place < length if side == "right" else place >= max(lengths) - length).long()
    chosen = (torch.rand(ids.shape, generator=draw) < share).long()
    return {"input_ids": ids.where(mask.bool(), 2), "attention_mask": mask, "global_attention_mask": chosen}


def _check(theirs, ours, batch):
    """Assert that states of tokens and all gradients are transformers'."""
    kept = batch["attention_mask"].bool()
    # Small, because the gradients of the keys' biases are 0 but for rounding.
    weights = 0.3 * torch.randn(int(kept.sum()), 48, generator=torch.Generator().manual_seed(1))
    found = []
    for model in (ours, theirs):
        model.zero_grad()
        states = model(**batch).last_hidden_state[kept]
        (states * weights).sum().backward()
        found.append(states)
    assert_same("states", *found, 1e-5)
    grads, wanted = hub_gradients(ours), gradients_of(parameters_by_file_name(theirs, ours))
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        assert_same(name, grad, wanted[name], 1e-5)


@pytest.fixture
def pair(tmp_path):
    return lambda **fields: (LongformerTests().reference("base", tmp_path, **fields), mc.from_pretrained(str(tmp_path)))


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "in torch"])
@pytest.mark.parametrize("window, share", [(4, 0.1), (6, 0.4), ([8, 16, 4], 0.1), (64, 0.1), (200, 0.1), (4, 0.0)])
def test_global_attention_mask(pair, compiled, window, share, monkeypatch):
    """Rows shorter and longer than the windows, with global tokens inside and outside of them; some rows have none."""
    if not compiled:
        monkeypatch.setattr(global_attention.attention, "serves", lambda *_: False)
    theirs, ours = pair(attention_window=window)
    _check(theirs, ours, _batch([70, 3, 131, 12, 1, 33], share))


@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_of_heads(tmp_path, side):
    """A head's mask is that of the call, if it has one: also where the tokens would show none."""
    theirs = LongformerTests().reference("question-answering", tmp_path)
    ours, batch = mc.from_pretrained(str(tmp_path)), _batch([23, 9, 17], 0.2, side=side)
    positions = torch.where(batch["attention_mask"].bool(), batch["attention_mask"].cumsum(1) + 2, 2)
    kept = batch["attention_mask"].bool()
    wanted = theirs(**batch, position_ids=positions)
    found = ours(**batch)
    assert_same("start", found.start_logits[kept], wanted.start_logits[kept], 1e-5)
    packed = {name: batch[name][kept][None] for name in ("input_ids", "global_attention_mask")}
    ends = torch.tensor([0, 23, 32, 49])
    assert_same("packed", ours(**packed, cu_seqlens=ends, max_seqlen=23).end_logits[0], wanted.end_logits[kept], 1e-5)


def test_choices_have_masks(tmp_path):
    theirs = LongformerTests().reference("multiple-choice", tmp_path)
    ours, batch = mc.from_pretrained(str(tmp_path)), _batch([23, 9, 17, 23], 0.2)
    batch = {name: x.view(2, 2, -1) for name, x in batch.items()}
    assert_same("logits", ours(**batch).logits, theirs(**batch).logits, 1e-5)


def _model(task="base", **fields):
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 8}
    return Longformer(LongformerConfig(**sizes | {"attention_window": 4, "pad_token_id": 1} | fields), task)


def _chosen(model, rows):
    """The global tokens of each row, by their places in it."""
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    ids = torch.tensor([[token for row in rows for token in row]])
    tokens = model.begin({"input_ids": ids, "cu_seqlens": lengths.cumsum(0).int()})[1].globals.tokens
    ends = lengths.cumsum(0).tolist()
    return [(tokens[(tokens >= a) & (tokens < b)] - a).tolist() for a, b in zip(ends, ends[1:], strict=False)]


def test_global_tokens_of_heads():
    rows = [[0, 5, 6, 2, 2, 7, 8, 2], [2, 2, 2], [4, 2, 2, 2], [5, 2, 6]]
    assert _chosen(_model("sequence-classification"), rows) == [[0]] * 4
    assert _chosen(_model("question-answering"), rows) == [[0, 1, 2], [], [0], [0]]
    assert _chosen(_model("multiple-choice"), rows) == [[5, 6, 7], [2], [3], []]
    assert _chosen(_model("question-answering", sep_token_id=7), rows[:1]) == [[0, 1, 2, 3, 4]]
    ids = torch.tensor([[3, 2, 2, 4, 2]])
    for task in ("base", "masked-lm", "token-classification", "embedding"):
        assert _model(task).begin({"input_ids": ids})[1].globals is None
    embeds = {"inputs_embeds": torch.randn(1, 5, 8)}
    assert _model("question-answering").begin(embeds)[1].globals is None  # as in transformers
    assert _model("sequence-classification").begin(embeds)[1].globals.tokens.tolist() == [0]


def test_errors():
    ids = torch.tensor([[3, 2, 2, 4, 2], [3, 4, 5, 6, 7]])
    with pytest.raises(ValueError, match=r"sequence 1 has no token 2 \(sep_token_id\).* pass global_attention_mask"):
        _model("question-answering")(ids)
    with pytest.raises(ValueError, match="global_attention_mask: got values from 0 to 2"):
        _model()(ids, global_attention_mask=ids.clamp(max=2) * (ids < 3))
    with pytest.raises(ValueError, match=r"global_attention_mask: got shape \(2, 4\)"):
        _model()(ids, global_attention_mask=ids[:, :4])
    with pytest.raises(ValueError, match="global_attention_mask: got .*expected a tensor"):
        _model()(ids, global_attention_mask=[[1, 0, 0, 0, 0]])
    with pytest.raises(ValueError, match="global_attention_mask: in Roberta no token has global attention"):
        mc.from_config("tiny/roberta")(ids, global_attention_mask=ids * 0)
    packed = {"input_ids": ids[:1], "cu_seqlens": torch.tensor([0, 5]), "attention_mask": torch.ones(1, 5)}
    packed["attention_mask"][0, 4] = 0
    with pytest.raises(ValueError, match="global_attention_mask: not beside tokens that no token attends to"):
        _model("multi-vector")(**packed, global_attention_mask=torch.tensor([[1, 0, 0, 0, 0]]))
    for wrong in (0, 3, -2, [4], [4, 4, 4], [4, 3]):
        with pytest.raises(ValueError, match="attention_window is .* an even number above 0, or 2 of them"):
            _model(attention_window=wrong)
    with pytest.raises(ValueError, match="pad_token_id"):
        _model(pad_token_id=None)


def test_without_global_tokens_no_projection_of_theirs_runs(monkeypatch):
    """The windows alone are computed; in training, those projections have gradients of zero."""
    model = _model("masked-lm").train()
    for layer in model.layers:
        monkeypatch.setattr(layer.attn.k_global, "forward", None)
    ids = torch.tensor([[3, 5, 6, 4, 8]])
    model(ids, labels=ids, global_attention_mask=ids * 0).loss.backward()
    assert all(not layer.attn.k_global.weight.grad.any() for layer in model.layers)
    with torch.no_grad():
        assert model(ids).logits.shape == (1, 5, 9)


def test_kept_layers_keep_their_windows(tmp_path):
    LongformerTests().reference("base", tmp_path, attention_window=[4, 8, 16])
    assert mc.from_pretrained(str(tmp_path), keep_layers=[0, 2]).config.attention_window == [4, 16]


def test_prompts_are_refused():
    with pytest.raises(ValueError, match="Longformer has global tokens, which transformers cannot find in given"):
        PromptTuning(2).add_to(mc.from_config("tiny/longformer", "sequence-classification"))
