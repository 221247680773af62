"""config.json as publishers and each era of transformers wrote it: as it lies there it makes the model of its size."""

import json
from pathlib import Path

import pytest
import transformers

import modelcenter as mc
from modelcenter import registry
from modelcenter.hub import architecture
from modelcenter.hub.info import model_info
from modelcenter.hub.resolve import read_config, resolve

FILES = Path(__file__).parent / "configs"  # names and values as published, the number at the end is transformers'

# Parameters of the bare model as they were published or counted by others.
PARAMETERS = {
    "albert-base-v1-4.12": 11_683_584,
    "albert-base-v2-4.1": 11_683_584,
    "albert-large-squad2-4.9": 17_683_968,
    "bart-base-4.12": 139_420_416,
    "bart-kobart-summary-v3-4.38": 123_859_968,
    "bart-large-cnn-4.7": 406_290_432,
    "bart-large-mnli-4.7": 406_291_456,
    "marian-cg-conala-large-4.30": 78_456_832,
    "mbart-trimmed-cc25-4.22": 92_801_024,  # one matrix of words, which the sides shared then
    "bert-base-cased-2.5": 108_310_272,
    "bert-base-chinese-4.19": 102_267_648,
    "bert-base-uncased-5.12": 109_482_240,
    "bert-cross-encoder-4.49": 22_713_216,
    "bert-large-conll03-4.6": 333_579_264,
    "bert-tinybert-4l-312d-2": 14_350_248,
    "bloom-3b-4.20": 3_002_557_440,
    "bloom-560m-classifier-4.40": 559_214_592,
    "bloom-7b1-4.21": 7_069_016_064,
    "camembert-base-emotexttokids-5.0": 110_621_952,
    "deberta-large-3": 405_163_008,
    "deberta-v2-xlarge-4": 884_593_152,
    "deberta-v3-base-4": 183_831_552,
    "deberta-v3-base-nli-4.13": 183_831_552,
    "distilbert-multilingual-2": 134_734_080,
    "distilbert-sst2-2.11": 66_362_880,
    "distilbert-sst2-4.52": 66_362_880,
    "distilgpt2-4.5": 81_912_576,
    "electra-base-generator-4.6": 33_511_168,
    "electra-small-danish-4.11": 13_672_192,
    "electra-small-discriminator-2": 13_483_008,
    "ernie-1.0-base-zh-4.20": 99_866_112,
    "ernie-3.0-base-zh-4.20": 117_944_832,
    "ernie-3.0-nano-zh-4.20": 17_908_176,
    "eurobert-2.1b-5.5": 2_107_590_912,
    "eurobert-210m-4.40": 211_766_016,
    "eurobert-610m-classifier-4.49": 607_874_688,
    "gemma2-2b-it-5.5": 2_614_341_888,
    "gemma2-9b-4.42": 9_241_705_984,
    "gpt-j-6b-4.18": 5_844_393_984,
    "gpt-neox-h2ogpt-12b-4.30": 11_586_549_760,
    "embeddinggemma-300m-4.57": 302_863_104,
    "embeddinggemma-300m-tuned-5.5": 302_863_104,
    "gte-base-en-v1.5-4.39": 136_776_192,
    "gte-large-en-v1.5-4.39": 434_139_136,
    "gte-multilingual-base-4.39": 305_368_320,
    "gte-multilingual-reranker-4.39": 305_368_320,
    "gte-snowflake-arctic-m-v2.0-4.39": 305_368_320,
    "esm1b-t33-650m-4.25": 652_356_501,
    "esm2-t33-650m-4.25": 651_040_661,
    "esm2-t6-8m-tokens-5.24": 7_511_801,
    "gemma-1.1-7b-it-4.40": 8_537_680_896,
    "gemma-2b-4.38": 2_506_172_416,
    "gemma-3-1b-it-4.50": 999_885_952,
    "gemma-3-270m-it-4.55": 268_098_176,
    "gpt2-3.0": 124_439_808,
    "gpt2-medium-4.35": 354_823_168,
    "llama-3-8b-4.57": 7_504_924_672,
    "llama-3.2-1b-4.51": 1_235_814_400,
    "llama-7b-4.32": 6_607_343_616,
    "llama-smollm2-1.7b-4.42": 1_711_376_384,
    "llama-smollm2-135m-4.48": 134_515_008,
    "minicpm-2b-4.36": 2_724_880_896,
    "mistral-7b-instruct-4.34": 7_110_660_096,
    "mistral-small-24b-5.10": 22_901_314_560,
    "modernbert-base-4.47": 149_014_272,
    "modernbert-decoder-random-5.16": 1_626_272,
    "modernbert-ettin-17m-colbert-4.57": 16_797_952,  # with two more words
    "mpnet-all-base-v2-4.8": 109_486_464,
    "mpnet-base-4.1": 109_486_464,
    "mpnet-paraphrase-base-v2-4.7": 109_486_464,
    "mt5-small-4.5": 172_119_424,
    "nomic_bert-2048-4.34": 136_731_648,
    "nomic_bert-embed-text-v1.5-4.37": 136_731_648,
    "nomic_bert-embed-text-v1.5-5.5": 136_731_648,
    "nomic_bert_moe-embed-text-v2-4.44": 475_292_928,
    "opt-125m-4.27": 125_239_296,
    "opt-6.7b-4.20": 6_658_473_984,
    "pegasus-large-4.11": 570_797_056,
    "phi-3-mini-4k-4.40": 3_722_578_944,
    "pythia-6.9b-4.45": 6_650_732_544,
    "qwen2-deepseek-r1-7b-4.44": 7_070_619_136,
    "qwen2-qwen1.5-0.5b-4.57": 463_987_712,
    "qwen3-embedding-0.6b-4.51": 595_776_512,
    "roberta-base-4.48": 124_645_632,
    "roberta-base-squad2-2": 124_645_632,
    "t5-small-2": 60_506_624,
    "t5-v1_1-base-4.33": 222_903_552,
    "t5gemma-2b-2b-ul2-4.52": 5_596_853_760,
    "umt5-pile-t5-xl-4.36": None,  # its encoder alone
    "xlm-roberta-bge-m3-4.33": 567_754_752,
    "xlm-roberta-large-4.52": 559_890_432,
}


def test_every_file_is_read():
    assert {path.stem for path in FILES.iterdir()} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_config_makes_the_published_model(name):
    values = json.loads((FILES / f"{name}.json").read_text())
    spec = architecture.find_spec(values, None, name)
    arch = spec.arch_map()
    head = architecture.choose_task(arch, None if "architectures" in values else "base", values, name)
    task = head if head == "text-encoding" else "base"
    config = architecture.parse_config(spec, task, values, {}, name)
    count = sum(p.numel() for p in architecture.on_meta(spec, config, task).parameters())
    assert PARAMETERS[name] in (None, count)


def preset(kind):
    return registry.preset(f"tiny/{kind}")["config"]


@pytest.mark.parametrize(
    "kind, notes",
    [
        (
            "bert",
            {"_attn_implementation_autoset": True, "_name_or_path": "runs/mine", "_of_a_version_to_come": {"a": 1}},
        ),
        ("bert", {"adapters": {"adapters": {}}, "embedding_size": 48, "tokenizer_class": "BertTokenizer"}),
        (
            "gpt2",
            {"author": "J. Doe", "created_date": "2021-04-28", "license": "CC-BY-NC-SA 4.0", "type_vocab_size": 0},
        ),
        ("opt", {"_remove_final_layer_norm": False, "badwordsids": [[2]], "newlinemode": "s", "welcome": "Hello"}),
        ("opt", {"learned_embeddings": True, "scale_embeddings": False}),
        ("llama", {"attention_probs_dropout_prob": 0.1, "type_vocab_size": 16, "partial_rotary_factor": 1.0}),
        ("gpt_neox", {"custom_pipeline": {"text-generation": {}}, "partial_rotary_factor": 0.5, "rope_theta": 500}),
        ("gpt_neox", {"attention_probs_dropout_prob": 0.1, "num_steps": "global_step320000"}),
        ("t5", {"max_new_tokens": 20, "forced_decoder_ids": None, "unk_token_id": 2}),
        ("encoder-decoder", {"vocab_size": 131, "max_length": 64, "early_stopping": True, "num_beams": 4}),
    ],
)
def test_notes_change_nothing(kind, notes):
    """They are kept, or said by a field that the model has."""
    plain, noted = (mc.from_config(preset(kind) | more).config for more in ({}, notes))
    kept = {name for name in notes if name in noted.extra}
    assert noted == plain.replace(extra={**plain.extra, **{name: notes[name] for name in kept}})
    said = {"partial_rotary_factor", "rope_theta", "_remove_final_layer_norm"} if kind != "llama" else set()
    assert set(notes) - kept <= said | {"vocab_size", "_name_or_path"}


@pytest.mark.parametrize(
    "kind, field, says",
    [
        ("opt", {"scale_embeddings": True}, "'scale_embeddings': got True"),
        ("llama", {"rope_interleaved": True}, "'rope_interleaved': got True"),
        ("qwen3", {"is_causal": False}, "'is_causal': got False"),
        ("llama", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor': got 0.5"),
        ("gpt_neox", {"rope_theta": 7.0}, "'rotary_emb_base' is 500.*, but 'rope_theta' is 7.0"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5, but here every channel is rotated",
        ),
        ("gpt2", {"attn_pdrop": None}, "gpt2 config: attn_pdrop is None, expected a number"),
        ("llama", {"rms_norm_eps": None}, "llama config: rms_norm_eps is None, expected a number"),
        ("minicpm", {"scale_depth": None}, "scale_depth is None, expected a number"),
        ("bert", {"pad_token_id": 131}, "bert config: pad_token_id is 131, expected one of 131 tokens"),
        ("opt", {"pad_token_id": 999}, "opt config: pad_token_id is 999, expected one of 131 tokens"),
    ],
)
def test_values_that_would_compute_something_else(kind, field, says):
    with pytest.raises(ValueError, match=says):
        mc.from_config(preset(kind) | field)


@pytest.mark.parametrize(
    "kind, field", [("t5", "decoder_start_token_id"), ("t5", "classifier_dropout"), ("bert", "initializer_range")]
)
def test_null_where_nothing_is_said(kind, field):
    """As version 4 writes T5's whole config."""
    values = {name: value for name, value in preset(kind).items() if name != field}
    assert mc.from_config(values | {field: None}).config == mc.from_config(values).config


def test_null_for_no_dropout_of_llama():
    assert mc.from_config(preset("llama") | {"attention_dropout": None}).config.attention_dropout == 0.0


def test_a_checkpoint_that_transformers_saved_with_its_private_notes(tmp_path):
    """As Trainer of 4.46 to 4.49 did."""
    theirs = transformers.BertConfig(**{k: v for k, v in preset("bert").items() if k != "model_type"})
    transformers.BertForMaskedLM(theirs).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    notes = {"_attn_implementation_autoset": True, "transformers_version": "4.48.3"}
    (tmp_path / "config.json").write_text(json.dumps(values | notes))
    model = mc.from_pretrained(tmp_path)
    assert model.task == "masked-lm" and model.load_report.initialised == []
    assert model.config.extra.items() >= notes.items()


def test_a_config_that_says_its_class_alone(tmp_path):
    """MiniCPM's files name no model_type, nor do those of some early BERTs."""
    mc.from_config("tiny/minicpm", "causal-lm").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert mc.from_pretrained(tmp_path).config.model_type == "minicpm"
    assert model_info(str(tmp_path))["model_type"] == resolve(tmp_path).config["model_type"] == "minicpm"
    assert read_config(tmp_path / "config.json")["model_type"] == "minicpm"
    del values["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    says = "has no model_type.*model_type='bert' in from_pretrained.*Known: albert, bert, "
    with pytest.raises(ValueError, match=says):
        mc.from_pretrained(tmp_path, "causal-lm")
    assert mc.from_pretrained(tmp_path, "causal-lm", model_type="minicpm").config.model_type == "minicpm"
