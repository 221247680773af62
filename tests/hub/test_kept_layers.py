"""Models of some layers of others: what is loaded, converted and exported computes what transformers' modules do once
their lists of layers are cut; what cannot be cut is refused by its reason."""

import functools
import json

import pytest
import torch
from harness import skip_unless_transformers_has
from safetensors.torch import load_file, save_file
from toydata import make_tokenizer

import modelcenter as mc
from engine.testing import run as on_ranks
from modelcenter import compare, registry
from modelcenter.cli import run as cli
from modelcenter.compare.transformers_models import by_written_out_attention
from modelcenter.convert.kept_layers import KeptLayers, names_of_kept
from modelcenter.hub.conversion import convert
from modelcenter.hub.conversion.checkpoint import Request, open_checkpoint
from modelcenter.hub.conversion.run import FORMATS, _Run
from modelcenter.testing import randomize_

BARTS = ("bart", "led", "mbart", "marian", "m2m_100", "pegasus")
TWO_SIDES = (*BARTS, "t5", "mt5", "umt5", "t5gemma", "encoder-decoder", "cpm2")
OWN = ("cpm1", "cpm2", "cpm3", "cpmant", "cpmbee", "minicpm", "minicpm3")  # not of transformers, or only a part of them
SHARED = ("albert",)
# Of two kinds of layers by turns, none of which takes the place of another: tests/convert/test_nomic_bert_moe.py.
BY_TURNS = ("nomic_bert_moe",)
FAMILIES = sorted(set(registry.ARCHITECTURES) - {*SHARED, *BY_TURNS})
FIELDS = {  # of transformers' configs
    "encoder": ("encoder_layers", "num_layers"),
    "decoder": ("decoder_layers", "num_decoder_layers"),
    "": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
}
FAST = (("bert", "inner"), ("t5", "inner"))


def save_whole(folder, family, layers=5, decoder_layers=4, **changes):
    """A model with parameters of its own in every layer."""
    # transformers 5.17 scales the outputs of every umT5.
    sizes = {"num_layers": layers, **({"scale_decoder_outputs": True} if family == "umt5" else {}), **changes}
    if family in ("t5gemma", "encoder-decoder"):
        sizes.pop("num_layers")
        values = registry.preset(f"tiny/{family}")["config"]
        count = "num_hidden_layers"
        sides = {side: values[side] | {count: n} for side, n in (("encoder", layers), ("decoder", decoder_layers))}
        for side in sides.values():
            side.pop("n_layer", None), side.pop("layer_types", None)
        sizes |= sides
    elif family in TWO_SIDES:
        sizes["num_decoder_layers"] = decoder_layers
    tasks = registry.get(family).arch_map().tasks
    task = next(t for t in ("masked-lm", "causal-lm", "seq2seq-lm", *tasks) if t in tasks)
    model = mc.from_config(f"tiny/{family}", task, seed=1, **sizes)
    randomize_(model)
    model.save_pretrained(folder)
    return task


def inputs(two_sides):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 40, (2, 9), generator=generator)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return batch | ({"decoder_input_ids": ids[:, :6].flip(0)} if two_sides else {})


def cut(theirs, kept, decoder_kept):
    """The lists of layers of a model of transformers, cut by hand."""
    lists = {
        name: module
        for name, module in theirs.named_modules()
        if isinstance(module, torch.nn.ModuleList) and name.split(".")[-1] in ("layer", "layers", "block", "h")
    }
    lists = {n: m for n, m in lists.items() if not any(n != other and n.startswith(f"{other}.") for other in lists)}
    for name, module in lists.items():
        side = next((part for part in name.split(".") if part in ("encoder", "decoder")), "")
        whole = len(lists) > 1
        numbers = decoder_kept if whole and side == "decoder" else kept
        if numbers is None:
            continue
        first = module[0]
        _carry_bias(first, module[numbers[0]])
        chosen = torch.nn.ModuleList(module[number] for number in numbers)
        for place, layer in enumerate(chosen):
            for part in layer.modules():
                if hasattr(part, "layer_idx"):
                    part.layer_idx = place
        owner = theirs.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], chosen)
        _shorten(theirs, owner, side if whole else "", numbers)
    return theirs


def _carry_bias(first, other):
    """T5's table of distances is in the first block alone, for all."""
    if other is first or not hasattr(first, "layer") or not hasattr(first.layer, "__getitem__"):
        return
    old, new = (getattr(block.layer[0], "SelfAttention", None) for block in (first, other))
    if old is not None and not new.has_relative_attention_bias:
        new.has_relative_attention_bias, new.relative_attention_bias = True, old.relative_attention_bias


def _shorten(theirs, owner, side, numbers):
    configs = {id(c): c for c in (getattr(owner, "config", None), getattr(theirs.config, side or "x", None)) if c}
    if not configs or not side:
        configs[id(theirs.config)] = theirs.config
    for config in configs.values():
        types = getattr(config, "layer_types", None)
        for name in (*FIELDS[side], *FIELDS[""]):
            if hasattr(config, name):
                setattr(config, name, len(numbers))
        if types:
            config.layer_types = [types[number] for number in numbers]


def logits_of(model, batch):
    with torch.no_grad():
        out = model(**batch)
    return out.logits if "logits" in out else out.last_hidden_state


# Of the layers, and of a decoder's behind an encoder.
CUTS = {"first": ((0, 2, 3), (0, 3)), "inner": ((1, 2, 4), (1, 2)), "encoder": ((0, 4), None), "decoder": (None, (2,))}


MODERNBERTS = ("modernbert", "modernbert-decoder")


def _loaded(cls, folder):
    """transformers' model, in which attention is the same in every version."""
    return by_written_out_attention(cls.from_pretrained(str(folder)).eval())


CASES = [
    pytest.param(family, which, marks=[] if (family, which) in FAST else pytest.mark.full)
    for family in FAMILIES
    for which in CUTS
    # With one list of layers the latter two are none, or the first again; of ModernBERTs the first layer stays first.
    if (family in TWO_SIDES or which in ("first", "inner")) and not (family in MODERNBERTS and which == "inner")
]


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    """Of a family: the folder of a whole model, which tests only read, and its task."""

    @functools.cache
    def saved(family):
        folder = tmp_path_factory.mktemp(family)
        return folder, save_whole(folder, family)

    return saved


@pytest.mark.parametrize(("family", "which"), CASES)
def test_as_transformers_with_its_lists_cut(tmp_path, saved_once, family, which):
    kept, decoder_kept = CUTS[which]
    two_sides = family in TWO_SIDES
    whole, task = saved_once(family)
    numbers = {"keep_layers": kept} | ({"keep_decoder_layers": decoder_kept} if two_sides else {})
    ours = mc.from_pretrained(whole, **numbers)
    ours.save_pretrained(tmp_path / "saved")
    request = Request(kept=KeptLayers.of(*(numbers.get(name) for name in ("keep_layers", "keep_decoder_layers"))))
    convert(whole, tmp_path / "converted", "hf", request=request, workers=1, verify=True)
    tensors = [load_file(tmp_path / name / "model.safetensors") for name in ("saved", "converted")]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("saved", "converted")]
    assert configs[0] == configs[1]
    batch = inputs(two_sides)
    if family in OWN:
        cut_here = mc.from_pretrained(whole)
        lists = [(cut_here, kept)] if not two_sides else [(cut_here.encoder, kept), (cut_here.decoder, decoder_kept)]
        for side, chosen in lists:
            if chosen is not None:
                side.layers = torch.nn.ModuleList(side.layers[number] for number in chosen)
        torch.testing.assert_close(logits_of(ours, batch), logits_of(cut_here, batch), atol=1e-5, rtol=1e-5)
        return
    skip_unless_transformers_has(family)
    cls = compare.hub_class(family, task)
    theirs = cut(_loaded(cls, whole), kept, decoder_kept)
    expected = logits_of(theirs, batch)
    exported = _loaded(cls, tmp_path / "converted")
    rounding = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(logits_of(exported, batch), expected, atol=rounding, rtol=0)
    torch.testing.assert_close(logits_of(ours, batch), expected, atol=5 * rounding, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gemma3_text", "qwen2_moe", "smollm3", *MODERNBERTS, "t5gemma"])
def test_windows_go_with_their_layers(tmp_path, family):
    """Of texts that are longer than a window. transformers' side is the test above, with short texts."""
    window = {"local_attention": 4} if family in MODERNBERTS else {"sliding_window": 3}
    changes = {} if family == "t5gemma" else window
    if family == "qwen2":
        changes = window | {"use_sliding_window": True, "max_window_layers": 2}
    if family == "qwen2_moe":
        changes = window | {"use_sliding_window": True, "max_window_layers": 3, "decoder_sparse_step": 2}
    if family == "smollm3":
        changes = window | {"use_sliding_window": True, "no_rope_layers": [1, 1, 0, 0, 1]}
    save_whole(tmp_path / "whole", family, **changes)
    if family == "t5gemma":
        path = tmp_path / "whole" / "config.json"
        values = json.loads(path.read_text())
        for side in ("encoder", "decoder"):
            values[side]["sliding_window"] = 3
        path.write_text(json.dumps(values))
    kept = (0, 2, 3)
    numbers = {"keep_layers": kept} | ({"keep_decoder_layers": (0, 3)} if family == "t5gemma" else {})
    ours = mc.from_pretrained(tmp_path / "whole", **numbers)
    whole = mc.from_pretrained(tmp_path / "whole")
    lists = [(whole, kept)] if family != "t5gemma" else [(whole.encoder, kept), (whole.decoder, (0, 3))]
    for side, chosen in lists:
        side.layers = torch.nn.ModuleList(side.layers[number] for number in chosen)
    batch = inputs(family == "t5gemma")
    expected = logits_of(whole, batch)
    rounding = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(logits_of(ours, batch), expected, atol=rounding, rtol=0)
    ours.save_pretrained(tmp_path / "saved")
    cls = compare.hub_class(family, ours.task)
    theirs = _loaded(cls, tmp_path / "saved")
    torch.testing.assert_close(logits_of(theirs, batch), expected, atol=rounding, rtol=0)


@pytest.mark.parametrize("family", ["longformer", "led"])
def test_lists_of_windows_are_of_an_encoders_layers(tmp_path, family):
    sides = {"num_decoder_layers": 3} if family == "led" else {}
    model = mc.from_config(f"tiny/{family}", num_layers=3, attention_window=[2, 4, 6], **sides)
    model.save_pretrained(tmp_path)
    kept = mc.from_pretrained(tmp_path, keep_layers=[0, 2])
    assert kept.config.attention_window == [2, 6]
    if family == "led":
        kept = mc.from_pretrained(tmp_path, keep_decoder_layers=[0, 2])
        assert (kept.config.attention_window, kept.config.num_decoder_layers) == ([2, 4, 6], 2)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_on_ranks_each_reads_its_part(tmp_path, family):
    import engine

    save_whole(tmp_path / "whole", family)
    alone = mc.from_pretrained(tmp_path / "whole", keep_layers=[1, 3])
    expected = {name: tensor.detach() for name, tensor in alone.named_parameters()}

    def work():
        engine.init_distributed()
        mc.from_pretrained(tmp_path / "whole", keep_layers=[1, 3]).save_pretrained(tmp_path / "two")

    on_ranks(work, 2, timeout=60)
    two = mc.from_pretrained(tmp_path / "two")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in two.named_parameters())


def test_heads_words_and_tokenizers_stay(tmp_path, capsys):
    """All heads of a file, by the command."""
    model = mc.from_config("tiny/bert", "pretraining", num_layers=4, seed=2, vocab_size=len(make_tokenizer()))
    randomize_(model)
    model.save_pretrained(tmp_path / "whole", tokenizer=make_tokenizer())
    words = ["convert", str(tmp_path / "whole"), str(tmp_path / "student"), "--to", "hf", "--workers", "1"]
    with pytest.raises(SystemExit):
        cli([*words, "--keep_layers", "0,2", "3"])
    capsys.readouterr()
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "student"))
    moved = {"0": "0", "2": "1", "3": "2"}
    expected = {}
    for name, tensor in before.items():
        begin, layer, rest = name.partition("encoder.layer.")
        number, _, rest = rest.partition(".")
        if not layer:
            expected[name] = tensor
        elif number in moved:
            expected[f"{begin}{layer}{moved[number]}.{rest}"] = tensor
    assert after.keys() == expected.keys() and all(torch.equal(after[name], t) for name, t in expected.items())
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("whole", "student")]
    assert configs[1] == configs[0] | {"num_hidden_layers": 3}
    assert mc.AutoTokenizer.from_pretrained(tmp_path / "student").get_vocab() == make_tokenizer().get_vocab()
    source = json.loads((tmp_path / "student" / "conversion.json").read_text())["source"]
    assert (source["layers"], source["decoder_layers"]) == ([0, 2, 3], None)
    student = mc.from_pretrained(tmp_path / "whole", "sequence-classification", keep_layers=[3], num_labels=3)
    assert torch.equal(student.layers[0].attn.q.weight, model.layers[3].attn.q.weight)


def test_names_with_a_prefix_and_weights_that_are_read_whole(tmp_path):
    save_whole(tmp_path / "whole", "bert")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    expected = mc.from_pretrained(tmp_path / "whole", keep_layers=[1, 4]).state_dict()
    (tmp_path / "whole" / "model.safetensors").unlink()
    save_file({f"module.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "whole" / "model.safetensors")
    ours = mc.from_pretrained(tmp_path / "whole", keep_layers=[1, 4], prefix="module.").state_dict()
    request = Request(kept=KeptLayers((1, 4)), prefix="module.")
    convert(tmp_path / "whole", tmp_path / "converted", "distributed", request=request, workers=1)
    converted = mc.from_pretrained(tmp_path / "converted").state_dict()
    (tmp_path / "whole" / "model.safetensors").unlink()
    old = {"_use_new_zipfile_serialization": False}  # of which no part can be read by itself
    torch.save(tensors, tmp_path / "whole" / "pytorch_model.bin", **old)
    by_pickle = mc.from_pretrained(tmp_path / "whole", keep_layers=[1, 4]).state_dict()
    for found in (ours, converted, by_pickle):
        assert found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())


def test_weights_that_are_read_whole_are_opened_twice(tmp_path):
    """T5's say by their names whether the head is the embedding."""
    save_whole(tmp_path, "t5")
    expected = mc.from_pretrained(tmp_path, keep_layers=[1, 4]).state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    found = mc.from_pretrained(tmp_path, keep_layers=[1, 4]).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())


def test_a_conversion_of_other_layers_is_another(tmp_path):
    """What an interrupted one has left holds other values under the same names."""
    save_whole(tmp_path / "whole", "bert")
    names = set()
    for kept in (KeptLayers((0, 1)), KeptLayers((0, 2)), KeptLayers((0, 2))):
        with open_checkpoint(tmp_path / "whole", Request(kept=kept)) as checkpoint:
            work = _Run(checkpoint, tmp_path / "target", FORMATS["hf"], None, 10**9, 1, False, False)
            names.add(work._fingerprint())
    assert len(names) == 2


def test_columns_of_contacts_go_with_their_layers(tmp_path):
    save_whole(tmp_path / "whole", "esm")
    whole = mc.from_pretrained(tmp_path / "whole")
    ours = mc.from_pretrained(tmp_path / "whole", keep_layers=[1, 4])
    columns = whole.contacts.weight.view(5, -1)[[1, 4]].flatten()
    assert torch.equal(ours.contacts.weight.flatten(), columns) and not ours.load_report.initialised
    assert torch.equal(ours.contacts.bias, whole.contacts.bias)


def test_what_all_layers_repeat_stays_with_the_first(tmp_path):
    """The frequencies of ESM-2, which its files hold in every layer."""
    changes = {"position_embedding_type": "rotary", "emb_layer_norm_before": False}
    save_whole(tmp_path / "whole", "esm", **changes)
    held = load_file(tmp_path / "whole" / "model.safetensors")
    frequencies = [name for name in held if name.endswith("inv_freq")]
    assert len(frequencies) == 5
    found = names_of_kept(registry.get("esm").arch_map(), held, KeptLayers((1, 4)))
    assert len(set(found.values())) == len(found) and [n for n in frequencies if n in found] == frequencies[:1]
    whole, ours = mc.from_pretrained(tmp_path / "whole"), mc.from_pretrained(tmp_path / "whole", keep_layers=(1, 4))
    assert torch.equal(ours.rotary.frequencies, whole.rotary.frequencies)
    whole.layers = torch.nn.ModuleList([whole.layers[1], whole.layers[4]])
    batch = inputs(two_sides=False)
    torch.testing.assert_close(logits_of(ours, batch), logits_of(whole, batch))


REFUSED = {
    "numbers": ("bert", {"keep_layers": [2, 1]}, r"keep_layers: got \[2, 1\], expected increasing numbers of layers,"),
    "twice": ("bert", {"keep_layers": [1, 1]}, "expected increasing numbers"),
    "none": ("bert", {"keep_layers": []}, "expected increasing numbers"),
    "switch": ("bert", {"keep_layers": [True]}, "expected increasing numbers"),
    "too high": ("bert", {"keep_layers": [0, 5]}, "keep_layers: got 0 to 5, but bert has layers 0 to 4 here"),
    "negative": ("bert", {"keep_layers": [-1]}, "got -1 to -1, but bert has layers 0 to 4"),
    "decoder": ("t5", {"keep_decoder_layers": [4]}, "keep_decoder_layers: got 4 to 4, but t5 has layers 0 to 3 here"),
    "no decoder": ("bert", {"keep_decoder_layers": [0]}, "keep_decoder_layers: bert has one list of layers"),
    "shared": ("albert", {"keep_layers": [0]}, "keep_layers: layers of albert share their parameters"),
    "first": (
        "modernbert",
        {"keep_layers": [1, 2]},
        r"layers 0 and 1 of modernbert are not alike \(only one has attn_norm.weight",
    ),
    "later": ("modernbert", {"keep_layers": [0, 2]}, None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(tmp_path, case):
    family, numbers, message = REFUSED[case]
    save_whole(tmp_path, family)
    if message is None:
        mc.from_pretrained(tmp_path, **numbers)
        return
    with pytest.raises(ValueError, match=message):
        mc.from_pretrained(tmp_path, **numbers)


def test_layers_that_compute_by_their_number_are_refused(tmp_path):
    mc.from_config("tiny/gpt2", "causal-lm", scale_attn_by_inverse_layer_idx=True).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="with scale_attn_by_inverse_layer_idx a layer of gpt2 depends on its number"):
        mc.from_pretrained(tmp_path / "gpt2", keep_layers=[0])
    mc.from_config("tiny/gpt2").save_pretrained(tmp_path / "dcp", format="distributed")
    with pytest.raises(
        ValueError, match="a distributed checkpoint; convert it first with `modelcenter convert --to hf`"
    ):
        mc.from_pretrained(tmp_path / "dcp", keep_layers=[0])
    with pytest.raises(ValueError, match="is a distributed checkpoint"):
        convert(tmp_path / "dcp", tmp_path / "out", "hf", request=Request(kept=KeptLayers((0,))))
    with pytest.raises(ValueError, match="--keep_layers: got 'first', expected numbers of layers, such as 0,2,4"):
        cli(["convert", str(tmp_path / "gpt2"), str(tmp_path / "out"), "--to", "hf", "--keep_layers", "first"])
