"""Directories and files of CPM-1, CPM-3 and CPM-Bee: what transformers loads, what ModelCenter and CPM-Live left."""

import json

import pytest
import torch
from harness import assert_same, randomize_
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import modelcenter as mc
from modelcenter.hub.conversion import convert

KINDS = ("cpm1", "cpm3", "cpmbee")


@pytest.fixture(autouse=True)
def modules(tmp_path_factory, monkeypatch):
    """Where transformers puts the code of a directory."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))


def saved(kind, folder, task="causal-lm", **fields):
    model = randomize_(mc.from_config(f"tiny/{kind}", task, **fields))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("task", ["causal-lm", "base"])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_it_with_its_code(kind, task, tmp_path):
    ours = saved(kind, tmp_path, task)
    auto = AutoModelForCausalLM if task == "causal-lm" else AutoModel
    theirs = auto.from_pretrained(tmp_path, trust_remote_code=True).eval()
    for name, p in theirs.named_parameters():
        assert torch.isfinite(p).all(), name
    ids = torch.randint(1, 131, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, 6:] = 0, 0
    marks = {"context": torch.arange(27).view(3, 9) % 2, "span": torch.arange(27).view(3, 9) // 5 % 2}
    with torch.no_grad():
        for more in ({}, marks):
            both = [model(input_ids=ids, attention_mask=mask, **more) for model in (ours, theirs)]
            mine, other = (out.logits if task == "causal-lm" else out.last_hidden_state for out in both)
            assert_same("output", mine[mask.bool()], other[mask.bool()], 1e-5)
    if task == "causal-lm":
        more = {"max_new_tokens": 6, "pad_token_id": 0}
        assert torch.equal(theirs.generate(ids[:1], do_sample=False, **more), ours.generate(ids[:1], **more))
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert config.model_type == kind and config.eps == 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_saves_again(kind, tmp_path):
    ours = saved(kind, tmp_path / "ours")
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours", trust_remote_code=True).save_pretrained(tmp_path / "theirs")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert set(before) == set(after)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    again = mc.from_pretrained(tmp_path / "theirs")
    same = {"extra": {}, "architectures": None, "dtype": None}
    assert again.config.replace(**same) == ours.config.replace(**same)


def test_files_have_the_documented_names(tmp_path):
    """The names in a file, which docs/models.md describes."""
    saved("cpm3", tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "cpm3.encoder.layers.2.self_att.self_attention.project_q.weight" in names
    assert {"cpm3.prompt_embedding.weight", "cpm3.position_bias.relative_attention_bias"} <= names
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_cpm.CPM3ForCausalLM"
    assert (tmp_path / "modeling_cpm.py").is_file()


def test_a_conversion_brings_the_code(tmp_path):
    """auto_map names it; what the card shows is Python that loads the model."""
    saved("cpm1", tmp_path / "ours")
    for name, form in (("shards", "distributed"), ("again", "hf")):
        convert(tmp_path / "ours", tmp_path / name, form, workers=1)
        assert (tmp_path / name / "modeling_cpm.py").read_bytes() == (tmp_path / "ours/modeling_cpm.py").read_bytes()
    card = (tmp_path / "again/README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    names: dict = {}
    exec(code.replace("PATH_OR_REPO", str(tmp_path / "again")), names)
    assert type(names["model"]).__name__ == "CPM1ForCausalLM"


OLD = {
    "cpm1": {"tied": False, "position_bias_max_distance": 20, "position_bias_num_buckets": 14, "norm_eps": 0.01},
    "cpm3": {
        "position_bias_max_distance": 20, "position_bias_num_buckets": 14, "norm_eps": 0.01,
        "prompt_length": 5, "prompt_types": 4, "segment_types": 3, "absolute_inner_segment": True,
    },
    "cpmbee": {
        "position_bias_max_distance": 20, "position_bias_num_buckets": 14, "position_bias_num_segment_buckets": 70,
        "eps": 0.01, "half": True,
    },
}  # fmt: skip


def old(kind, folder, **fields):
    """A checkpoint as ModelCenter or CPM-Live leaves it; the model that it holds."""
    model = saved(kind, folder / "ours")
    tensors = load_file(folder / "ours" / "model.safetensors")
    torch.save({name.removeprefix(f"{kind}."): tensor for name, tensor in tensors.items()}, folder / "pytorch_model.pt")
    sizes = {"vocab_size": 131, "dim_model": 48, "num_heads": 6, "dim_head": 10, "dim_ff": 80, "num_layers": 3}
    (folder / "config.json").write_text(json.dumps({**sizes, "dropout_p": 0.0, **OLD[kind], **fields}))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_modelcenter_and_cpm_live(kind, tmp_path):
    """Recognised by the names of the tensors and the fields of the config; every bit, and the same logits."""
    wanted = old(kind, tmp_path)
    found = mc.from_pretrained(tmp_path)
    assert type(found) is type(wanted) and found.task == "causal-lm"
    for (name, p), (_, q) in zip(found.named_parameters(), wanted.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    ids = torch.arange(1, 10)[None]
    assert torch.equal(found(ids).logits, wanted(ids).logits)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("cpm1", {"ffn_activate_fn": "gated_relu"}, "'ffn_activate_fn': got 'gated_relu', expected 'gated_gelu'"),
        ("cpm1", {"cls_head": 3}, "'cls_head': got 3, expected None"),
        ("cpm1", {"norm_bias": True}, "'norm_bias': got True, expected False"),
        ("cpm3", {"absolute_inner_segment": False}, "'absolute_inner_segment': got False, expected True"),
        ("cpm3", {"odd": 1}, "config field not understood: 'odd' = 1"),
        ("cpmbee", {"mask_modules": [[True, False]]}, "'mask_modules': got .*, expected None"),
    ],
)
def test_configs_that_are_not_understood(kind, fields, words, tmp_path):
    old(kind, tmp_path, **fields)
    with pytest.raises(ValueError, match=words):
        mc.from_pretrained(tmp_path)


def test_a_matrix_that_a_tied_network_never_reads(tmp_path):
    old("cpm1", tmp_path, tied=True)
    assert mc.from_pretrained(tmp_path).head.weight is None


def test_a_bee_of_the_hub(tmp_path):
    """Its config names code of its own, and its file may repeat the embedding."""
    ours = saved("cpmbee", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["cpmbee.input_embedding.weight"].clone()
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_cpmbee.CpmBeeConfig"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "half": True}))
    found = mc.CPMBee.from_pretrained(tmp_path)
    assert torch.equal(found.embed.weight, ours.embed.weight)
    tensors["lm_head.weight"] += 1
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        mc.CPMBee.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["cpm1", "cpm3", "cpmbee"])
def test_tokenizers(kind, tmp_path):
    """CPM-Ant's beside any of them, without a question about the code; none is an error."""
    pytest.importorskip("rjieba")
    from transformers import CpmAntTokenizer

    words = "<pad> <unk> <s> </s> <d> </d> </n> </_> 中 国 中国 人 hello h e l o".split()
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    tokenizer = CpmAntTokenizer(tmp_path / "vocab.txt")
    model = mc.from_config(f"tiny/{kind}")
    model.save_pretrained(tmp_path / "none")
    with pytest.raises(ValueError, match="none holds no tokenizer"):
        mc.AutoTokenizer.from_pretrained(tmp_path / "none")
    model.save_pretrained(tmp_path / "model", tokenizer=tokenizer)
    found = mc.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert isinstance(found, CpmAntTokenizer)
    assert found("中国人 hello")["input_ids"] == [2, 10, 11, 7, 12]


def test_tokenizer_of_cpm_generate(tmp_path):
    pytest.importorskip("rjieba")
    sentencepiece = pytest.importorskip("sentencepiece")
    from transformers import CpmTokenizer

    (tmp_path / "text.txt").write_text("中国 人民 你好 世界\nhello world 中文 分词\n今天 天气 很好\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "spiece"), vocab_size=33, pad_id=3,
        character_coverage=1.0, user_defined_symbols=["<sep>", "<cls>", "<mask>", "<eop>", "<eod>"],
        minloglevel=2,
    )  # fmt: skip
    tokenizer = CpmTokenizer(str(tmp_path / "spiece.model"))
    tokenizer.save_pretrained(tmp_path)
    found = mc.AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(found, CpmTokenizer)
    assert found("你好 世界")["input_ids"] == tokenizer("你好 世界")["input_ids"]


def test_compare_runs_the_code_of_the_export(tmp_path, capsys):
    from modelcenter.compare import main

    saved("cpm3", tmp_path)
    assert main([str(tmp_path)]) == 0
    assert "transformers" in capsys.readouterr().out
