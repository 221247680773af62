"""The task of sparse embeddings: against transformers' masked language models, and the files of a SparseEncoder."""

import json

import pytest
import torch
import transformers

import modelcenter as mc
from modelcenter.compare import pack_rows, pad_rows, rows_for
from modelcenter.hub.info.report import model_info
from modelcenter.testing import assert_same, randomize_

TASK = "sparse-embedding"


def weights_of(logits, mask, pooling="max", activation="relu"):
    """(batch, vocab_size) by plain torch, of logits (batch, seq, vocab_size)."""
    values = logits.relu().log1p()
    values = (values.log1p() if activation == "log1p_relu" else values) * mask[..., None]
    return values.amax(1) if pooling == "max" else values.sum(1)


# Heads: tied with a bias, without a transform and bias, narrower than the states, with further layers before.
FAST = ["bert", "eurobert", "electra"]
REST = ["albert", "deberta", "deberta-v2", "distilbert", "ernie", "esm", "modernbert", "mpnet", "roberta"]


@pytest.mark.parametrize("name", FAST + [pytest.param(name, marks=pytest.mark.full) for name in REST])
def test_weights_and_gradients_of_transformers(name, tmp_path):
    """Of the exported model: what it pools, and the gradients of its table and its head."""
    still = {"dropout": 0.0, "attention_dropout": 0.0} if name not in ("eurobert",) else {}
    ours = randomize_(mc.from_config(f"tiny/{name}", TASK, **still)).train()
    ours.save_pretrained(tmp_path / "model")
    kind = transformers.AutoModelForMaskedLM
    theirs = kind.from_pretrained(tmp_path / "model", attn_implementation="eager").train()
    rows = rows_for("base", ours.config, lengths=(7, 3, 9, 4))
    names = ("input_ids", "attention_mask", "cu_seqlens", "max_seqlen")
    padded, packed = (
        {name: batch[name] for name in names if name in batch}
        for batch in (pad_rows("base", rows), pack_rows("base", rows))
    )
    logits = theirs(**padded).logits
    for pooling, activation in (("max", "relu"), ("sum", "log1p_relu")):
        ours.config.sparse_embedding = {"pooling": pooling, "activation": activation}
        ours.config.__post_init__()
        expected = weights_of(logits, padded["attention_mask"], pooling, activation)
        assert 0.1 < (expected > 0).float().mean()
        factor = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
        tables = [ours.embed.weight, *(p for n, p in ours.named_parameters() if n.startswith("head."))]
        for batch in (padded, packed):
            found = ours(**batch).embeddings
            assert_same("weights", found, expected, 1e-5)
        ours.zero_grad()
        theirs.zero_grad()
        (found * factor).sum().backward()
        (expected * factor).sum().backward(retain_graph=True)
        wanted = theirs.get_input_embeddings().weight.grad
        mine = tables[0].grad.clone()
        if (pad := ours.embed.padding_idx) is not None:
            mine[pad] = wanted[pad] = 0  # a padding token takes part in transformers' look-up
        assert_same("table", mine, wanted, 1e-5)
        norms = sorted(float(p.grad.norm()) for n, p in theirs.named_parameters() if _is_head(n, theirs))
        assert norms == pytest.approx(sorted(float(p.grad.norm()) for p in tables[1:]), rel=1e-4)


def _is_head(name, model):
    body = f"{model.base_model_prefix}."
    return not name.startswith(body)


def test_a_text_without_tokens_is_refused():
    model = mc.from_config("tiny/bert", TASK)
    with pytest.raises(ValueError, match="row 1 of the batch has no token"):
        model(torch.tensor([[5, 6], [5, 6]]), torch.tensor([[1, 1], [0, 0]]))
    with pytest.raises(ValueError, match="labels: Bert of task 'sparse-embedding' does not take it"):
        model(torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]]))


@pytest.fixture
def saved(tmp_path):
    model = randomize_(mc.from_config("tiny/bert", TASK, sparse_embedding={"query_prompt": "query: "}))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rewrite(path, **changes):
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | changes))


def test_files_of_a_sparse_encoder(saved, tmp_path):
    """What is written is read again; and a checkpoint without these files loads by its task."""
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    model = mc.from_pretrained(saved)
    assert model.task == TASK and model.config.sparse_embedding.query_prompt == "query: "
    assert "SparseEncoder" in (saved / "README.md").read_text()
    expected = model(**batch).embeddings
    info = model_info(str(saved))
    assert info["task"] == TASK and info["sparse_embedding"]["pooling"] == "max"
    assert info["parameters"] == model.num_parameters()
    rewrite(saved / "1_SpladePooling" / "config.json", pooling_strategy="sum", activation_function="log1p_relu")
    settings = mc.from_pretrained(saved).config.sparse_embedding
    assert (settings.pooling, settings.activation) == ("sum", "log1p_relu")
    given = mc.from_pretrained(saved, sparse_embedding={"pooling": "max", "activation": "relu"})
    assert torch.equal(given(**batch).embeddings, expected)
    given.save_pretrained(tmp_path / "again")
    assert torch.equal(mc.from_pretrained(tmp_path / "again")(**batch).embeddings, expected)
    mc.from_pretrained(saved, "masked-lm").save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "modules.json").exists()
    assert mc.from_pretrained(tmp_path / "plain").task == "masked-lm"
    assert torch.equal(mc.from_pretrained(tmp_path / "plain", TASK)(**batch).embeddings, expected)
    mc.from_pretrained(saved).save_pretrained(tmp_path / "distributed", format="distributed")
    assert mc.from_pretrained(tmp_path / "distributed").task == TASK


def steps(saved, *kinds):
    """Write these steps, by classes as each version of the library names them."""
    paths = ["", "1_SpladePooling", "2_More"]
    listed = [{"idx": i, "name": str(i), "path": paths[i], "type": kind} for i, kind in enumerate(kinds)]
    (saved / "modules.json").write_text(json.dumps(listed))


OLD, NEW = "sentence_transformers.sparse_encoder.models.", "sentence_transformers.sparse_encoder.modules."
POOLING = f"{NEW}splade_pooling.SpladePooling"


def test_names_of_several_versions(saved):
    rewrite(saved / "sentence_bert_config.json", max_seq_length=77)
    for first, pooling in (
        (f"{OLD}MLMTransformer", f"{OLD}SpladePooling"),
        (f"{NEW}mlm_transformer.MLMTransformer", POOLING),
        ("sentence_transformers.base.modules.transformer.Transformer", POOLING),
    ):
        steps(saved, first, pooling)
        rewrite(saved / "sentence_bert_config.json", transformer_task="fill-mask")
        model = mc.from_pretrained(saved)
        assert model.task == TASK and model.config.sparse_embedding.max_length == 77
    (saved / "config_sentence_transformers.json").unlink()  # known by its steps, too
    assert mc.from_pretrained(saved).task == TASK
    rewrite(saved / "sentence_bert_config.json", transformer_task="feature-extraction")
    with pytest.raises(ValueError, match="transformer_task is 'feature-extraction', expected 'fill-mask'"):
        mc.from_pretrained(saved)


@pytest.mark.parametrize(
    ("kinds", "named"),
    [
        (("sentence_transformers.models.Router",), "Router"),
        (("sentence_transformers.models.Transformer", f"{OLD}SparseAutoEncoder"), "SparseAutoEncoder"),
        ((f"{OLD}SparseStaticEmbedding",), "SparseStaticEmbedding"),
        ((f"{OLD}MLMTransformer", f"{OLD}SpladePooling", "sentence_transformers.models.Normalize"), "Normalize"),
    ],
)
def test_other_steps_are_refused_by_name(saved, kinds, named):
    steps(saved, *kinds)
    if kinds[0].endswith(".Transformer"):
        rewrite(saved / "sentence_bert_config.json", transformer_task="fill-mask")
    with pytest.raises(ValueError, match=f"{named} is not supported"):
        mc.from_pretrained(saved)
    assert f"{named} is not supported" in model_info(str(saved))["sparse_embedding"]["unsupported"]


def test_settings_are_checked(saved):
    for given, said in (
        ({"pooling": "mean"}, "pooling is 'mean', expected max or sum"),
        ({"activation": "gelu"}, "activation is 'gelu', expected relu or log1p_relu"),
        ({"similarity": "l2"}, "similarity is 'l2', expected cosine or dot"),
        ({"max_length": 0}, "max_length is 0, expected a number of tokens above 0"),
        ({"query_prompt": 1}, "query_prompt is 1, expected a text"),
        ({"pool": "max"}, "unknown field 'pool'. Did you mean 'pooling'"),
        ("max", "got 'max', expected fields"),
    ):
        with pytest.raises(ValueError, match=f"sparse_embedding: {said}"):
            mc.from_pretrained(saved, sparse_embedding=given)
    rewrite(saved / "1_SpladePooling" / "config.json", pooling_strategy="mean")
    with pytest.raises(ValueError, match="pooling_strategy is 'mean', expected max or sum"):
        mc.from_pretrained(saved)
