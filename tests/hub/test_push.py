"""`modelcenter push` and `download` against a Hub in memory, from clean processes; and what is refused before that."""

import fnmatch
import json
import os
import re
import resource
import shlex
import socket
import types
from pathlib import Path

import huggingface_hub
import pytest
import torch
import warm
from hub_stub import READ, WRITE, HubStub
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from toydata import command, flags, write_folder

import modelcenter as mc
from modelcenter.hub.card import check_card, complete_card, make_card, without_tokens
from modelcenter.hub.remote.download import HubOptions, UnreachableError, list_files
from modelcenter.hub.remote.push import (
    check_directory,
    model_directory,
    push_directory,
    upload,
)
from modelcenter.hub.remote.snapshot import download_snapshot

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hub():
    with HubStub() as stub:
        yield stub


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def verb(hub: HubStub, home: Path, *words, token: str | None = None, ok: bool = True, **environment: str):
    """Run `modelcenter WORDS`; its output and errors. No token may be in them."""
    env = hub.environment(home, token, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **environment)
    done = warm.run(["modelcenter", *map(str, words)], env, home)
    assert (done.returncode == 0) is ok, done.stderr
    for secret in (READ, WRITE, "hf_wrong"):
        assert secret not in done.stdout + done.stderr
    return done.stdout, done.stderr


def small(path: Path, max_shard_size: str = "5GB", **config) -> Path:
    model = mc.from_config("tiny/bert", "sequence-classification", seed=1, **config)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def test_there_and_back(hub, home, tmp_path):
    """push, download by branch, all files and needed ones, into the cache and a directory, offline, info."""
    path = small(tmp_path / "m", max_shard_size="60KB")
    (path / "tokenizer.json").write_text("{}")
    (path / "notes.txt").write_text("notes")
    for name in (
        ".secret",
        ".cache/secret",
        "additional_chat_templates/.secret",
        "additional_chat_templates/a[1].jinja",
    ):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("secret")
    out, told = verb(hub, home, "push", path, "me/tiny", "--private", "--message", "first", token=WRITE)
    commit = hub.repos["me/tiny"].branches["main"]
    assert out.strip() == f"{hub.url}/me/tiny/commit/{commit}" and "uploading" in told
    assert hub.repos["me/tiny"].private and hub.messages == ["first"]
    sent = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file() and "secret" not in p.name}
    assert {k: v for k, v in hub.files("me/tiny").items() if k != ".gitattributes"} == sent
    small(path)  # one file now: the shards go
    found = json.loads(verb(hub, home, "push", path, "me/tiny", "--revision", "next", "--json", token=WRITE)[0])
    assert found["commit"] == hub.repos["me/tiny"].branches["next"] and found["repo"] == "me/tiny"
    assert found["files"].keys() == hub.files("me/tiny", "next").keys() - {".gitattributes"}
    assert [name for name in hub.files("me/tiny", "next") if "model" in name] == ["model.safetensors"]
    assert hub.repos["me/tiny"].branches["main"] == commit
    hub.requests.clear()
    found = json.loads(verb(hub, home, "download", "me/tiny", "--json", token=READ)[0])
    assert found["revision"] == commit and Path(found["path"]).is_dir()
    assert set(found["files"]) == set(sent) - {"README.md", "notes.txt"}
    assert sorted(hub.downloaded()) == sorted(found["files"])
    assert check_directory(Path(found["path"])).keys() == found["files"].keys()  # links into the cache are no others
    absent = Path(found["path"]).parents[1] / ".no_exist" / commit
    # The cache says what the repository lacks, so that loading need not ask when there is no network.
    assert {"generation_config.json", "modules.json", "tokenizer_config.json", "model.safetensors"} <= set(
        os.listdir(absent)
    )
    hub.requests.clear()
    out, told = verb(hub, home, "download", "me/tiny", token=READ)
    assert out.strip() == found["path"] and hub.downloaded() == []
    out, told = verb(hub, home, "download", "me/tiny", HF_HUB_OFFLINE="1")
    assert out.strip() == found["path"] and "offline" in told
    own = tmp_path / "own"
    words = ("download", "me/tiny", "--all", "--local_dir", own, "--revision", "next", "--token", READ)
    verb(hub, home, *words)
    assert (own / "notes.txt").read_text() == "notes" and (own / "README.md").is_file()
    assert (own / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
    assert "nope" in verb(hub, home, "download", "me/tiny", "--revision", "nope", token=READ, ok=False)[1]
    about = json.loads(verb(hub, home, "info", "me/tiny", "--json", HF_HUB_OFFLINE="1")[0])
    assert about["source"] == "hub" and about["counted_from"] == "files"
    assert about["revision"] == about["cached"][0]["revision"] == commit and about["cached"][0]["names"] == ["main"]
    assert "me/tiny@" in verb(hub, home, "info", "me/tiny", HF_HUB_OFFLINE="1")[0]


def test_pull_requests(hub, home, tmp_path):
    """One is opened, and filled again; the branch stays as it is. It loads by its revision."""
    hub.add("me/tiny", small(tmp_path / "m"))
    before = hub.files("me/tiny")
    path = small(tmp_path / "new", num_labels=5)
    out, _ = verb(hub, home, "push", path, "me/tiny", "--create_pr", "--token", WRITE)
    assert out.strip() == f"{hub.url}/me/tiny/discussions/1" and hub.files("me/tiny") == before
    assert hub.files("me/tiny", "refs/pr/1")["config.json"] == (path / "config.json").read_bytes()
    small(path, num_labels=7)
    (path / "generation_config.json").write_text("{}")
    verb(hub, home, "push", path, "me/tiny", "--revision", "refs/pr/1", token=WRITE)
    assert hub.files("me/tiny", "refs/pr/1")["config.json"] == (path / "config.json").read_bytes()
    words = ("--revision", "refs/pr/1", "--cache_dir", tmp_path / "cache", "--json")
    there = Path(json.loads(verb(hub, home, "download", "me/tiny", *words)[0])["path"])
    assert (there / "config.json").read_bytes() == (path / "config.json").read_bytes()
    assert there.is_relative_to(tmp_path / "cache") and (there / "generation_config.json").is_file()
    assert hub.files("me/tiny") == before and not any("/branch/" in path for _, path in hub.requests)


def test_a_broken_download_goes_on(hub, home, tmp_path):
    path = small(tmp_path / "m", vocab_size=70_000)  # what came is kept by chunks of 10 MiB
    hub.add("me/tiny", path)
    hub.cut = 12_000_000
    env = hub.environment(home, None, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    done = warm.run(["modelcenter", "download", "me/tiny", "--json"], env, home)
    if done.returncode:  # huggingface_hub 1.5 does not go on by itself
        assert "was interrupted" in done.stderr and "run it again: downloaded data is kept" in done.stderr
        assert "Did you mean" not in done.stderr
        done = warm.run(["modelcenter", "download", "me/tiny", "--json"], env, home)
    found = json.loads(done.stdout)
    assert (Path(found["path"]) / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
    assert hub.ranges == [10 * 2**20], "the rest only"


@pytest.mark.full
def test_a_broken_upload_goes_on(hub, home, tmp_path):
    path = small(tmp_path / "m", max_shard_size="60KB")
    shards = {p.name for p in path.glob("model-*")}
    hub.refused = 2
    _, told = verb(hub, home, "push", path, "me/tiny", token=WRITE, ok=False)
    assert "another push continues from there" in told and "the storage is full" in told
    assert not shards & set(hub.files("me/tiny")), "nothing that looks whole"
    already = len(hub.large)
    assert already == 2 < len(shards)
    hub.refused = None
    hub.requests.clear()
    verb(hub, home, "push", path, "me/tiny", token=WRITE)
    assert shards <= set(hub.files("me/tiny"))
    assert sum(method == "PUT" for method, _ in hub.requests) == len(shards) - already


@pytest.mark.full
def test_one_format_and_its_shards(hub, home, tmp_path):
    """safetensors if there are any, else pickles; an index that names what is not there; no weights; no model."""
    path = small(tmp_path / "m")
    for name in ("pytorch_model.bin", "tf_model.h5", "onnx/model.onnx", "flax_model.msgpack"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"x")
    hub.add("me/many", path)
    verb(hub, home, "download", "me/many")
    assert "no tokenizer" in verb(hub, home, "download", "me/many", HF_HUB_OFFLINE="1")[1]
    assert sorted(hub.downloaded()) == ["config.json", "model.safetensors"]
    (path / "model.safetensors").unlink()
    hub.add("me/pickled", path)
    (other := tmp_path / "other").mkdir()
    verb(hub, other, "info", "me/pickled")  # its config is in the cache then
    told = verb(hub, other, "download", "me/pickled", HF_HUB_OFFLINE="1", ok=False)[1]
    assert "me/pickled: no weights in the cache (offline)" in told
    hub.requests.clear()
    verb(hub, home, "download", "me/pickled")
    assert sorted(hub.downloaded()) == ["config.json", "pytorch_model.bin"]
    (path / "pytorch_model.bin").unlink()
    hub.add("me/none", path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    hub.add("me/gone", path)
    (path / "config.json").unlink()
    hub.add("me/data", path)
    for name, says in (
        ("me/none", "no weights in the repository"),
        ("me/gone", "model-00001-of-00002.safetensors is missing"),
        ("me/data", "no config.json"),
    ):
        assert says in verb(hub, home, "download", name, ok=False)[1]
    assert "not a transformers model" in verb(hub, home, "download", "me/data", "--local_dir", "d", ok=False)[1]
    whole = Path(verb(hub, home, "download", "me/data", "--all")[0].strip())  # of any repository
    assert (whole / "onnx/model.onnx").is_file() and (whole.parents[1] / "refs/main").read_text() == whole.name
    verb(hub, home, "download", "me/none", "--all", "--local_dir", tmp_path / "all")
    assert (tmp_path / "all/onnx/model.onnx").is_file()


@pytest.mark.full
def test_names_and_tokens_that_the_hub_refuses_are_explained_in_one_line(hub, home, tmp_path):
    path = small(tmp_path / "m")
    hub.add("me/private", path, private=True)
    hub.add("me/gated", path, gated=True)
    hub.add("me/tiny", path)
    online = [
        (["download", "me/private"], "does not exist or is private"),
        (["download", "me/private", "--token", "hf_wrong"], "me/private"),
        (["download", "me/gated"], f"Open {hub.url}/me/gated while logged in"),
        (["download", "me/gated", "--local_dir", "x"], "is gated"),
        (["download", "bert-base-uncasd"], "Did you mean 'bert-base-uncased'"),
        (["download", "a b!"], "cannot be a Hub id"),
        (["download", "tiny/bert"], "preset without weights"),
        (["download", str(path)], "is a local directory"),
        (["download", "me/tiny", "--revision", "nope"], "no revision (branch, tag or commit) 'nope'"),
        (["info", "me/gated"], "is gated"),
        (["push", str(path), "me/x", "--token", READ], "A token with write access is needed"),
        (["push", str(path), "a/b/c"], "Give it as owner/name"),
        (["push", "nowhere", "me/x"], "is missing; give a directory to push"),
        (["push", str(path)], "the following arguments are required: REPO_ID"),
    ]
    offline = [
        (["download", "me/tiny"], "not in the cache"),
        (["download", "me/tiny", "--all"], "--all needs the Hub"),
        (["info", "me/other"], "not in the cache"),
        (["push", str(path), "me/x"], "HF_HUB_OFFLINE is set: unset it"),
    ]
    dead = [
        (["download", "me/tiny"], "http://127.0.0.1:9 cannot be reached"),
        (["push", str(path), "me/x"], "Check the network"),
    ]
    environments = ({}, {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"})
    for mistakes, more in zip((online, offline, dead), environments, strict=True):
        told = all_of(hub, home, [words for words, _ in mistakes], **more)
        for (words, says), (status, text) in zip(mistakes, told, strict=True):
            assert status == 2 and text.startswith("error: ") and says in text, (words, text)
            assert text.count("\n") == 1 and READ not in text and "hf_wrong" not in text, text
    assert "me/x" not in hub.repos


def all_of(hub: HubStub, home: Path, commands: list[list[str]], **environment: str) -> list[list]:
    """Run the verbs one after the other in one process; each one's exit status and last line of errors."""
    code = """
import contextlib, io, json, sys
from modelcenter import cli
out = []
for words in json.loads(sys.argv[1]):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = cli.main(words) or 0
        except SystemExit as end:
            status = end.code
    text = errors.getvalue()
    out.append([status, text[text.rfind("error: "):]])
print(json.dumps(out))
"""
    env = hub.environment(home, None, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **environment)
    done = warm.run(["-c", json.dumps(commands)], env, home, code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda d: (d / "training_args.bin").write_bytes(b"x"), "training_args.bin, which may run code"),
        (lambda d: (d / "sub").mkdir() or (d / "sub/x.PKL").write_bytes(b"x"), "sub/x.PKL, which may run code"),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "pytorch_model.bin, which may run code"),
        (lambda d: (d / "model.safetensors").unlink(), "has no weights"),
        (lambda d: (d / "config.json").unlink(), "has no config.json"),
        (lambda d: (d / "config.json").rename(d / "adapter_config.json"), "is an adapter, but only complete models"),
        (lambda d: (d / "adapter_config.json").write_text("{}"), "holds a model and an adapter"),
        (lambda d: (d / "config.json").write_text("{"), "config.json cannot be read as JSON"),
        (lambda d: (d / "x.incomplete").write_bytes(b""), "an unfinished download or save"),
        (lambda d: os.truncate(d / "model.safetensors", 5000), "model.safetensors is not a valid safetensors file"),
        (lambda d: (d / "a.txt").symlink_to("/etc/hostname"), "outside the directory; copy the file"),
        (lambda d: (d / "a.txt").symlink_to("nowhere"), "a broken link"),
        (lambda d: (d / "manifest.json").write_text("{}"), "is a distributed checkpoint"),
        (lambda d: _without(d, "bert.encoder.layer.0.output.dense.bias"), "bert.encoder.layer.0.output.dense.bias"),
        (lambda d: _without(d, "classifier.bias"), "classifier.bias"),
        (lambda d: _without(d, "classifier.bias", "classifier.weight"), "They belong to the head"),
        (lambda d: _without(d, bert_more=torch.ones(2)), "bert_more"),
        (lambda d: _config(d, id2label={str(i): str(i) for i in range(5)}), "wrong shape"),
        (lambda d: _config(d, hidden_act="nope"), "hidden_act"),
        (lambda d: _config(d, vocab_size=7), "wrong shape"),
        (lambda d: _config(d, architectures=None), "name no head"),
    ],
)
def test_only_whole_directories_without_pickles(tmp_path, spoil, says):
    path = small(tmp_path / "m")
    check_directory(path)
    spoil(path)
    with pytest.raises(ValueError, match=re.escape(says)):
        check_directory(path)


def _without(path: Path, *names: str, **more: torch.Tensor) -> None:
    tensors = load_file(path / "model.safetensors")
    for name in names:
        del tensors[name]
    save_file({**tensors, **more}, path / "model.safetensors", {"format": "pt"})


def _config(path: Path, **changes) -> None:
    values = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(values))


def test_a_shard_away(tmp_path):
    path = small(tmp_path / "m", max_shard_size="60KB")
    next(path.glob("model-*")).unlink()
    with pytest.raises(ValueError, match="but 1 are missing"):
        check_directory(path)


def test_what_is_not_known_here_is_said(tmp_path):
    path = small(tmp_path / "m")
    _config(path, model_type="funnel")
    said = []
    assert "model.safetensors" in check_directory(path, said.append)
    assert len(said) == 1 and "'funnel' is not known here" in said[0]


def test_code_that_is_not_there_is_said(tmp_path):
    mc.from_config("tiny/minicpm", "causal-lm").save_pretrained(path := tmp_path / "m")
    _config(path, auto_map={"AutoModel": "modeling_x.X", "AutoConfig": "them/theirs--configuration_x.XConfig"})
    said: list[str] = []
    check_directory(path, said.append)
    assert len(said) == 1 and "names modeling_x.py (auto_map), which is missing" in said[0]
    (path / "modeling_x.py").write_text("")
    check_directory(path, said.append)
    assert len(said) == 1


def test_the_model_of_a_run_is_pushed_once_it_has_finished(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("{}")
    with pytest.raises(ValueError, match="it has not finished"):
        model_directory(run)
    small(run / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_directory(run) == model_directory("~/run") == run / "model"


@pytest.mark.full
def test_a_run_pushes_its_model(hub, home, tmp_path):
    """What would keep it from that is said at once; after a failure the error names the command that goes on."""
    words = ["finetune", "classification", *command(flags(write_folder(tmp_path), max_steps=1))]
    for token, repo, env, says in [
        (None, "me/run", {}, "pushing to me/run needs a token with write access: HF_TOKEN or `hf auth login`"),
        (WRITE, "me/run", {"HF_HUB_OFFLINE": "1"}, "pushing to me/run needs the Hub, but HF_HUB_OFFLINE is set"),
        (WRITE, "me/a/run", {}, "pushing to me/a/run would fail: .* Give it as owner/name"),
    ]:
        told = verb(hub, home, *words, "--push_to_hub", repo, token=token, ok=False, **env)[1]
        assert re.search(says, told) and not (tmp_path / "run").exists()
    told = verb(hub, home, *words, "--push_to_hub", "me/run", token=READ, ok=False)[1]
    assert "write access" in told and not hub.repos
    (remedy,) = re.findall(r"`(modelcenter push [^`]*)` pushes it", told)
    verb(hub, home, *shlex.split(remedy)[1:], token=WRITE)
    assert hub.files("me/run")["model.safetensors"] == (tmp_path / "run/model/model.safetensors").read_bytes()
    out = verb(hub, home, *words, "--overwrite_output_dir", "--push_to_hub", "me/another", token=WRITE)[0]
    assert f"pushed to {hub.url}/me/another/commit/" in out and "model.safetensors" in hub.files("me/another")


# -- the card --------------------------------------------------------------------------------------------------------

SUMMARY = {
    "status": "finished",
    "task": "classification",
    "steps": 120,
    "epochs": 3.0,
    "tokens": 45678,
    "seconds": 12.5,
    "tokens_per_second": 3654.2,
    "last": {"step": 120, "loss": 0.31234, "padding": 0.5},
    "peak_memory": {"host_bytes": 1_500_000_000},
    "data": {"train": {"rows": 1234, "sha256": {"/home/me/train.jsonl": "ab" * 32}}, "eval": None},
    "command": "/home/me/.venv/bin/modelcenter finetune classification --model bert-base-uncased --columns text=/a "
    "--train_data=/home/me/train.jsonl --output_dir '/home/me/my runs/a' --cache runs/x --hub_token hf_" + "abcdef" * 6,
    "finished_at": "2026-11-21T10:00:00+0000",
    "versions": {"modelcenter": "2.0", "torch": "2.13.0"},
    "hardware": {"device": "cpu", "ranks": 2, "cpus": 8, "machine": "x86_64"},
}
FACTS = ("120 (3 epochs)", "45,678", "25.00 %", "1,234 rows, train.jsonl (`abababababababab`)", "1.5 GB", "2 rank(s)",
         "torch 2.13.0", "0.3123")  # fmt: skip


@pytest.mark.full
def test_a_run_s_card_is_whole(hub, home, tmp_path):
    """Base, data, metrics, command, versions, hardware, curve; the Hub validates it, and nothing secret is in it."""
    run = tmp_path / "run"
    metrics = {"accuracy": 0.91, "f1": float("nan")}
    model = mc.from_config("tiny/bert", "sequence-classification")
    card = {"base_model": "google-bert/bert-base-uncased", "datasets": ["nyu-mll/glue"], "dataset_config": "sst2"}
    card |= {"metrics": metrics, "dataset_split": "validation", "license": "apache-2.0", "language": "en"}
    model.save_pretrained(run / "model", card=card)
    (run / "config.yaml").write_text("{}")
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    rows = [{"step": 1, "padding": 0.5}, {"step": 2, "eval_loss": 1}, {"step": 3, "padding": 0.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "curves.png").write_bytes(b"\x89PNG")
    complete_card(run, SUMMARY)
    once = (run / "model/README.md").read_text()
    complete_card(run, SUMMARY)
    text = (run / "model/README.md").read_text()
    assert text == once, "a second time changes nothing"
    for fact in FACTS:
        assert fact in text, fact
    assert "hf_abcdef" not in text and "--hub_token hf_..." in text and "/home/me" not in text
    assert "\nmodelcenter finetune" in text and "text=/a --train_data=train.jsonl " in text and "--cache runs/x" in text
    assert "More" not in text and "Needed" not in text and "![" in text and "(curves.png)" in text
    data = ModelCard(text).data
    assert data.base_model == "google-bert/bert-base-uncased" and data.base_model_relation == "finetune"
    assert data.metrics == ["accuracy"] and len(data.eval_results) == 1
    result = data.eval_results[0]
    assert (result.dataset_type, result.dataset_config, result.dataset_split) == ("nyu-mll/glue", "sst2", "validation")
    assert (result.metric_type, result.metric_value, result.task_type) == ("accuracy", 0.91, "text-classification")
    verb(hub, home, "push", run, "me/run", token=WRITE)
    assert ("POST", "/api/validate-yaml") in hub.requests
    assert hub.files("me/run")["README.md"].decode() == text and hub.files("me/run")["curves.png"] == b"\x89PNG"


@pytest.mark.parametrize(
    ("front", "says"),
    [
        ("license: 3", "Invalid metadata in license"),
        pytest.param("metrics: [accuracy, 3]", "Invalid metadata in metrics", marks=pytest.mark.full),
        ("a: [b", "front matter is not valid"),
    ],
)
def test_cards_that_the_hub_would_refuse_are_not_sent(hub, home, tmp_path, front, says):
    path = small(tmp_path / "m")
    (path / "README.md").write_text(f"---\n{front}\n---\n# x\n")
    told = verb(hub, home, "push", path, "me/x", token=WRITE, ok=False)[1]
    assert says in told and "me/x" not in hub.repos


@pytest.mark.parametrize("task", ["masked-lm", "pretraining", "multiple-choice"])
def test_every_task_has_a_card(task):
    model = mc.from_config("tiny/bert", task)
    data = ModelCard(make_card(model, "X", {"metrics": {"accuracy": 1.0}})).data
    assert data.pipeline_tag and data.eval_results[0].dataset_type == "local"
    # A discriminator fills no masks.
    discriminator = ModelCard(make_card(mc.from_config("tiny/electra", task), "X")).data
    assert discriminator.pipeline_tag == (None if task == "pretraining" else data.pipeline_tag)


def test_seq2seq_cards():
    text = make_card(mc.from_config("tiny/t5", "seq2seq-lm"), "T5ForConditionalGeneration", {"metrics": {"rouge": 0.5}})
    assert ModelCard(text).data.pipeline_tag == "text-generation" and "text2text-generation" in text


def test_details_that_no_card_has_are_named():
    model = mc.from_config("tiny/bert")
    with pytest.raises(ValueError, match="unknown key 'licence'"):
        make_card(model, "BertModel", {"licence": "mit"})
    with pytest.raises(ValueError, match="metric 'accuracy' is 'good', expected a number"):
        make_card(model, "BertModel", {"metrics": {"accuracy": "good"}})


def test_tokens_are_blotted_out(tmp_path):
    names = "base_model: me/hf_bert, hf_train.jsonl, hf_hub_download"
    secret = "hf_" + "aB3" * 11
    assert without_tokens(f"{names}: {secret} or api_org_{'x' * 34}.") == f"{names}: hf_... or hf_...."
    assert without_tokens("http://me:p%40ss@hub/x, ssh://git@hub/y:z@1") == "http://...@hub/x, ssh://git@hub/y:z@1"
    assert without_tokens("hf_oauth_scopes hf_oauth_" + "eyJh.bG-ci_" * 4) == "hf_oauth_scopes hf_..."
    mc.from_config("tiny/bert").save_pretrained(tmp_path / "m", card=f"# {names} {secret}")
    assert (tmp_path / "m/README.md").read_text() == f"# {names} hf_..."


class FakeApi:
    """The part of huggingface_hub.HfApi that an upload takes, of one repository."""

    there: list[str] = []
    private = False
    error: Exception | None = None

    def __init__(self, token=None):
        type(self).deleted, type(self).asked = None, []

    def create_repo(self, repo_id, private, exist_ok):
        return types.SimpleNamespace(repo_id=repo_id)

    def repo_info(self, repo_id):
        return types.SimpleNamespace(private=self.private)

    def create_branch(self, repo_id, branch, exist_ok):
        assert exist_ok
        self.asked.append(branch)

    def list_repo_files(self, repo_id, revision):
        self.asked.append(revision)
        return self.there

    def upload_folder(self, delete_patterns, **_):
        if self.error is not None:
            raise self.error
        type(self).deleted = [n for n in self.there if any(fnmatch.fnmatchcase(n, p) for p in delete_patterns)]
        return types.SimpleNamespace(oid="0" * 40, commit_url="address", pr_url=None)


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    for name in ("there", "private", "error"):
        monkeypatch.setattr(FakeApi, name, getattr(FakeApi, name))
    return FakeApi


def test_what_a_push_replaces(api, tmp_path):
    """All of an earlier model and tokenizer, as where one is saved; nothing in other folders."""
    model = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "tf_model.h5"]
    model += ["generation_config.json", "adapter_config.json", "adapter_model.safetensors", "model-[1].safetensors"]
    tokenizer = ["vocab.txt", "chat_template.jinja", "additional_chat_templates/tool.jinja"]
    others = ["README.md", "model_v1/model.safetensors", "models/ema.safetensors", "model[1].txt", "notes/vocab.txt"]
    api.there = [*model, *tokenizer, *others]
    small(tmp_path / "m")
    upload(tmp_path / "m", "me/x")
    assert api.deleted == model
    (tmp_path / "m/tokenizer.json").write_text("{}")
    upload(tmp_path / "m", "me/x")
    assert api.deleted == [*model, *tokenizer]
    upload(tmp_path / "m", "me/x", keep=(("tokenizer.json", "vocab.txt"),))  # the repository's own stays
    assert api.deleted == model


def test_a_branch_is_made_and_the_files_looked_at_are_its_own(api, tmp_path):
    small(tmp_path / "m")
    for given, asked in [
        ({"revision": "next"}, ["next", "next"]),
        ({"revision": "next", "create_pr": True}, ["next"]),  # against it, so it must be there
        ({"revision": "refs/pr/1"}, ["refs/pr/1"]),
        ({}, [None]),
    ]:
        upload(tmp_path / "m", "me/x", **given)
        assert api.asked == asked


def test_a_public_repository_is_not_pushed_to_as_a_private_one(api, tmp_path):
    small(tmp_path / "m")
    with pytest.raises(ValueError, match="me/x exists and is public.*--private.*nothing was uploaded"):
        upload(tmp_path / "m", "me/x", private=True)
    assert api.deleted is None
    api.private = True
    upload(tmp_path / "m", "me/x", private=True)
    assert api.deleted == []


def test_an_upload_that_breaks_in_hf_xet_is_explained(api, tmp_path):
    api.error = RuntimeError("Data processing error: CAS service error : Request failed after 5 retries")
    small(tmp_path / "m")
    with pytest.raises(ValueError, match="me/x failed: Data processing error: CAS.* continues from there; HF_HUB_DIS"):
        upload(tmp_path / "m", "me/x")


@pytest.mark.parametrize("ask", [list_files, download_snapshot])
def test_a_hub_that_does_not_answer_about_files_is_not_waited_for(ask, monkeypatch, tmp_path):
    """Where a network drops what is sent, there is no end to waiting without a limit."""
    given = {}

    def model_info(self, repo, **how):
        given.update(how)
        raise huggingface_hub.errors.HTTPError("timed out")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    options = HubOptions("next", "hf_secret", tmp_path)
    with pytest.raises(UnreachableError, match="timed out"):
        ask("me/x", options) if ask is list_files else ask("me/x", options, local_dir=tmp_path / "own")
    assert given["timeout"] == huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT > 0
    assert (given["revision"], given["token"]) == ("next", "hf_secret")


def test_a_hub_that_does_not_answer_about_a_card_is_not_waited_for(monkeypatch):
    constants = huggingface_hub.constants
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.05)
        monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
        check_card("# a card", "README.md")


def test_a_card_that_is_no_utf8(tmp_path):
    path = small(tmp_path / "m")
    (path / "README.md").write_bytes("# d\xe9j\xe0 vu".encode("latin-1"))
    for work in (lambda: push_directory(path, "me/x"), lambda: mc.from_config("tiny/bert").save_pretrained(path)):
        with pytest.raises(ValueError, match="README.md is not in UTF-8"):
            work()


def test_a_full_disk_leaves_the_card_and_the_curve_as_they_were(tmp_path):
    small(tmp_path / "model")
    card = (tmp_path / "model/README.md").read_bytes()
    (tmp_path / "curves.png").write_bytes(bytes(5000))
    (tmp_path / "model/curves.png").write_bytes(b"before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))  # a file that grows beyond it is an OSError
    try:
        with pytest.raises(OSError, match="model/curves.png'$"):
            complete_card(tmp_path, SUMMARY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "model/curves.png").read_bytes() == b"before"
    assert (tmp_path / "model/README.md").read_bytes() == card
    assert not [path for path in (tmp_path / "model").iterdir() if path.name.startswith(".")]


def test_a_card_that_cannot_be_completed(tmp_path):
    with pytest.raises(ValueError, match="cannot be completed"):
        complete_card(tmp_path, SUMMARY)


@pytest.mark.parametrize("words", [["download", "me/absent"], ["push", "my-bert", "me/my-bert"]])
def test_the_password_of_a_mirror_is_not_shown(words, hub, home):
    """As in HF_ENDPOINT=https://user:password@mirror; huggingface_hub's errors repeat the address."""
    small(home / "my-bert")
    address = hub.url.replace("://", "://me:s3cret@")
    out, err = verb(hub, home, *words, ok=False, HF_ENDPOINT=address)
    assert "error: " in err and hub.url.replace("://", "://...@") in err and "s3cret" not in out + err
