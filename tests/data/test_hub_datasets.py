"""Data sets of the Hub without a network: one request, then the cache, or one error. It is not asked about files."""

import json
import sys
import types
from pathlib import Path

import pytest
import warm
from hub_stub import HubStub

from modelcenter.data import hub_datasets, sources

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["tset.csv", "tset.jsonl.gz", "rows.zst", "tset.XLSX", "data/tset.arrow", "data/"])
def test_a_name_that_looks_like_a_file_is_not_looked_for_on_the_hub(name):
    assert not sources.is_hub_name(name)
    with pytest.raises(ValueError, match=f"{name}: no such file or directory"):
        sources.find(name)


@pytest.mark.parametrize("name", ["sst2", "stanfordnlp/sst2", "owner/v1.5", "owner/set.of.rows"])
def test_a_name_with_dots_may_be_one_of_the_hub(name):
    assert sources.is_hub_name(name)


class Library:
    """The part of the `datasets` library that is used: each request says whether it may ask the Hub."""

    def __init__(self, offline: bool):
        self.config = types.SimpleNamespace(HF_HUB_OFFLINE=offline)

    def get_dataset_split_names(self, name, config):
        if self.config.HF_HUB_OFFLINE and name != "in/cache":
            raise ConnectionError(f"Couldn't reach {name!r} on the Hub (OfflineModeIsEnabled)")
        return ["offline" if self.config.HF_HUB_OFFLINE else "online"]

    def load_dataset(self, name, config, split):
        if split == "torn":
            raise OSError("torn")
        return self.config.HF_HUB_OFFLINE


@pytest.fixture
def answer(monkeypatch):
    """Sets what the Hub answers: an error, or nothing. Returns the addresses that were requested."""
    asked = []

    def use(error: Exception | None, offline: bool = False):
        def head(address, **_):
            asked.append(address)
            if error is not None:
                raise error

        monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", head)
        monkeypatch.setitem(sys.modules, "datasets", Library(offline))
        monkeypatch.setattr(hub_datasets, "_answers", {})
        return asked

    return use


def test_the_cache_is_used_if_the_hub_cannot_be_reached(answer):
    from huggingface_hub import errors

    says = "tset: neither .* of the Hub: it is not in the cache, and the Hub cannot be reached "
    for error in (errors.HTTPError("Name or service\nnot known"), OSError("no route")):
        asked = answer(error)
        assert sources.find("in/cache").splits == ("offline",)
        with pytest.raises(ValueError, match=says + r"\((Name or service not known|no route)\)\.$"):
            sources.find("tset")
        assert not sys.modules["datasets"].config.HF_HUB_OFFLINE  # the next request asks again
    assert len(asked) == 4 and asked[0].endswith("/datasets/in/cache/resolve/main/README.md")


def test_a_hub_that_answers_is_asked(answer):
    from huggingface_hub import errors

    refused = errors.HfHubHTTPError("404", response=types.SimpleNamespace(headers={}, request=None))
    for error in (None, refused, errors.HFValidationError("a--b")):
        answer(error)
        assert sources.find("in/cache").splits == ("online",)


@pytest.mark.parametrize("error", [None, OSError("no route")])
def test_all_splits_share_one_request_until_one_fails(answer, monkeypatch, error):
    monkeypatch.setattr(sources, "_table_of", lambda rows, name: rows)
    asked = answer(error)
    for _ in range(2):  # as a prediction does, which looks for its data before it looks for its model
        source = sources.find("in/cache")
        assert [source._read(split) for split in ("train", "test")] == [error is not None] * 2
    assert len(asked) == 1
    with pytest.raises(ValueError, match="the split 'torn' of this data set cannot be read: torn"):
        source._read("torn")
    source._read("train")
    assert len(asked) == 2


def test_offline_the_hub_is_not_asked(answer):
    asked = answer(None, offline=True)
    assert sources.find("in/cache").splits == ("offline",)
    with pytest.raises(ValueError, match="it is not in the cache, and HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set"):
        sources.find("tset")
    assert not asked and sys.modules["datasets"].config.HF_HUB_OFFLINE


def test_an_error_of_the_library_stays_what_it_is(answer):
    answer(None)
    library = sys.modules["datasets"]
    with pytest.raises(ConnectionError, match="reset$"), hub_datasets.offline_if_unreachable(library, "in/cache"):
        raise ConnectionError("reset")
    assert not library.config.HF_HUB_OFFLINE
    answer(OSError("no route"))
    with pytest.raises(ValueError, match="^torn$"), hub_datasets.offline_if_unreachable(library, "in/cache"):
        raise ValueError("torn")


READ = """
import json
from modelcenter.data import sources
from modelcenter.data.streams import HubRows

out = {}
try:
    out["rows"] = sources.find("me/rows").read("train").columns["text"][:]
    out["streamed"] = [row["text"] for row, _ in HubRows("me/rows").read()]
    sources.find("me/tset")
except ValueError as error:
    out["error"] = str(error)
print(json.dumps(out))
"""


@pytest.mark.full
def test_the_library_itself_reads_its_cache(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "README.md").write_text("---\nlicense: mit\n---\n")
    (tmp_path / "repo" / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    with HubStub() as hub:
        hub.add("me/rows", tmp_path / "repo")
        environment = hub.environment(tmp_path, PYTHONPATH=str(ROOT))

        def read(**more: str):
            done = warm.run(["-c"], {**environment, **more}, tmp_path, READ)
            assert done.returncode == 0 and "Retry" not in done.stderr, done.stderr
            return json.loads(done.stdout.splitlines()[-1])

        online = read()
        asked = len(hub.requests)
        offline = read(HF_HUB_OFFLINE="1")
        assert len(hub.requests) == asked
    cut_off = read()
    for result in (online, offline, cut_off):
        assert result["rows"] == result["streamed"] == ["a", "b"]
    assert "me/tset: neither a local file" in online["error"]
    assert offline["error"].endswith("it is not in the cache, and HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set.")
    assert "it is not in the cache, and the Hub cannot be reached (" in cut_off["error"]
