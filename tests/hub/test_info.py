"""`modelcenter info`: counts against models that are built, memory against sharded ones, and nothing heavy imported."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine
import modelcenter as mc
from engine import testing
from modelcenter import cli
from modelcenter.hub.info import model_info, render
from modelcenter.hub.info.components import component, components_of_file
from modelcenter.hub.info.memory import training_bytes
from modelcenter.hub.info.parameter_counts import body_sizes, task_sizes
from modelcenter.hub.info.stored_files import describe_files
from modelcenter.hub.remote.download import HubOptions
from modelcenter.registry import ARCHITECTURES, get, preset, preset_names

TINY = [name for name in preset_names() if name.startswith("tiny/")]


def counted(model) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        found[component(name)] = found.get(component(name), 0) + parameter.numel()
    return found


def test_every_preset_is_counted_from_its_config():
    """Against the number that the preset states, which its own test has from the model."""
    assert len(preset_names()) > 80
    for name in preset_names():
        entry = preset(name)
        if entry["parameters"] is None:  # sizes that nobody published
            with pytest.raises(ValueError, match="lacks hidden_size, so its size is not known"):
                body_sizes(entry["config"])
            continue
        named = get(entry["config"]["model_type"]).arch_map().declared_task(entry["config"].get("architectures"))
        encoder = task_sizes(entry["config"], named) if named == "text-encoding" else None
        assert sum((encoder or body_sizes(entry["config"])).values()) == entry["parameters"], name


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("tied", [None, *(pytest.param(tied, marks=pytest.mark.full) for tied in (True, False))])
def test_components_are_those_of_the_model(name, tied):
    """Of every task whose head a config decides, against the model that is built."""
    if name in ("tiny/cpmbee", "tiny/nomic_bert_moe") and tied is False:
        return  # its head is the embedding; CPM-Bee's whatever a config says, and the other refuses this
    config = dict(preset(name)["config"]) | ({} if tied is None else {"tie_word_embeddings": tied})
    tasks = [task for task in get(config["model_type"]).arch_map().tasks if task_sizes(config, task) is not None]
    assert "base" in tasks or name == "tiny/encoder-decoder"  # which has one task
    for task in tasks:
        assert task_sizes(config, task) == counted(mc.from_config(config, task)), task


@pytest.mark.parametrize("changes", [{"attention_bias": True, "mlp_bias": True}, {"head_dim": 10}])
def test_fields_that_change_sizes(changes):
    config = {**preset("tiny/llama")["config"], **changes}
    assert body_sizes(config) == counted(mc.from_config(config))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("opt", {"do_layer_norm_before": False, "enable_bias": False}),
        ("opt", {"word_embed_proj_dim": 48, "_remove_final_layer_norm": True}),
        ("gpt_neox", {"attention_bias": False}),
        ("gpt2", {"n_inner": None}),
        ("minicpm3", {"attention_bias": True, "q_lora_rank": None}),
        ("t5", {"feed_forward_proj": "gated-gelu", "num_decoder_layers": None}),
        ("qwen3", {"attention_bias": True}),
        ("gemma", {"attention_bias": True, "num_key_value_heads": 3}),
        ("gemma3_text", {"attention_bias": True, "head_dim": 12}),
        ("modernbert", dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)),
        ("modernbert-decoder", dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)),
        ("deberta", {"relative_attention": False, "position_biased_input": True, "type_vocab_size": 2}),
        ("deberta", {"embedding_size": 20, "pos_att_type": "p2c", "max_relative_positions": 5}),
        ("deberta-v2", {"relative_attention": False, "position_biased_input": True, "type_vocab_size": 2}),
        ("deberta-v2", {"embedding_size": 20}),
        (
            "deberta-v2",
            {"share_att_key": False, "pos_att_type": ["p2c"], "position_buckets": -1, "conv_kernel_size": 3}
            | {"norm_rel_ebd": "none"},
        ),
        ("electra", {"embedding_size": 48, "is_decoder": True, "add_cross_attention": True}),
        ("ernie", {"use_task_id": False, "is_decoder": True, "add_cross_attention": True}),
        ("eurobert", {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "tie_word_embeddings": True}),
        ("nomic_bert", {"head_dim": 10, "type_vocab_size": 3}),
        ("nomic_bert_moe", {"num_experts": 0}),
        ("nomic_bert_moe", {"n_layer": 6, "moe_every_n_layers": 3, "moe_top_k": 4}),
        ("gte", {"type_vocab_size": 0}),
        ("granite", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
        ("olmo2", {"attention_bias": True, "head_dim": 10}),
        ("mixtral", {"num_local_experts": 3, "head_dim": 8}),
        ("olmoe", {"attention_bias": True, "num_experts": 4}),
        ("granitemoe", {"attention_bias": True, "num_local_experts": 4}),
        ("qwen2_moe", {"qkv_bias": False, "decoder_sparse_step": 2, "mlp_only_layers": None}),
        ("qwen3_moe", {"attention_bias": True, "num_experts": 4, "mlp_only_layers": [1, 2]}),
        ("phi3", {"head_dim": 10, "rope_scaling": None, "partial_rotary_factor": 0.6}),
        ("smollm3", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
        ("gemma2", {"attention_bias": True, "head_dim": 12, "num_key_value_heads": 3}),
        (
            "t5gemma",
            {"decoder": preset("tiny/t5gemma")["config"]["decoder"] | {"hidden_size": 36, "attention_bias": True}},
        ),
        ("albert", {"embedding_size": 48, "num_hidden_groups": 2, "inner_group_num": 3}),
    ],
)
def test_fields_of_families(name, changes):
    config = {**preset(f"tiny/{name}")["config"], **changes}
    assert body_sizes(config) == counted(mc.from_config(config))
    if name in ("deberta", "deberta-v2", "eurobert", "modernbert", "modernbert-decoder"):
        config |= {"decoder_bias": False} if name.startswith("modernbert") else {}
        task = "causal-lm" if name == "modernbert-decoder" else "masked-lm"
        assert task_sizes(config, task) == counted(mc.from_config(config, task))


@pytest.mark.parametrize("name", ["granitemoe", "mixtral", "nomic_bert_moe", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_parameters_that_a_token_passes_through(name, tmp_path):
    """All but the experts that have no gradient."""
    model = mc.from_config(f"tiny/{name}", "masked-lm" if name == "nomic_bert_moe" else "causal-lm").train()
    model(torch.tensor([[7]]), output_logits=True).logits.sum().backward()
    unused = 0
    for parameter_name, parameter in model.named_parameters():
        if ".experts." in parameter_name:
            unused += sum(matrix.numel() for matrix in parameter.grad if not matrix.any())
    model.save_pretrained(tmp_path)
    about = model_info(str(tmp_path))
    assert unused > 0 and about["active_parameters"] == model.num_parameters() - unused
    assert f"active       {about['active_parameters']:,}, those that a token passes through\n" in render(about)
    assert {"num_experts", "experts_per_token"} < set(about["sizes"])


def test_every_token_passes_through_all_of_a_dense_model():
    about = model_info("gpt2")
    assert about["active_parameters"] == about["parameters"] and "active" not in render(about)


@pytest.mark.parametrize(
    "name",
    [
        *"bert roberta xlm-roberta camembert data2vec-text distilbert electra albert ernie".split(),
        *"deberta longformer led mpnet nomic_bert nomic_bert_moe gte".split(),
    ],
)
def test_sizes_that_a_config_leaves_out(name):
    left_out = ["max_position_embeddings", "type_vocab_size", "embedding_size", "num_hidden_groups", "inner_group_num"]
    left_out += ["task_type_vocab_size", "max_encoder_position_embeddings", "max_decoder_position_embeddings"]
    config = {field: value for field, value in preset(f"tiny/{name}")["config"].items() if field not in left_out}
    assert body_sizes(config) == counted(mc.from_config(config))


# Among whose names in files are those of each kind: of joined tensors, several stacks, two models, buffers.
NAMES = {f"tiny/{kind}" for kind in ("bert", "gpt2", "t5", "encoder-decoder", "esm", "deberta-v2", "cpmbee")}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in NAMES else pytest.mark.full) for name in TINY])
def test_files_are_counted_by_their_headers(name, tmp_path):
    """Names in files, through the rules, are of the components that our names say; for every task."""
    kind = name.removeprefix("tiny/")
    for task in get(preset(name)["config"]["model_type"]).arch_map().tasks:
        model = mc.from_config(name, task)
        model.save_pretrained(tmp_path / task, max_shard_size="60KB")
        about = model_info(str(tmp_path / task))
        held = about["components"]
        assert held == {key: n for key, n in counted(model).items() if n}, (kind, task)
        assert about["counted_from"] == "files" and about["parameters"] == model.num_parameters()
        assert about["stored"]["bytes"] == sum(p.stat().st_size for p in (tmp_path / task).glob("*.safetensors"))
        written = sum(t.numel() for p in (tmp_path / task).glob("*.safetensors") for t in load_file(p).values())
        assert about["stored"]["dtypes"] == {"F32": written}
        assert about["task"] == task


def test_copies_and_buffers_are_no_parameters():
    arch = get("bert").arch_map()
    names = ["cls.predictions.decoder.weight", "bert.embeddings.position_ids", "bert.embeddings.LayerNorm.gamma", "x"]
    assert list(components_of_file(names, {}, arch).values()) == [None, None, "norms", "other"]
    untied = components_of_file(names[:1], {"tie_word_embeddings": False}, arch)
    assert list(untied.values()) == ["head"]


def test_directories(tmp_path, capsys):
    """bf16 in shards; one shard away; a pickle; a distributed checkpoint; a run; labels; nothing of weights."""
    model = mc.from_config("tiny/bert", "sequence-classification", id2label=["bad", "good", "so so"])
    run = tmp_path / "run"
    model.save_pretrained(run / "model", dtype="bfloat16", max_shard_size="60KB")
    (run / "config.yaml").write_text("{}")
    about = model_info(str(run))
    assert about["dtype"] == "bfloat16" and set(about["stored"]["dtypes"]) == {"BF16"}
    assert about["labels"] == ["bad", "good", "so so"]
    config = json.loads((run / "model" / "config.json").read_text())
    config |= {"id2label": None, "label2id": {"so so": 2, "bad": 0, "good": 1}}
    (run / "model" / "config.json").write_text(json.dumps(config))
    assert model_info(str(run))["labels"] == about["labels"]
    shards = sorted((run / "model").glob("model-*"))
    shards[0].unlink()
    about = model_info(str(run))
    assert about["stored"]["missing"] == 1 and about["counted_from"] == "config, without its head"
    assert "INCOMPLETE: 1 files are missing" in render(about)
    model.save_pretrained(tmp_path / "shards", format="distributed")
    about = model_info(str(tmp_path / "shards"))
    assert about["source"] == "distributed checkpoint" and about["stored"]["format"] == "distributed"
    assert about["stored"]["bytes"] >= 4 * model.num_parameters()
    model.save_pretrained(tmp_path / "pickled")
    torch.save(load_file(tmp_path / "pickled/model.safetensors"), tmp_path / "pickled/pytorch_model.bin")
    (tmp_path / "pickled/model.safetensors").unlink()
    assert describe_files(tmp_path / "pickled", {})["format"] == "pickle"
    (tmp_path / "pickled/pytorch_model.bin").unlink()
    assert "no weights" in render(model_info(str(tmp_path / "pickled")))
    mc.from_config("tiny/bert", "embedding").save_pretrained(tmp_path / "vectors")
    about = model_info(str(tmp_path / "vectors"))
    assert (about["task"], about["architectures"]) == ("embedding", ["BertModel"])


def test_an_architecture_of_somebody_else(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "funnel", "architectures": ["FunnelModel"]}')
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "model.safetensors")
    about = model_info(str(tmp_path))
    assert about["parameters"] == 17 and about["components"] == {"other": 17} and about["tasks"] == []
    (tmp_path / "model.safetensors").unlink()
    about = model_info(str(tmp_path))
    assert about["parameters"] is None and about["memory"] is None
    assert "'funnel' is not an architecture known here" in render(about)
    (tmp_path / "config.json").write_text('{"dim_model": 24, "num_layers": 2}')
    assert "its config has no model_type; for original ModelCenter" in render(model_info(str(tmp_path)))


def test_presets_say_where_they_are_from(monkeypatch):
    assert "source       preset of google-bert/bert-base-uncased; confirmed\n" in render(
        model_info("bert-base-uncased")
    )
    assert "preset of no weights; from_config initialises it at random; confirmed\n" in render(model_info("cpm-bee-3b"))
    nothing = "preset of no weights and no sizes; load it from a directory with its own config.json; UNCONFIRMED"
    assert nothing in render(model_info("cpm1-large"))
    entry = {**preset("tiny/bert"), "confirmed": False}
    monkeypatch.setattr("modelcenter.hub.info.report.preset", lambda name: entry)
    assert "UNCONFIRMED" in render(model_info("anything"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["info"], "the following arguments are required: NAME"),
        (["info", "gpt2", "--gpus", "0"], "gpus: got 0, expected at least 1"),
        (["info", "gpt2", "--gpsu", "1"], "unknown flag --gpsu. Did you mean '--gpus'?"),
        (["info", "./nowhere"], "no such directory: nowhere"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(words, says, capsys):
    with pytest.raises(SystemExit):
        cli.main(words)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "bert", "hidden_size": 4}, "config.json of a bert lacks num_layers"),
        (
            {"model_type": "gpt2", "n_embd": "x", "n_layer": 2, "n_head": 2, "vocab_size": 5},
            "a size that is not a number",
        ),
        (
            {
                "model_type": "llama",
                "hidden_size": 4,
                "num_hidden_layers": 2,
                "num_attention_heads": 0,
                "intermediate_size": 8,
                "vocab_size": 5,
            },
            "a size that is not a number",
        ),
        ({"model_type": "gpt2", "architectures": [3]}, "architectures: got .3., expected a list of class names"),
    ],
)
def test_configs_that_do_not_say_their_size(tmp_path, config, says):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says):
        model_info(str(tmp_path))


def test_damaged_headers_are_named(tmp_path):
    mc.from_config("tiny/bert").save_pretrained(tmp_path / "m")
    path = tmp_path / "m/model.safetensors"
    path.write_bytes(whole := path.read_bytes()[:-7])
    with pytest.raises(ValueError, match=f"model.safetensors is not .* truncated: .* the file has {len(whole)}"):
        model_info(str(tmp_path / "m"))
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="model.safetensors is a Git LFS pointer"):
        model_info(str(tmp_path / "m"))


HEAVY = ("torch", "transformers", "datasets", "numpy.linalg")


@pytest.mark.parametrize("what", ["bert-base-uncased", "cpm-ant-10b", "directory", "shards"])
def test_info_imports_no_torch(what, tmp_path):
    model = mc.from_config("tiny/gpt2", "causal-lm")
    model.save_pretrained(tmp_path / "directory", max_shard_size="60KB")
    model.save_pretrained(tmp_path / "shards", format="distributed")
    name = str(tmp_path / what) if (tmp_path / what).is_dir() else what
    code = (
        "import sys; from modelcenter.cli import run\n"
        f"run(['info', {name!r}]); run(['info', {name!r}, '--json'])\n"
        f"found = [name for name in {HEAVY[:3]} if name in sys.modules]\n"
        "assert not found, found"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert "Training with AdamW" in done.stdout and '"parameters"' in done.stdout


def kept(rank_precision: str) -> dict[str, int]:
    """What a rank keeps of tiny/gpt2 after engine.shard, by ZeRO level."""
    found = {}
    for level in (0, 1, 2, 3):
        policy = engine.Policy(zero_level=level, precision=rank_precision)
        units = engine.describe(mc.from_config("tiny/gpt2", policy=policy), show=False).units
        found[str(level)] = [
            sum(u.on_rank for u in units),
            sum(u.gradients_on_rank for u in units),
            sum(u.optimizer_on_rank for u in units),
        ]
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-params"])
def test_memory_kept_is_what_the_engine_keeps(precision):
    """2 ranks; shards are of whole rows, so a rank may have a little more or less than half."""
    sizes = body_sizes(preset("tiny/gpt2")["config"])
    for level, parts in testing.run(kept, 2, precision)[0].items():
        said = training_bytes(sizes, 3, precision, int(level), 2)["kept"]
        assert abs(sum(parts) - said) <= 0.02 * said, (level, parts, said)


def test_more_ranks_and_levels_take_less():
    sizes = task_sizes(preset("llama2-7b")["config"], "causal-lm")
    for precision in ("fp32", "bf16", "bf16-params", "bf16-sr"):
        by_level = [sum(training_bytes(sizes, 32, precision, level, 8).values()) for level in (0, 1, 2, 3)]
        assert by_level == sorted(by_level, reverse=True), precision
    assert training_bytes(sizes, 32, "fp32", 3, 1) == {"kept": 16 * sum(sizes.values()), "working": 0}


def test_shared_layers_are_gathered_with_all_that_is_not_a_layer():
    """As engine.shard lays them out: a rank has the whole model while it works, and the whole of its gradients."""
    about = model_info("albert-base-v2")
    assert about["memory"]["training"]["fp32"]["zero-3"]["working"] == 2 * 4 * about["parameters"]


def test_groups_of_layers_that_run_once_are_units(tmp_path):
    fields = {**preset("tiny/albert")["config"], "inner_group_num": 2}
    fields["num_hidden_groups"] = fields["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    units = mc.from_config(fields).shard_units()
    assert len(set(units)) == len(units) == 2 * fields["num_hidden_layers"]
    said = model_info(str(tmp_path), gpus=2)
    wanted = training_bytes(said["components"], len(units), "fp32", 3, 2)
    assert said["memory"]["training"]["fp32"]["zero-3"] == wanted


def test_options_are_optional():
    assert model_info("gpt2", HubOptions())["hub"] == model_info("gpt2")["hub"] == "openai-community/gpt2"
    assert set(ARCHITECTURES) >= {"bert", "t5"}
