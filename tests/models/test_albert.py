"""ALBERT against transformers' AlbertModel and its heads. What the sharing of parameters means for sharding,
recomputation and dropout: test_albert_sharing.py."""

from functools import partial

import pytest
import torch
from harness import ArchitectureTests, assert_same

import modelcenter as mc
from modelcenter.compare import pack_rows, rows_for
from modelcenter.layers.dropout import Dropout


def _swap_layers(model):
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def _calls(order):
    """A function that lets a model run its layers in this order."""

    def spoil(model):
        model.unit_calls = lambda part: [partial(_run, model.layers[order[i]]) for i in part]

    return spoil


def _run(layer, x, ctx):
    return layer(x, ctx)


class TestAlbert(ArchitectureTests):
    hf_config = {
        "model_type": "albert",
        "vocab_size": 131,
        "embedding_size": 20,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_hidden_groups": 2,
        "inner_group_num": 2,
        "num_attention_heads": 6,
        "intermediate_size": 80,
        "hidden_act": "silu",
        "max_position_embeddings": 37,
        "type_vocab_size": 4,
        "layer_norm_eps": 1e-2,
    }
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
    mutations = {
        "layers swapped": _swap_layers,
        "each layer of a group for itself": _calls([0, 0, 1, 1, 2, 3]),
        "the second group twice": _calls([0, 1, 2, 3, 2, 3]),
    }

    def reference(self, task, folder, **fields):
        """transformers' loss of the order of sentences reads two logits of each pair, however many labels there are."""
        return super().reference(task, folder, **({"num_labels": 2} if task == "pretraining" else {}) | fields)


@pytest.fixture
def pair(tmp_path):
    """(task, fields of the config) -> a model of transformers, and the same here."""
    tests = TestAlbert()
    return lambda task, **fields: (tests.reference(task, tmp_path, **fields), tests.ours(tmp_path, None))


@pytest.mark.parametrize(
    ("layers", "groups", "inner", "order"),
    [
        (3, 2, 2, [0, 1, 0, 1, 2, 3]),
        (7, 3, 1, [0, 0, 0, 1, 1, 2, 2]),
        (2, 1, 1, [0, 0]),
        (1, 1, 2, [0, 1]),
    ],
)
def test_hidden_states_of_every_run(layers, groups, inner, order, pair):
    theirs, ours = pair("base", num_hidden_layers=layers, num_hidden_groups=groups, inner_group_num=inner)
    assert ours.config.order == order and len(ours.layers) == len(set(order))
    assert [list(ours.layers).index(unit) for unit in ours.units] == order
    ids = torch.randint(1, 131, (2, 9))
    found = ours(ids, output_hidden_states=True).hidden_states
    wanted = theirs(ids, output_hidden_states=True).hidden_states
    assert len(found) == len(wanted) == len(order) + 1
    for mine, state in zip(found, wanted, strict=True):
        assert_same("states", mine, state, 1e-5)


def test_embeddings_as_wide_as_hidden_states_are_projected(pair):
    for task in ("base", "masked-lm"):
        theirs, ours = pair(task, embedding_size=48)
        assert ours.project_in.weight.shape == (48, 48)
        ids = torch.randint(1, 131, (2, 9))
        assert_same("states", ours(ids)[0], theirs(ids)[0], 1e-5)


def test_an_untied_head(pair):
    theirs, ours = pair("pretraining", tie_word_embeddings=False)
    assert ours.head.lm.weight.shape == (131, 20)
    TestAlbert().check_parity(theirs, ours, "right")


def test_the_order_of_sentences(pair):
    theirs, ours = pair("pretraining")
    ids, labels, order = torch.randint(1, 131, (3, 9)), torch.randint(1, 131, (3, 9)), torch.tensor([0, 1, 1])
    labels[:, ::2] = -100
    out, expected = (m(ids, labels=labels, sentence_order_label=order) for m in (ours, theirs))
    assert_same("loss", out.loss, expected.loss, 1e-5)
    assert_same("logits", out.sop_logits, expected.sop_logits, 1e-5)
    assert ours.loss_counts({"labels": labels, "sentence_order_label": order}) == {"masked_lm": 12, "sentence_order": 3}
    # One of the losses alone, for which transformers has none.
    words, order_alone = ours(ids, labels=labels).loss, ours(ids, sentence_order_label=order).loss
    assert_same("loss", words + order_alone, out.loss, 1e-6)
    none = torch.full_like(order, -100)
    assert_same("loss", ours(ids, labels=labels, sentence_order_label=none).loss, words, 1e-6)


@pytest.mark.parametrize(
    ("name", "task", "inputs", "says"),
    [
        ("albert", "pretraining", {"next_sentence_label": [1]}, "next_sentence_label: Albert .* no task of it does"),
        ("albert", "masked-lm", {"sentence_order_label": [1]}, "sentence_order_label: .*task='pretraining'"),
        ("albert", "pretraining", {"sentence_order_label": [2]}, "sentence_order_label: got 2, expected 0 to 1"),
        ("bert", "pretraining", {"sentence_order_label": [1]}, "sentence_order_label: Bert .* no task of it does"),
        ("roberta", "masked-lm", {"sentence_order_label": [1]}, "sentence_order_label: Roberta .* no task of it does"),
        ("electra", "pretraining", {"sentence_order_label": [1]}, "sentence_order_label: Electra .*no task of it does"),
    ],
)
def test_labels_of_other_pairs_are_refused(name, task, inputs, says):
    given = {key: torch.tensor(value) for key, value in inputs.items()}
    with pytest.raises(ValueError, match=says):
        mc.from_config(f"tiny/{name}", task)(torch.full((1, 4), 3), **given)


def test_more_groups_than_layers_are_refused():
    with pytest.raises(ValueError, match="albert config: num_hidden_groups is 4, expected at most num_hidden_layers=3"):
        mc.from_config("tiny/albert", num_hidden_groups=4)
    with pytest.raises(ValueError, match="inner_group_num is 0, expected a whole number of at least 1"):
        mc.from_config("tiny/albert", inner_group_num=0)


def test_no_dropout_follows_the_feed_forward_network():
    model = mc.from_config("tiny/albert", "sequence-classification", dropout=0.3, classifier_dropout=0.2)
    found = {name: module.p for name, module in model.named_modules() if isinstance(module, Dropout)}
    assert {name: p for name, p in found.items() if p} == {
        "embed_dropout": 0.3, "layers.0.attn_dropout": 0.3, "head.dropout": 0.2
    }  # fmt: skip


def test_a_layer_is_compiled_once_however_often_it_runs():
    from torch._dynamo.testing import CompileCounterWithBackend

    import engine
    from engine.ops import dropout_key, dropout_rows

    model = mc.from_config("tiny/albert", "masked-lm", num_layers=5, policy=False, hidden_dropout_prob=0.3).train()
    batch = pack_rows("masked-lm", rows_for("masked-lm", model.config, lengths=(5, 7)))

    def loss(step):
        with dropout_key(1, step), dropout_rows(torch.arange(2)):
            return model(**batch).loss.item()

    plain = [loss(step) for step in range(3)]
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("eager")
    torch._dynamo.register_backend(backend, "albert_test_counter")
    engine.shard(model, policy=engine.Policy(compile="albert_test_counter"))
    assert [loss(step) for step in range(3)] == pytest.approx(plain, rel=1e-5) and len(set(plain)) == 3
    assert backend.frame_count == 2  # of all tokens, and in the last run of those that are read
