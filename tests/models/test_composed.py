"""Encoders and decoders that were made apart, against transformers' EncoderDecoderModel."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import toydata
from encoder_decoder_mutations import OF_BOTH_SIDES
from harness import ArchitectureTests, assert_same, randomize_
from safetensors.torch import load_file, save_file
from seq2seq_toys import WORDS, write_folder
from toydata import command
from transformers import BertTokenizer, EncoderDecoderModel

import modelcenter as mc
from modelcenter.cli import run as cli
from modelcenter.compare import IGNORE, hub_class, pad_rows
from modelcenter.hub.conversion import convert
from scripts.finetune_seq2seq import main

READER = {
    "model_type": "bert",
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 37,
    "type_vocab_size": 3,
    "layer_norm_eps": 1e-2,
}
WRITER = {
    **READER,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "is_decoder": True,
    "add_cross_attention": True,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 131,
    "n_embd": 36,
    "n_layer": 3,
    "n_head": 4,
    "n_inner": 60,
    "n_positions": 31,
    "layer_norm_epsilon": 1e-2,
    "is_decoder": True,
    "add_cross_attention": True,
}
TOKENS = {"pad_token_id": 0, "decoder_start_token_id": 5, "eos_token_id": 6, "model_type": "encoder-decoder"}
AFTER_PADDING = ("roberta", "xlm-roberta", "camembert")
OF_ROBERTA = {"model_type": "roberta", "pad_token_id": 2, "hidden_act": "silu"}
OF_CAMEMBERT = {"model_type": "camembert", "pad_token_id": 2}


class Composed(ArchitectureTests):
    has_positions = False
    mutations = OF_BOTH_SIDES
    test_base_matches_transformers = None  # type: ignore[assignment]
    most = 0  # tokens of the longest label

    def reference(self, task, folder, **fields):
        config, sides = hub_class("encoder-decoder", task).config_class, {}
        for side in ("encoder", "decoder"):
            own = self.hf_config[side]
            gpt = own["model_type"] == "gpt2"
            dropouts = ("resid_pdrop", "embd_pdrop", "attn_pdrop") if gpt else self.no_dropout
            p = fields.get("hidden_dropout_prob", 0.0)
            sides[side] = {**own, **dict.fromkeys(dropouts, p)}
        more = {name: value for name, value in self.hf_config.items() if name not in (*sides, "model_type")}
        theirs = randomize_(hub_class("encoder-decoder", task)(config(**sides, **more)))
        theirs.tie_weights()
        theirs.eval().save_pretrained(folder)
        return theirs

    def rows(self, task, config, lengths=None, seed=0):
        """A padding token among the inputs has no position in RoBERTa; transformers hides one from the decoder, and
        with it a label that is left out in the middle."""
        rows = super().rows(task, config, lengths, seed)
        for row in rows:
            row.input_ids[:] = [7 if token == config.pad_token_id else token for token in row.input_ids]
            row.labels[:] = [9 if label in (config.pad_token_id, IGNORE) else label for label in row.labels]
        self.most = max(len(row.labels) for row in rows)
        return rows

    def run_group(self, theirs, task, group, longest, side):
        batch = pad_rows(task, group)
        counts = {"encoder": (len(group[0].input_ids), longest), "decoder": (len(group[0].labels), self.most)}
        for name, (n, most) in counts.items():
            if self.hf_config[name]["model_type"] not in AFTER_PADDING:  # whose positions do not count padding
                prefix = "decoder_" if name == "decoder" else ""
                batch[f"{prefix}position_ids"] = torch.arange(n)[None] + (most - n)
        return theirs(**batch)


class TestBertAndGPT2(Composed):
    """Of two widths, with a layer between them."""

    hf_config = {"encoder": READER, "decoder": GPT2, **TOKENS}
    test_two_ranks_equal_one = test_bfloat16 = test_distributed_checkpoint = None  # type: ignore[assignment]
    test_gradients_do_not_depend_on_the_cut = None  # type: ignore[assignment]


class TestTwoBerts(Composed):
    hf_config = {"encoder": READER, "decoder": WRITER, **TOKENS}
    test_matches_transformers = test_dropout = test_empty_batch = None  # type: ignore[assignment]
    test_ranks_that_share_a_batch = None  # type: ignore[assignment]
    test_bfloat16 = test_parity_notices = test_gradients_do_not_depend_on_the_cut = None  # type: ignore[assignment]
    test_training_leaves_vocabulary_logits_out = test_distributed_checkpoint = None  # type: ignore[assignment]


@pytest.mark.full
class TestTwoBertsWhole(Composed):
    hf_config = TestTwoBerts.hf_config


@pytest.mark.full
class TestTwoRobertas(Composed):
    hf_config = {"encoder": READER | OF_ROBERTA, "decoder": WRITER | OF_ROBERTA, **TOKENS, "pad_token_id": 2}


@pytest.mark.full
class TestTwoCamemberts(Composed):
    hf_config = {"encoder": READER | OF_CAMEMBERT, "decoder": WRITER | OF_CAMEMBERT, **TOKENS, "pad_token_id": 2}


@pytest.mark.full
class TestXLMRobertaAndBert(Composed):
    hf_config = {"encoder": READER | {"model_type": "xlm-roberta", "pad_token_id": 2}, "decoder": WRITER, **TOKENS}


@pytest.fixture
def pair(tmp_path):
    theirs = TestBertAndGPT2().reference("seq2seq-lm", tmp_path)
    return theirs, mc.from_pretrained(tmp_path)


def test_what_a_side_is_given(pair):
    """Token types and positions of the encoder, embeddings, states that another forward gave: as transformers."""
    theirs, ours = pair
    rng = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(7, 131, shape, generator=rng) for shape in ((3, 6), (3, 4)))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 2 + [0] * 4])
    batch = {"attention_mask": mask, "labels": labels}
    more = {"token_type_ids": torch.randint(0, 3, (3, 6), generator=rng), "position_ids": torch.arange(6)[None] + 4}
    wanted, found = (model(input_ids=ids, **batch, **more) for model in pair)
    assert_same("loss", found.loss, wanted.loss, 1e-5)
    assert_same("states", found.encoder_last_hidden_state[0], wanted.encoder_last_hidden_state[0], 1e-5)
    again = ours(encoder_outputs=(found.encoder_last_hidden_state,), **batch)
    assert_same("loss of given states", again.loss, wanted.loss, 1e-5)
    embeds = torch.randn(3, 6, 48, generator=rng)
    wanted, found = (
        model(inputs_embeds=embeds, decoder_position_ids=torch.arange(4)[None] + 3, **batch) for model in pair
    )
    assert_same("loss of embeddings", found.loss, wanted.loss, 1e-5)


def test_dropouts_of_the_sides_are_not_the_same(pair):
    """Each has a number of its own by which it draws."""
    _, ours = pair
    ours.train()(torch.ones(1, 3, dtype=torch.long), labels=torch.ones(1, 2, dtype=torch.long))
    sites = [module.site for module in ours.modules() if getattr(module, "site", None) is not None]
    assert len(sites) > 20 and len(set(sites)) == len(sites)


def test_wrong_inputs_are_named(pair, tmp_path):
    _, ours = pair
    ids = torch.ones(2, 3, dtype=torch.long)
    config = {"encoder": READER, "decoder": GPT2, "model_type": "encoder-decoder"}
    with pytest.raises(ValueError, match="decoder_start_token_id is None, expected a token"):
        mc.from_config(config, "seq2seq-lm", pad_token_id=0)(ids, labels=ids)
    for changes, message in (
        ({"decoder": READER}, "decoder is .*expected one with cross_attention"),
        ({"encoder": WRITER}, "encoder is .*with is_decoder false"),
        ({"encoder": GPT2}, "encoder is .*but gpt2"),
        ({"encoder": {"model_type": "t5"}}, "'encoder': got a model_type 't5', expected one of bert, roberta"),
        ({"decoder": {**GPT2, "n_layers": 2}}, "decoder: config field not understood: 'n_layers'"),
    ):
        with pytest.raises(ValueError, match=message):
            mc.from_config({**config, **changes}, "seq2seq-lm")
    with pytest.raises(ValueError, match="logits_to_keep: got 3"):
        ours(ids, labels=ids, logits_to_keep=3)
    with pytest.raises(ValueError, match=r"^decoder_position_ids: got shape \(2, 2\), expected \(2, 3\)"):
        ours(ids, decoder_input_ids=ids, decoder_position_ids=ids[:, :2])
    with pytest.raises(ValueError, match="2 sequences and the decoder 1"):
        ours(ids, decoder_input_ids=ids[:1])
    two = mc.from_config({**config, "decoder": {**GPT2, "vocab_size": 97}}, "seq2seq-lm")
    with pytest.raises(ValueError, match="the encoder has 131 words and the decoder 97"):
        two.resize_token_embeddings(140)


@pytest.mark.parametrize("files", ["hf", "distributed"])
def test_checkpoints_of_2020(files, tmp_path):
    """As transformers 3 wrote them: the sides shared, a pooler at the decoder, none at the encoder."""
    two = {"encoder": READER, "decoder": WRITER, **TOKENS}
    ours, path = mc.from_config(two, "seq2seq-lm"), tmp_path / "old"
    ours.save_pretrained(path)
    held, values = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    for leaf in ("weight", "bias"):
        held[f"decoder.bert.pooler.dense.{leaf}"] = held.pop(f"encoder.pooler.dense.{leaf}")
    save_file(held, path / "model.safetensors")
    values["decoder"]["tie_encoder_decoder"] = True
    values |= {"model_type": "encoder_decoder", "tie_encoder_decoder": True}
    (path / "config.json").write_text(json.dumps(values))
    if files == "distributed":
        convert(path, tmp_path / "shards", "distributed", workers=1)
        path = tmp_path / "shards"
    again = mc.from_pretrained(path)
    assert again.load_report.initialised == ["encoder.pooler.weight", "encoder.pooler.bias"]
    assert not again.load_report.unknown
    for (name, found), wanted in zip(again.named_parameters(), ours.parameters(), strict=True):
        assert "pooler" in name or torch.equal(found, wanted), name
    again.save_pretrained(tmp_path / "new")
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert written["model_type"] == "encoder-decoder" and "tie_encoder_decoder" not in json.dumps(written)


def test_a_tokenizer_that_names_no_end_of_a_text(tmp_path):
    """BERT's: what separates texts ends those that the model writes. Of a bare BERT it stays as it is."""
    tokenizer = toydata.make_tokenizer()
    for name, end in (("tiny/encoder-decoder", "[SEP]"), ("tiny/bert", None)):
        mc.from_config(name, "seq2seq-lm" if end else None).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        assert mc.AutoTokenizer.from_pretrained(tmp_path / name).eos_token == end
        repo = tmp_path / "hub" / f"models--me--{name[5:]}"  # as huggingface_hub keeps what it downloaded
        shutil.copytree(tmp_path / name, repo / "snapshots" / ("0" * 40))
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("0" * 40)
        by_id = mc.AutoTokenizer.from_pretrained(f"me/{name[5:]}", cache_dir=tmp_path / "hub", local_files_only=True)
        assert by_id.eos_token == end


@pytest.mark.full
def test_a_run_to_its_end(tmp_path):
    """finetune seq2seq, predict, and what transformers writes with the export."""
    folder, start = write_folder(tmp_path), tmp_path / "start"
    tokenizer = BertTokenizer(
        vocab={w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    )
    sizes = {"hidden_size": 24, "num_layers": 1, "num_heads": 3, "intermediate_size": 32, "vocab_size": len(tokenizer)}
    sides = {"encoder": {**sizes, "model_type": "bert"}}
    sides["decoder"] = {**sides["encoder"], "is_decoder": True, "cross_attention": True}
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 3}
    mc.from_config({**sides, **tokens, "model_type": "encoder-decoder"}, "seq2seq-lm").save_pretrained(start)
    tokenizer.save_pretrained(start)
    values = {"model": str(start), "tokenizer": str(start), "prefix": "", "epochs": 4, "lr": 1e-2, "max_new_tokens": 9}
    values = toydata.flags(folder, **values, model_config=toydata.STILL)
    del values["from_scratch"]
    main(command(values))
    out = Path(values["output_dir"])
    losses = [json.loads(line).get("loss") for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < 0.7 * losses[0]
    cli(["predict", str(out), "--data", str(folder / "data" / "dev.jsonl"), "--output", str(tmp_path / "p.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    model, tokenizer = EncoderDecoderModel.from_pretrained(out / "model"), BertTokenizer.from_pretrained(out / "model")
    for row in rows:
        ids = tokenizer(row["source"], return_tensors="pt").input_ids
        found = model.generate(ids, max_new_tokens=9, do_sample=False)
        assert tokenizer.decode(found[0], skip_special_tokens=True) == row["prediction"]
