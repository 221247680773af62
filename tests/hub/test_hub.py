"""Push and pull against a Hub in memory, from clean processes: huggingface_hub reads its settings when imported."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
import warm
from hub_stub import READ, WRITE, HubStub
from safetensors.torch import load_file
from toydata import make_tokenizer

import modelcenter as mc
from modelcenter.embedding_settings import EmbeddingSettings

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import hashlib, json, sys, warnings
import modelcenter as mc
ARGS = json.loads(sys.argv[1])
def digest(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
def attempt(work):
    try:
        return work()
    except ValueError as error:
        return "ValueError: " + str(error)
"""


@pytest.fixture
def hub():
    with HubStub() as stub:
        yield stub


def run(hub: HubStub, home: Path, code: str, *args, token: str | None = None, **environment: str):
    """Run code in a process of its own; what it puts into `out` comes back."""
    text = PRELUDE + code + "\nprint('\\n' + json.dumps(out))"
    env = hub.environment(home, token, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **environment)
    done = warm.run(["-c", json.dumps(args)], env, home, text)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def digest(model) -> str:
    import hashlib

    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_push_then_load_by_name(hub, saved, home, tmp_path):
    """To a private repository and back, online, from the cache, and by transformers; the commit is remembered."""
    path = saved("sequence-classification")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(path)
    (path / "additional_chat_templates").mkdir()
    for name in (texts := {"bpe.codes", "chat_template.jinja", "additional_chat_templates/tools.jinja"}):
        (path / name).write_text(name)
    address = run(
        hub,
        home,
        """
model = mc.from_pretrained(ARGS[0])
out = model.push_to_hub("me/tiny", private=True, card={"license": "mit"}, max_shard_size="30KB")
out = model.push_to_hub("me/tiny")  # without a card of its own: the one there stays
tokenizer = mc.AutoTokenizer.from_pretrained(ARGS[0])
tokenizer.add_tokens(["fair"])
tokenizer.push_to_hub("me/words")
model.push_to_hub("me/words")  # and so does a tokenizer
""",
        str(path),
        token=WRITE,
    )
    commit = hub.repos["me/tiny"].branches["main"]
    assert address == f"{hub.url}/me/tiny/commit/{commit}" and hub.repos["me/tiny"].private
    # The second push replaced the shards of the first.
    assert sorted(hub.files("me/tiny")) == [
        ".gitattributes",
        "README.md",
        "additional_chat_templates/tools.jinja",
        "bpe.codes",
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert b"license: mit" in hub.files("me/tiny")["README.md"]
    words = hub.files("me/words")
    assert b"fair" in words["tokenizer.json"] and "model.safetensors" in words and "bpe.codes" not in words
    expected = digest(mc.from_pretrained(path))
    other = tmp_path / "other"
    other.mkdir()
    load = """
import os
empty = attempt(lambda: mc.from_pretrained("me/tiny", local_files_only=True)) if ARGS[0] else None
model = mc.from_pretrained("me/tiny")
again = mc.from_pretrained("me/tiny", local_files_only=True)
model.save_pretrained("saved")  # before anything asks for its tokenizer
tokens = mc.AutoTokenizer.from_pretrained("me/tiny")("good bad")["input_ids"]
out = [digest(model), digest(again), model.task, model.load_report.source, tokens, sorted(os.listdir("saved")), empty]
"""
    answer = [expected, expected, "sequence-classification", f"me/tiny@{commit}", [2, 5, 6, 3]]
    hub.requests.clear()
    first = run(hub, other, load, True, token=READ)
    assert first[:5] == answer
    assert {"tokenizer.json", "bpe.codes", "chat_template.jinja", "additional_chat_templates"} <= set(first[5])
    assert (other / "saved/additional_chat_templates/tools.jinja").is_file()
    assert "not in the cache" in first[6] and "local_files_only" in first[6]
    assert hub.downloaded().count("model.safetensors") == hub.downloaded().count("config.json") == 1
    # The commit that main was at when the config was read, even if it moves meanwhile.
    assert ("GET", f"/me/tiny/resolve/{commit}/model.safetensors") in hub.requests
    assert set(hub.downloaded()) == texts | {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    hub.requests.clear()
    assert run(hub, other, load, False, HF_HUB_OFFLINE="1")[:5] == answer
    assert hub.requests == []


@pytest.mark.full
def test_revisions_and_only_what_is_needed(hub, saved, home):
    one, two = saved("base", "one", seed=1), saved("base", "two", seed=2, max_shard_size="30KB")
    (one / "tf_model.h5").write_bytes(b"x")
    (one / "pytorch_model.bin").write_bytes(b"x")
    (one / "onnx").mkdir()
    (one / "onnx/model.onnx").write_bytes(b"x")
    first = hub.add("me/tiny", one)
    second = hub.add("me/tiny", two, branch="sharded")
    hub.add("google-bert/bert-base-uncased", saved("masked-lm"))
    pickled = saved("base", "pickled", seed=3)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    hub.add("me/pickled", pickled)
    code = """
out = {}
for revision in (None, ARGS[0], "sharded", ARGS[1]):
    model = mc.from_pretrained("me/tiny", revision=revision)
    out[str(revision)] = [digest(model), model.load_report.source]
out["missing"] = attempt(lambda: mc.from_pretrained("me/tiny", revision="nope"))
out["alias"] = mc.from_pretrained("bert-base-uncased").load_report.repo
out["pickled"] = digest(mc.from_pretrained("me/pickled"))
"""
    out = run(hub, home, code, first, second)
    a, b = digest(mc.from_pretrained(one)), digest(mc.from_pretrained(two))
    assert out["None"] == out[first] == [a, f"me/tiny@{first}"]
    assert out["sharded"] == out[second] == [b, f"me/tiny@{second}"]
    assert out["missing"] == f"ValueError: {hub.url}/me/tiny has no revision (branch, tag or commit) 'nope'"
    assert out["alias"] == "google-bert/bert-base-uncased" and out["pickled"] == digest(mc.from_pretrained(pickled))
    of_tiny = {
        path.split("/")[-1] for verb, path in hub.requests if verb == "GET" and path.startswith("/me/tiny/resolve")
    }
    assert of_tiny == {"config.json", "model.safetensors"} | set(os.listdir(two)), "one format, nothing else"


def test_a_name_of_ours_means_the_commit_that_its_preset_pins(hub, saved, home):
    """None does now, but for main; --revision names another."""
    repo = "google-bert/bert-base-uncased"
    pinned, moved = hub.add(repo, saved("base", "one", seed=1)), hub.add(repo, saved("base", "two", seed=2))
    code = """
from modelcenter.hub import resolve
from modelcenter.hub.remote.download import HubOptions
from modelcenter.hub.remote.snapshot import download_snapshot
known = resolve.preset
resolve.preset = lambda name: {**known(name), "revision": ARGS[0]}
name = "bert-base-uncased"
out = [[mc.from_pretrained(name, revision=asked).load_report.source.split("@")[1],
    download_snapshot(name, HubOptions(asked)).revision] for asked in (None, "main")]
"""
    assert run(hub, home, code, pinned) == [[pinned] * 2, [moved] * 2]


def test_each_thing_that_can_be_wrong_with_a_repository_has_its_error(hub, saved, home, tmp_path):
    """One clear error for each thing that can be wrong with a name, a token or a repository."""
    path = saved("base")
    hub.add("me/private", path, private=True)
    hub.add("me/gated", path, gated=True)
    hub.add("me/empty", tmp_path / "theirs")
    files = hub.repos["me/empty"].commits[hub.repos["me/empty"].branches["main"]]
    data = files.pop("model.safetensors")
    hub.add("me/evil", path)
    evil = hub.repos["me/evil"].commits[hub.repos["me/evil"].branches["main"]]
    evil["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "../../secret"}}).encode()
    evil.pop("model.safetensors")
    hub.add("me/cut", path)
    hub.repos["me/cut"].commits[hub.repos["me/cut"].branches["main"]]["model.safetensors"] = data[:-5]
    hub.repos["me/none"] = type(hub.repos["me/cut"])()
    hub.repos["me/none"].commit({"README.md": b""})
    hub.repos["me/adapter"] = type(hub.repos["me/cut"])()
    hub.repos["me/adapter"].commit({"adapter_config.json": b'{"base_model_name_or_path": "me/base"}'})
    code = """
out = {name: attempt(lambda: digest(mc.from_pretrained(name))) for name in ARGS[0]}
out["token"] = attempt(lambda: mc.from_pretrained("me/private", token="hf_wrong"))
out["read"] = attempt(lambda: mc.from_config("tiny/bert").push_to_hub("me/new", token=ARGS[1]))
out["tokenizer"] = attempt(lambda: mc.AutoTokenizer.from_pretrained("me/missing"))
"""
    names = [
        "me/private",
        "me/gated",
        "me/empty",
        "me/evil",
        "me/cut",
        "me/none",
        "me/adapter",
        "bert-base-uncasd",
        "a b!",
        "tiny/bert",
    ]
    out = run(hub, home, code, names, READ)
    for name, *words in (
        ("me/private", "does not exist or is private", "token=", "HF_TOKEN"),
        ("me/gated", "is gated", "accept", f"{hub.url}/me/gated"),
        ("me/empty", "no weights in the repository", "model.safetensors"),
        ("me/evil", "'../../secret'", "expected a file name without a folder"),
        ("me/cut", "truncated", f"expected {len(data)} bytes, the file has {len(data) - 5}"),
        ("me/none", "no config.json"),
        ("me/adapter", f"{hub.url}/me/adapter is an adapter for me/base, not a model by itself"),
        ("bert-base-uncasd", "does not exist", "Did you mean 'bert-base-uncased'"),
        ("a b!", "cannot be a Hub id"),
        ("tiny/bert", "preset without weights", "modelcenter.from_config('tiny/bert')"),
        ("token", "me/private", "token"),
        ("read", "pushing to", "write access"),
        ("tokenizer", "'me/missing' is not a local directory, and"),
    ):
        assert out[name].startswith("ValueError: "), out[name]
        for word in words:
            assert word in out[name], (name, out[name])
    assert "me/new" not in hub.repos
    assert not [path for path in hub.downloaded() if "secret" in path]


@pytest.mark.full
def test_without_a_network(hub, home):
    """Offline with an empty cache, and a Hub that does not answer."""
    code = "out = attempt(lambda: mc.from_pretrained(ARGS[0]))"
    offline = run(hub, home, code, "bert-base-cased", HF_HUB_OFFLINE="1")
    assert "not in the cache" in offline and "while offline" in offline and str(home) in offline
    assert "Did you mean" not in offline
    dead = run(hub, home, code, "bert-base-casd", HF_ENDPOINT="http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in dead and "Did you mean 'bert-base-cased'" in dead
    right = run(hub, home, code, "google-bert/bert-base-cased", HF_ENDPOINT="http://127.0.0.1:9")
    assert "cannot be reached" in right and "Did you mean" not in right


def test_what_is_cached_loads_while_the_hub_is_away(hub, saved, home, tmp_path):
    """Nobody set HF_HUB_OFFLINE, and the repositories lack files that are looked for: a generation config, safetensors,
    a tokenizer's settings."""
    from modelcenter.adapters import Lora, save_adapter

    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]))
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    for name in ("tiny", "pickled"):
        path = saved("base", name)
        tokenizer.save_pretrained(path)
        if name == "pickled":
            (path / "tokenizer_config.json").unlink()
            (path / "tokenizer.json").unlink()
            shutil.copy(tmp_path / "vocab.txt", path)
            torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
            (path / "model.safetensors").unlink()
        hub.add(f"me/{name}", path)
    hub.add("me/partial", path)
    save_adapter(mc.from_config("tiny/bert", adapter=Lora(2)), tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    hub.add("me/adapter", tmp_path / "adapter")
    fill = """
import huggingface_hub
for name in ARGS:
    huggingface_hub.snapshot_download(f"me/{name}")
huggingface_hub.hf_hub_download("me/partial", "config.json")
out = None
"""
    load = """
import pathlib, time
time.sleep = None  # nothing waits, to try again
from modelcenter.hub.commands import convert_main
from modelcenter.adapters import load_lora
from modelcenter.hub.tokenizer import load_tokenizer
out = {name: attempt(lambda: digest(mc.from_pretrained(f"me/{name}"))) for name in ("tiny", "pickled", "partial")}
out["adapter"] = load_lora("me/adapter").rank
out["nothing"] = attempt(lambda: load_tokenizer("me/nothing"))
out["words"] = [load_tokenizer(f"me/{name}")("good bad")["input_ids"] for name in ("tiny", "pickled")]
mc.from_pretrained("me/pickled").save_pretrained("saved")
convert_main(["me/pickled", "converted", "--to", "distributed"])
out["texts"] = [pathlib.Path(name, "vocab.txt").is_file() for name in ("saved", "converted")]
"""
    run(hub, home, fill, "tiny", "pickled", "adapter")
    out = run(hub, home, load, HF_ENDPOINT="http://127.0.0.1:9")
    assert out["tiny"] == out["pickled"] == digest(mc.from_pretrained(tmp_path / "tiny"))
    assert "its model.safetensors is not in the cache, and http://127.0.0.1:9 cannot be reached" in out["partial"]
    assert "'me/nothing' is not a local directory, and" not in out["nothing"] and "cannot be reached" in out["nothing"]
    assert out["adapter"] == 2 and out["words"] == [[2, 5, 6, 3]] * 2 and out["texts"] == [True, True]


def test_verbs_take_names(hub, saved, home, tmp_path):
    """convert, export and verify of a private repository: by branch and by commit, online and from the cache."""
    one, two = saved("pretraining", "one", seed=1), saved("pretraining", "two", seed=2, max_shard_size="30KB")
    (one / "vocab.txt").write_text("good")
    hub.add("me/tiny", one, private=True)
    second = hub.add("me/tiny", two, branch="sharded", private=True)
    code = """
from modelcenter.hub.commands import convert_main, export_main, verify_main
one, two, token, second = ARGS
asked = ["--token", token, "--cache_dir", "cache"]
convert_main(["me/tiny", "shards", "--to", "distributed", *asked])
convert_main(["me/tiny", "half", "--to", "distributed", "--revision", "sharded", "--dtype", "bf16", *asked])
cached = ["--cache_dir", "cache", "--local_files_only"]
export_main(["me/tiny", "exported", "--revision", second, *cached])
out = {
    "shards": verify_main(["shards", one]),
    "hub": verify_main(["me/tiny", "shards", *cached]),
    "exported": verify_main([two, "exported"]),
    "other": verify_main(["me/tiny", "exported", *cached]),
    "refused": attempt(lambda: convert_main(["me/tiny", "x", "--to", "hf", "--token", "hf_wrong"])),
    "branch": attempt(lambda: convert_main(["me/tiny", "x", "--to", "hf", "--revision", "nope", *asked])),
    "offline": attempt(lambda: convert_main(["me/tiny", "x", "--to", "hf", "--local_files_only"])),
}
"""
    out = run(hub, home, code, str(one), str(two), READ, second)
    assert [out[name] for name in ("shards", "hub", "exported", "other")] == [0, 0, 0, 1]
    assert "with the given token" in out["refused"] and "not in the cache" in out["offline"]
    assert "no revision (branch, tag or commit) 'nope'" in out["branch"]
    assert not (home / "x").exists() and (home / "shards" / "vocab.txt").read_text() == "good"
    said = json.loads((home / "half" / "conversion.json").read_text())
    assert said["source"]["revision"] == second and said["source"]["repository"] == "me/tiny"
    assert {tensor["dtype"] for tensor in said["tensors"].values()} == {"bfloat16"}
    half = mc.from_pretrained(home / "half")
    assert half.dtype == torch.bfloat16 and half.task == "pretraining"
    for (name, a), (_, b) in zip(half.named_parameters(), mc.from_pretrained(two).named_parameters(), strict=True):
        assert torch.equal(a, b.bfloat16()), name


def test_a_model_of_embeddings_by_name(hub, home, tmp_path):
    """What says how embeddings are made comes with the model: loaded for them, downloaded, converted, used."""
    settings = {"pooling": "cls", "query_prompt": "q: ", "max_length": 12, "dense": ["10:gelu"]}
    model = mc.from_config("tiny/bert", "embedding", seed=1, embedding=settings)
    model.save_pretrained(tmp_path / "start", tokenizer=make_tokenizer())
    # As many of the Hub: of a head that the files do not hold.
    config = json.loads((tmp_path / "start" / "config.json").read_text())
    (tmp_path / "start" / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    hub.add("me/vectors", tmp_path / "start")
    code = """
import contextlib, pathlib
from modelcenter.cli import run
from modelcenter.hub.commands import convert_main
def told(*args, **options):
    model = mc.from_pretrained(*args, **options)
    return [model.task, model.config.embedding.to_dict()]
def verb(*words):
    with contextlib.suppress(SystemExit):
        run([*words])
pathlib.Path("texts.txt").write_text("a film\\n")
out = {"found": told("me/vectors"), "base": told("me/vectors", "base"), "asked": told("me/vectors", "embedding"),
    "changed": told("me/vectors", "embedding", embedding={"pooling": "last", "normalize": False}),
    "cached": told("me/vectors", local_files_only=True)}
verb("predict", "me/vectors", "texts.txt", "--output", "out.jsonl")
verb("download", "me/vectors", "--local_dir", "here")
convert_main(["me/vectors", "shards", "--to", "distributed"])
convert_main(["shards", "again", "--to", "hf"])
out |= {name: told(name) for name in ("here", "shards", "again")}
out["width"] = len(json.loads(pathlib.Path("out.jsonl").read_text())["embedding"])
"""
    out = run(hub, home, code)
    expected = model.config.embedding.to_dict() | {"normalize": True, "document_prompt": ""}
    assert out["base"] == ["base", EmbeddingSettings().to_dict()]
    assert out["changed"] == ["embedding", expected | {"pooling": "last", "normalize": False}]
    for name in ("found", "asked", "cached", "here", "shards", "again"):
        assert out[name] == ["embedding", expected], name
    assert out["width"] == model.embedding_width


@pytest.mark.full
def test_an_adapter_by_name(hub, home, tmp_path):
    """From a private repository, of a branch; again from the cache; what is none is said to be none."""
    from modelcenter.adapters import Lora, save_adapter

    mc.from_config("tiny/bert", "masked-lm", seed=1).save_pretrained(tmp_path / "base")
    model = mc.from_pretrained(tmp_path / "base", adapter=Lora(rank=3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    save_adapter(model, tmp_path / "adapter")
    hub.add("me/adapter", tmp_path / "adapter", branch="dev", private=True)
    hub.add("me/base", tmp_path / "base")
    options = {"embedding": {"dense": ["6:gelu"]}, "adapter": Lora(rank=2)}
    vectors = mc.from_pretrained(tmp_path / "base", "embedding", **options)
    save_adapter(vectors, tmp_path / "vectors")  # with a dense layer beside it
    hub.add("me/vectors", tmp_path / "vectors")
    code = """
import pathlib
from modelcenter.adapters import Lora, load_lora, save_adapter
def values(adapter):
    model = mc.from_pretrained(ARGS[0], adapter=adapter)
    return [round(float(p.double().sum()), 4) for n, p in model.named_parameters() if "lora" in n]
where = {"revision": "dev", "token": ARGS[2]}
out = {"local": values(load_lora(ARGS[1])), "hub": values(load_lora("me/adapter", **where)),
    "cache": values(load_lora("me/adapter", revision="dev", local_files_only=True)),
    "private": attempt(lambda: load_lora("me/adapter")), "none": attempt(lambda: load_lora("me/base")),
    "offline": attempt(lambda: load_lora("me/other", local_files_only=True))}
save_adapter(mc.from_pretrained("me/base", adapter=Lora(2)), "made")
config = json.loads(pathlib.Path("made/adapter_config.json").read_text())
out["made"] = [config["base_model_name_or_path"], config["revision"]]
def dense(**options):
    options = {"embedding": {"dense": ["6:gelu"]}, "adapter": load_lora("me/vectors", **options)}
    return digest(mc.from_pretrained("me/base", "embedding", seed=9, **options).head)
out["dense"] = [dense(), dense(local_files_only=True)]
"""
    out = run(hub, home, code, str(tmp_path / "base"), str(tmp_path / "adapter"), READ)
    assert len(out["local"]) > 4 and any(out["local"]) and out["local"] == out["hub"] == out["cache"]
    assert out["dense"] == [digest(vectors.head)] * 2
    assert out["made"] == ["me/base", hub.repos["me/base"].branches["main"]]  # what peft is to load under it
    assert "does not exist or is private" in out["private"]
    assert "no adapter_config.json in the repository, so it is not an adapter of peft" in out["none"]
    assert "no adapter_config.json in the cache (offline)" in out["offline"]


@pytest.mark.full
def test_a_merge_takes_the_commit_of_its_base_that_the_adapter_names(hub, home, tmp_path):
    """Also where the base is given by a short name; its main branch has moved on."""
    for seed in (1, 2):
        mc.from_config("tiny/gpt2", "causal-lm", seed=seed).save_pretrained(tmp_path / f"base{seed}")
    hub.add("openai-community/gpt2", tmp_path / "base1")
    code = """
from modelcenter.adapters import Lora, save_adapter
out = save_adapter(mc.from_pretrained("gpt2", adapter=Lora(2)), "adapter")
"""
    run(hub, home, code)
    hub.add("openai-community/gpt2", tmp_path / "base2")
    code = """
from modelcenter import cli
def export(*words):
    try:
        cli.run(["export", "gpt2", "--adapter", "adapter", "--output", *words])
    except SystemExit as done:
        return done.code
out = [export("named"), export("asked", "--revision", "main")]
"""
    assert not any(run(hub, home, code))
    for folder, base in (("named", "base1"), ("asked", "base2")):  # an adapter that was not trained changes nothing
        assert digest(mc.from_pretrained(home / folder)) == digest(mc.from_pretrained(tmp_path / base))
