"""Names and directories, without a network; and the presets."""

import math
import pickle
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers

import modelcenter as mc
from modelcenter import registry
from modelcenter.hub.files.embedding_files import beside
from modelcenter.hub.info import model_info
from modelcenter.hub.remote.download import HubOptions
from modelcenter.hub.resolve import resolve
from modelcenter.layers.rotary import Rotary
from modelcenter.registry import list_models, preset, preset_names


def test_directories(saved, tmp_path, monkeypatch):
    path = saved("base")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (path, str(path), "theirs", "./theirs", "~/theirs", "theirs/"):
        found = resolve(name)
        assert found.weights.name == "model.safetensors" and found.repo is None and not found.distributed
    assert resolve("theirs", weights=False).weights is None


@pytest.mark.parametrize(
    "name, message",
    [
        ("./nothing", "no such directory: nothing"),
        ("{tmp}/their", "no such directory: .*Did you mean '.*/theirs'"),
        ("a/b/c", "no such directory"),
        ("~/nothing-of-this-name", "no such directory"),
        ("modle.safetensors", r"no such file: modle.safetensors\.$"),  # the Hub is not asked
        ("run/config.json", r"no such file: run/config.json\.$"),
        ("nothing/", "no such directory: nothing"),
        ("{tmp}", "is a directory without config.json, so not a checkpoint. Did you mean '.*/theirs'"),
        ("{tmp}/theirs/config.json", "is a file; give the directory"),
        ("cpm1-large", "weights and sizes of 'cpm1-large' were never published; name a directory"),
        ("tiny/bert", "'tiny/bert' is a preset without weights: modelcenter.from_config"),
    ],
)
def test_wrong_names(name, message, saved, tmp_path):
    saved("base")
    with pytest.raises(ValueError, match=message):
        mc.from_pretrained(name.replace("{tmp}", str(tmp_path)))


def test_a_file_that_holds_no_weights_has_no_config_either(tmp_path):
    """It is there, whatever its ending."""
    (tmp_path / "model.onnx").touch()
    with pytest.raises(ValueError, match=r"model.onnx is a file; give the directory .* or a weight file .*, \.ckpt\)"):
        mc.from_pretrained(tmp_path / "model.onnx", config="tiny/bert")


def test_a_weight_file_where_its_directory_is_wanted(saved):
    weights, index = (saved("base") / f"model.safetensors{suffix}" for suffix in ("", ".index.json"))
    index.write_text("{}")
    for path, ask in ((weights, mc.from_config), (weights, model_info), (index, model_info)):
        with pytest.raises(ValueError, match=f"{path} is a weight file; expected its directory: {path.parent}$"):
            ask(str(path))


def test_what_a_killed_save_was_replacing_is_named(saved, tmp_path, monkeypatch):
    saved("base").rename(tmp_path / ".out.replaced-0123")
    with pytest.raises(
        ValueError, match="no such directory: .*/out. A save .* was killed; .*/.out.replaced-0123 is the old directory"
    ):
        mc.from_pretrained(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="A save that was replacing it was killed"):
        mc.from_pretrained("out")  # it could be a name on the Hub, too


def test_what_is_not_on_the_hub_may_be_a_misspelt_folder(saved, tmp_path, monkeypatch):
    saved("base")
    monkeypatch.chdir(tmp_path.parent)
    name = f"{tmp_path.name}/theris"
    with pytest.raises(ValueError, match=f"not in the cache .* offline .*Did you mean '{tmp_path.name}/theirs'"):
        resolve(name, HubOptions(local_files_only=True))


def test_an_adapter_is_told_from_a_model(saved, tmp_path, caplog):
    base = saved("base")
    alone, of_run = tmp_path / "alone", tmp_path / "run" / "adapter"
    for folder in (alone, of_run):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "me/base", "peft_type": "LORA"}')
    with pytest.raises(ValueError, match=r"an adapter for me/base, not a model by itself.*export me/base --adapter "):
        mc.from_pretrained(alone)
    (alone / "adapter_config.json").write_text('{"base_model_name_or_path": "me/base", "peft_type": "IA3"}')
    with pytest.raises(ValueError, match=r"is an adapter for me/base, not a model by itself \(peft_type 'IA3'\)$"):
        mc.from_pretrained(alone)
    (alone / "adapter_config.json").write_text('{"base_model_name_or_path": ["me/base"]}')
    with pytest.raises(ValueError, match=r"is an adapter for BASE, not a model by itself"):
        mc.from_pretrained(alone)
    base.rename(tmp_path / "run" / "model")
    with pytest.raises(ValueError, match=r"is an adapter for me/base; .*/run/model is the model with it merged"):
        mc.from_pretrained(of_run)
    mc.from_pretrained(tmp_path / "run" / "model")  # as would one that lies beside its base
    assert not caplog.text
    (tmp_path / "run" / "model" / "adapter_config.json").write_text("{}")
    mc.from_pretrained(tmp_path / "run" / "model")
    assert caplog.text.count("also holds an adapter (adapter_config.json), and the model is loaded without it") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_config_that_does_not_parse(text, saved):
    path = saved("base")
    (path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json (cannot be read as JSON|holds a list)"):
        mc.from_pretrained(path)


def test_config_field_is_named_with_its_file(saved, config_of):
    path = saved("base")
    config_of(path, rotary_base=10000)
    with pytest.raises(ValueError, match=f"{path}: config field not understood: 'rotary_base' = 10000"):
        mc.from_pretrained(path)


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_what_is_no_checkpoint_does_not_hide_a_name(make, tmp_path, monkeypatch):
    """A folder, or a file such as a log."""
    make(tmp_path / "bert-base-cased")
    monkeypatch.chdir(tmp_path)
    assert resolve("bert-base-cased", weights=False).repo == "google-bert/bert-base-cased"


FIRST = {preset(name)["config"]["model_type"]: name for name in reversed(preset_names())}.values()  # of each family


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.full) for name in preset_names()]
)
def test_presets(name):
    """Each has fields that we and transformers understand alike, and the number of parameters that it says."""
    entry = preset(name)
    assert set(entry) == {"hub", "revision", "parameters", "confirmed", "config"}
    kind = entry["config"]["model_type"]
    spec = registry.get(kind, entry["config"].get("architectures"))
    if entry["parameters"] is None:  # whose sizes nobody published
        assert not entry["confirmed"] and entry["hub"] is None
        with pytest.raises(ValueError, match="missing field"):
            mc.from_config(name)
        return
    config = spec.arch_map().config.read(entry["config"], spec.config_class())
    if name == "minicpm4.1-8b":  # whose factors its published file alone says
        config = config.replace(rope_scaling=None)
    with torch.device("meta"):
        named = spec.arch_map().declared_task(config.architectures)
        assert named is not None
        ours = spec.model_class()(config, named if named == "text-encoding" else spec.model_class().tasks[0])
    assert sum(p.numel() for p in ours.parameters()) == entry["parameters"]
    if kind in transformers.CONFIG_MAPPING:
        auto = transformers.AutoModelForSeq2SeqLM if kind == "encoder-decoder" else transformers.AutoModel
        auto = transformers.AutoModelForTextEncoding if named == "text-encoding" else auto
        # The MiniCPM3 of transformers 5.17 takes no longrope as it was published, without a `factor`.
        sizes = {field: value for field, value in entry["config"].items() if field != "rope_scaling"}
        with torch.device("meta"):
            theirs = auto.from_config(transformers.CONFIG_MAPPING[kind](**sizes))
        # Marian there holds its sinusoids as a parameter that is not trained; PEGASUS' are one here, too.
        held = (p for p in theirs.parameters() if p.requires_grad or kind != "marian")
        assert sum(p.numel() for p in held) == entry["parameters"]


@pytest.mark.parametrize("name", ["minicpm3-4b", "minicpm4-0.5b", "minicpm4-8b"])
def test_frequencies_of_minicpm(name):
    """Factors are as published: two of one list that lie opposite each other have the same sum."""
    values = preset(name)["config"]
    spec = registry.get(values["model_type"])
    config = spec.arch_map().config.read(values, spec.config_class())
    dim = getattr(config, "qk_rope_head_dim", config.head_dim)
    factors = torch.tensor(config.rope_scaling["short_factor"], dtype=torch.float64)
    assert config.rope_scaling["long_factor"] == factors.tolist() and factors.diff().min() > 0
    torch.testing.assert_close(
        factors + factors.flip(0), (factors[0] + factors[-1]).expand(dim // 2), rtol=1e-6, atol=0
    )
    rotary = Rotary(dim, config.rope_theta, config.rope_scaling, config.max_positions)
    plain = Rotary(dim, config.rope_theta).frequencies(torch.device("cpu"))
    assert rotary.limit == math.inf and rotary.amplitude == 1.0
    torch.testing.assert_close(rotary.frequencies(torch.device("cpu")), plain / factors.float())
    assert values["eos_token_id"] == [2, 73440]


def test_a_preset_whose_frequencies_are_not_known_makes_no_model(saved):
    sizes = {"hidden_size": 64, "intermediate_size": 8, "num_layers": 1, "vocab_size": 9}
    needed = "rope_scaling: rope_type 'longrope' needs short_factor, long_factor"
    with pytest.raises(ValueError, match=needed):
        mc.from_config("minicpm4.1-8b", **sizes)
    with pytest.raises(ValueError, match=needed):
        mc.from_pretrained(saved("base") / "model.safetensors", config="minicpm4.1-8b", **sizes)
    one = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
    assert mc.from_config("minicpm4.1-8b", **sizes, rope_scaling=one).config.rope_scaling == one


@pytest.mark.parametrize(
    ("name", "hub"),
    [
        ("gpt2", "openai-community/gpt2"),
        ("gpt2-base", "openai-community/gpt2"),
        ("gpt-j-6b", "EleutherAI/gpt-j-6b"),
        ("CPM-Generate", "TsinghuaAI/CPM-Generate"),
        ("wenzhong-gpt2-3.5b", "IDEA-CCNL/Wenzhong-GPT2-3.5B"),
        ("bert-base-cased", "google-bert/bert-base-cased"),
        ("facebook/opt-125m", "facebook/opt-125m"),
    ],
)
def test_names_of_presets(name, hub):
    """Our name, the Hub id, or that without its owner."""
    assert preset(name)["hub"] == hub
    if "/" not in name:
        assert resolve(name, weights=False).repo == hub


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("brt", "'bert-base-cased' or 'bart-base' or 'mbart-large-50'"),  # by their first words
        ("Bert-base", "'bert-base-cased' or 'bert-base-chinese' or 'bert-base-uncased'"),  # what begins so
        ("bert-base-casd", "'bert-base-cased' or 'bert-base-uncased' or 'distilbert-base-cased'"),
        ("llama", "'llama2-7b' or 'tiny/llama'"),
        ("data.csv", None),
    ],
)
def test_presets_close_to_a_name(typed, suggested):
    assert registry.nearest_preset(typed) == ("" if suggested is None else f" Did you mean {suggested}?")


def test_names_of_the_bert_family():
    hubs = {info.name: info.hub for info in list_models() if info.family == "bert"}
    assert hubs.pop("labse") == "sentence-transformers/LaBSE"
    assert hubs == {name: f"google-bert/{name}" for name in hubs}
    assert {"bert-base-uncased", "bert-large-cased", "bert-base-chinese", "bert-base-multilingual-cased"} <= set(hubs)


def test_a_dead_network_is_not_a_missing_file(monkeypatch):
    """The config was cached, the weights were not, and nobody set HF_HUB_OFFLINE."""
    import huggingface_hub

    from modelcenter.hub.remote import download

    def dead(*args, **kwargs):
        raise huggingface_hub.errors.HTTPError("no connection")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", dead)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", dead)
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    with pytest.raises(ValueError, match="its model.safetensors is not in the cache.*be reached .no connection."):
        download.download_file("me/tiny", "model.safetensors", download.HubOptions())
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *a, **k: huggingface_hub._CACHED_NO_EXIST)
    assert download.download_file("me/tiny", "model.safetensors", download.HubOptions()) is None


def test_what_a_repository_lacked_is_asked_for_again_where_it_may_have_come_since(monkeypatch, tmp_path):
    """On a branch, which moves; a commit does not. A Hub that is busy is asked by what tries again."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    from modelcenter.hub.remote import download

    asked, cached, statuses = [], [], [403, 403, 503, 200, 503]

    def metadata(url, token):
        asked.append((url.split("/")[-2], token))
        if (status := statuses.pop()) != 200:
            error = HfHubHTTPError.__new__(HfHubHTTPError)
            error.response = types.SimpleNamespace(status_code=status)
            raise error

    def look_up(repo, name, **where):
        cached.append(where)
        return huggingface_hub._CACHED_NO_EXIST

    def fetch(repo, name, **where):
        assert where == {"revision": "main", "token": "t", "cache_dir": tmp_path, "local_files_only": False}
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", look_up)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    options = download.HubOptions("0" * 40, "t", tmp_path)
    assert download.download_file("me/tiny", "config.json", options) is None and not asked
    assert cached == [{"cache_dir": tmp_path, "revision": "0" * 40}]
    for _ in range(2):
        found = download.download_file("me/tiny", "config.json", download.HubOptions("main", "t", tmp_path))
        assert found == tmp_path / "config.json" and asked.pop() == ("main", "t")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(download.UnreachableError):  # which then gives up
        patch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **where: None)
        patch.setattr(huggingface_hub, "hf_hub_download", mock.Mock(side_effect=LocalEntryNotFoundError("no network")))
        download.download_file("me/tiny", "config.json", download.HubOptions("main", "t", tmp_path))
    with pytest.raises(ValueError, match="downloading config.json of .*me/tiny failed"):
        download.download_file("me/tiny", "config.json", download.HubOptions("main", "t", tmp_path))
    assert download.is_reachable("me/tiny", "config.json", download.HubOptions("main"))  # it said no, and so something
    offline = download.HubOptions(local_files_only=True)
    assert not statuses and not download.is_reachable("me/tiny", "config.json", offline)


def test_a_connection_that_breaks_off_is_no_hub_that_cannot_be_reached():
    from huggingface_hub import errors

    from modelcenter.hub.remote import download

    class RemoteProtocolError(errors.HTTPError):
        """As the one of httpx or httpx2, whichever huggingface_hub uses."""

    told = r"downloading files of .*me/tiny was interrupted \(peer closed\).* run it again: downloaded data is kept$"
    with pytest.raises(download.UnreachableError, match=told):
        with download.explain_errors("me/tiny", download.HubOptions()):
            raise RemoteProtocolError("peer closed")


@pytest.mark.parametrize(
    "status, fix",
    [
        (429, "Run it again later; logged-in users .* may send more requests"),
        (503, "Run it again later"),
        (403, "Check HF_ENDPOINT and the token's rights"),
    ],
)
def test_a_hub_that_answers_with_a_status_can_be_reached(status, fix):
    from huggingface_hub import errors

    from modelcenter.hub.remote import download

    answered = errors.HTTPError(f"{status} for url:\nhttp://hub.")
    answered.response = types.SimpleNamespace(status_code=status)
    what = "does not serve model.safetensors of me/tiny, which is not in the cache"
    told = rf"{what}: {status} for url: http://hub. {fix}$"
    with pytest.raises(download.UnreachableError, match=told):
        with download.explain_errors("me/tiny", download.HubOptions(), "model.safetensors"):
            raise errors.LocalEntryNotFoundError("check your connection") from answered


def test_a_cache_that_cannot_be_written(monkeypatch):
    import huggingface_hub

    from modelcenter.hub.remote import download

    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "/cache/blobs/1")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    with pytest.raises(ValueError, match="config.json of .*/me/tiny failed: No space left on device ./cache.*HF_HOME"):
        download.download_file("me/tiny", "config.json", download.HubOptions())

    def absent(*args, **kwargs):
        raise huggingface_hub.errors.EntryNotFoundError("404")

    # That there is no such file need not be noted.
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", absent)
    assert download.download_file("me/tiny", "tokenizer_config.json", download.HubOptions()) is None


@pytest.mark.parametrize("kind", ["GatedRepoError", "RepositoryNotFoundError"])
def test_what_is_cached_loads_without_the_token_that_it_was_downloaded_with(kind, saved, tmp_path, monkeypatch, caplog):
    """By another program, say, which does not note that there is no generation_config.json."""
    import huggingface_hub

    held = tmp_path / "models--me--gated/snapshots" / ("0" * 40)
    (tmp_path / "models--me--gated/refs").mkdir(parents=True)
    (tmp_path / "models--me--gated/refs/main").write_text(held.name)
    held.parent.mkdir()
    saved("base").rename(held)

    def refused(*args, **kwargs):
        error = (cls := getattr(huggingface_hub.errors, kind)).__new__(cls)
        error.response = types.SimpleNamespace(status_code=401)
        raise error

    def cached(repo, name, local_files_only, **_):
        if not (held / name).is_file() and local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")
        return str(held / name) if (held / name).is_file() else refused()

    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refused)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", cached)
    found = resolve("me/gated", HubOptions(cache_dir=tmp_path))
    assert found.directory == held and found.weights == held / "model.safetensors"
    assert "me/gated: the Hub now denies access to it; using the cached files" in caplog.text
    (held / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="is gated" if kind == "GatedRepoError" else "does not exist or is private"):
        resolve("me/gated", HubOptions(cache_dir=tmp_path))


def test_a_shard_that_is_not_there(saved, tmp_path, monkeypatch):
    """As after a download that was broken off, or in a repository from which it is gone."""
    import huggingface_hub

    held = tmp_path / "models--me--many/snapshots" / ("0" * 40)
    (tmp_path / "models--me--many/refs").mkdir(parents=True)
    (tmp_path / "models--me--many/refs/main").write_text(held.name)
    held.parent.mkdir()
    saved("base", max_shard_size="30KB").rename(held)
    options = HubOptions(cache_dir=tmp_path, local_files_only=True)
    assert resolve("me/many", options).weights == held / "model.safetensors.index.json"
    shard = sorted(held.glob("*.safetensors"))[-1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"me/many: {shard.name}.* is not in the cache while offline .*`modelcenter d"):
        resolve("me/many", options)

    def absent(repo, name, **_):
        if (held / name).is_file():
            return str(held / name)
        raise huggingface_hub.errors.EntryNotFoundError("404")

    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, **_: absent("", url.split("/")[-1]))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", absent)
    with pytest.raises(ValueError, match=f"the index lists {shard.name}, which is not in the repository"):
        resolve("me/many", HubOptions(cache_dir=tmp_path))


@pytest.mark.parametrize(
    "error, says",
    [
        (
            RuntimeError("Data processing error: CAS service error"),
            "CAS service error.*run it again.*HF_HUB_DISABLE_XET=1",
        ),
        (OSError("Consistency check failed: file should be of size 9"), "should be of size 9. Run it again"),
        (NotADirectoryError(20, "Not a directory", "x"), "name a writable directory"),
    ],
)
def test_a_download_that_breaks_says_what_to_do(error, says, monkeypatch):
    import huggingface_hub

    from modelcenter.hub.remote import download

    def broken(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", broken)
    with pytest.raises(ValueError, match=f"model.safetensors of .*/me/tiny failed: .*{says}") as raised:
        download.download_file("me/tiny", "model.safetensors", download.HubOptions())
    assert isinstance(raised.value, download.UnreachableError) is isinstance(error, RuntimeError)


def test_a_hub_that_says_nothing_is_not_waited_for(monkeypatch):
    """A firewall that drops what is sent: what lies beside the weights is left out."""
    import socket

    from huggingface_hub import constants

    from modelcenter.hub.remote import download
    from modelcenter.hub.sidecar import SidecarFiles

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.05)
        monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
        with pytest.raises(download.UnreachableError, match="cannot be reached"):
            download.list_files("me/tiny", download.HubOptions())
        assert SidecarFiles(None, "me/tiny").tokenizer() == {}


def test_what_the_hub_has_listed_is_not_asked_for_before_it_is_downloaded(monkeypatch, tmp_path):
    import huggingface_hub

    from modelcenter.hub import sidecar
    from modelcenter.hub.remote import download

    def asked(*args, **kwargs):
        raise AssertionError("asked")

    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    folder = "additional_chat_templates"
    dishonest = [f"{folder}/../../x.jinja", f"{folder}/a/b.jinja", "../tokenizer.json"]  # no paths to write to
    listed = ["vocab.txt", "config.json", f"{folder}/rag.jinja", *dishonest]
    monkeypatch.setattr(sidecar, "list_files", lambda *args: listed)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", asked)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, name, **_: str(tmp_path / name))
    found = sidecar.SidecarFiles(None, "me/tiny", download.HubOptions("0" * 40, cache_dir=tmp_path)).tokenizer()
    assert found == {name: tmp_path / name for name in ("vocab.txt", f"{folder}/rag.jinja")}


def test_a_mirror_that_lists_nothing_is_asked_for_each_file(monkeypatch, tmp_path):
    from modelcenter.hub import sidecar

    def refuse(*args):
        raise ValueError("no list here")

    held = {"1_Pooling/config.json", "modules.json", "tokenizer.json", "vocab.txt"}
    for name in held:
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / name).write_text(name)
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(sidecar, "is_offline", lambda _: False)
    monkeypatch.setattr(sidecar, "list_files", refuse)
    find = beside(tmp_path / "hub")
    monkeypatch.setattr(sidecar, "download_file", lambda repo, name, *_, **__: find(name))
    files = sidecar.SidecarFiles(None, "me/tiny")
    files.copy_embedding_files(tmp_path / "out")
    files.copy_tokenizer(tmp_path / "out")
    found = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path / "out").as_posix() for path in found} == held
    assert all(path.read_text() == path.relative_to(tmp_path / "out").as_posix() for path in found)


def test_a_pickled_model_holds_no_token():
    assert pickle.loads(pickle.dumps(HubOptions("main", "hf_secret", "cache"))) == HubOptions("main", None, "cache")
    assert "hf_secret" not in repr(HubOptions("main", "hf_secret", "cache"))


def test_a_folder_whose_name_is_misspelt_is_offered(tmp_path, monkeypatch):
    (tmp_path / "runs" / "my run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"'runs/myy run'\. Did you mean 'runs/my run'\?$"):
        mc.from_pretrained("runs/myy run")
