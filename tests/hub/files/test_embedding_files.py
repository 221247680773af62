"""The files of sentence-transformers: every form that its versions wrote, what is not supported, and what we write."""

import json

import pytest

from modelcenter.embedding_settings import EmbeddingSettings
from modelcenter.hub.files.embedding_files import beside, is_embedding_file, read_embedding_files, write_embedding_files

OLD, NEW = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules."


def modules(*kinds, home=OLD):
    paths = ["", "1_Pooling", "2_Normalize", "3_Dense"]
    return [{"idx": i, "name": str(i), "path": paths[i], "type": home + kind} for i, kind in enumerate(kinds)]


def write(folder, **files):
    """files: contents by name; "__" for the folder of a step."""
    for name, value in files.items():
        path = folder / (name.replace("__", "/") if "__" in name else f"{name}.json")
        path = path if path.suffix else path.with_suffix(".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))
    return beside(folder)


# As version 2 wrote all-MiniLM-L6-v2, and as version 6 writes a model.
FIRST = {
    "modules": modules("Transformer", "Pooling", "Normalize"),
    "sentence_bert_config": {"max_seq_length": 256, "do_lower_case": False},
    "config_sentence_transformers": {"__version__": {"sentence_transformers": "2.0.0"}},
    "1_Pooling__config": {
        "word_embedding_dimension": 384, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False,
    },
}  # fmt: skip
LAST = {
    "modules": modules("transformer.Transformer", "pooling.Pooling", home=NEW),
    "sentence_bert_config": {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"},
    "config_sentence_transformers": {
        "model_type": "SentenceTransformer", "default_prompt_name": None, "similarity_fn_name": "dot",
        "prompts": {"query": "query: ", "document": "passage: "},
    },
    "1_Pooling__config": {"embedding_dimension": 24, "pooling_mode": "lasttoken", "include_prompt": True},
}  # fmt: skip


def test_the_forms_of_all_versions_are_read(tmp_path):
    expected = {"normalize": True, "pooling": "mean", "max_length": 256, "query_prompt": "", "document_prompt": ""}
    assert read_embedding_files(write(tmp_path / "first", **FIRST)) == expected
    assert read_embedding_files(write(tmp_path / "last", **LAST)) == {
        "normalize": False, "pooling": "last", "similarity": "dot", "query_prompt": "query: ",
        "document_prompt": "passage: ",
    }  # fmt: skip
    assert read_embedding_files(beside(tmp_path / "none")) == {}


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ({"s2p_query": "q: ", "passage": "p: "}, ("q: ", "p: ")),
        ({"query": "", "s2p_query": "q: ", "corpus": "c: "}, ("q: ", "c: ")),
        (None, ("", "")),
    ],
)
def test_prompts_by_the_names_that_models_give_them(tmp_path, prompts, expected):
    found = read_embedding_files(
        write(tmp_path / "last", **{**LAST, "config_sentence_transformers": {"prompts": prompts}})
    )
    assert (found["query_prompt"], found["document_prompt"]) == expected


def test_a_step_says_its_folder(tmp_path):
    steps = modules("Transformer", "Pooling")
    steps[1]["path"] = "7_Own"
    files = {**LAST, "modules": steps, "7_Own__config": {"pooling_mode_lasttoken": False}}  # none is on: the mean
    assert read_embedding_files(write(tmp_path / "last", **files))["pooling"] == "mean"
    del steps[1]["path"]
    assert read_embedding_files(write(tmp_path / "last", **files))["pooling"] == "last"


@pytest.fixture(autouse=True)
def _folders(tmp_path):
    for name in ("first", "last", "none"):
        (tmp_path / name).mkdir()


MISTAKES = {
    "steps": (
        {"modules": modules("Transformer", "Pooling", "Dense")},
        "modules.json: the steps are .*Dense; supported",
    ),
    "no steps": ({"modules": []}, "the steps are ; supported"),
    "no list": ({"modules": {"0": 1}}, "expected a list of objects"),
    "pooling": (
        {"1_Pooling__config": {"pooling_mode": "max"}},
        "the pooling is max; supported is one of mean, cls, last",
    ),
    "poolings": ({"1_Pooling__config": {"pooling_mode": ["cls", "mean"]}}, "the pooling is cls and mean"),
    "number": ({"1_Pooling__config": {"pooling_mode": 3}}, "the pooling is 3; supported"),
    "prompts": ({"config_sentence_transformers": {"prompts": ["q"]}}, r"prompts is \['q'\], expected an object"),
    "switches": (
        {"1_Pooling__config": {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}},
        "the pooling is cls and max",
    ),
    "prompt": ({"1_Pooling__config": {"pooling_mode": "mean", "include_prompt": False}}, "include_prompt is false"),
    "similarity": ({"config_sentence_transformers": {"similarity_fn_name": "manhattan"}}, "similarity_fn_name is 'man"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_not_supported_is_named(tmp_path, mistake):
    changes, said = MISTAKES[mistake]
    with pytest.raises(ValueError, match=said):
        read_embedding_files(write(tmp_path / "last", **{**LAST, **changes}))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_what_is_written_is_read(tmp_path, pooling, similarity):
    settings = EmbeddingSettings(
        pooling=pooling, similarity=similarity, query_prompt="q: ", document_prompt="d: ", max_length=9
    )
    write_embedding_files(tmp_path / "none", settings, pooling, 24)
    found = EmbeddingSettings.of(read_embedding_files(beside(tmp_path / "none")))
    assert found == EmbeddingSettings(**{**settings.to_dict(), "normalize": similarity == "cosine"})
    written = json.loads((tmp_path / "none" / "1_Pooling" / "config.json").read_text())
    assert written["word_embedding_dimension"] == 24
    # Read by versions before 6, which know one switch for each pooling.
    assert [name for name, on in written.items() if on is True and name.startswith("pooling")] == [
        {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}[pooling]
    ]
    steps = json.loads((tmp_path / "none" / "modules.json").read_text())
    assert all((tmp_path / "none" / step["path"]).is_dir() for step in steps)
    assert [step["type"].rpartition(".")[2] for step in steps][2:] == ["Normalize"] * (similarity == "cosine")


def test_names_of_the_files():
    names = ("modules.json", "1_Pooling/config.json", "2_Normalize/config.json", "config_sentence_transformers.json")
    assert all(map(is_embedding_file, names))
    assert not any(map(is_embedding_file, ("config.json", "onnx/config.json", "1_Pooling/model.safetensors")))


def test_what_a_caller_gives_goes_before_what_is_stored():
    stored = {"pooling": "cls", "normalize": True, "query_prompt": "q: "}
    found = EmbeddingSettings.over(stored, {"normalize": False})
    assert (found.pooling, found.normalizes, found.query_prompt) == ("cls", False, "q: ")
    whole = EmbeddingSettings(similarity="dot", normalize=True)  # which says all, what it leaves alone too
    assert EmbeddingSettings.over(stored, whole) == whole and whole.normalizes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"poolin": "mean"}, "unknown field 'poolin'. Did you mean 'pooling'"),
        ({"pooling": "max"}, "pooling is 'max', expected one of mean, cls, last"),
        ({"similarity": None}, "similarity is None"),
        ({"normalize": 1.5}, "normalize is 1.5, expected true or false"),
        ({"query_prompt": 3}, "query_prompt is 3, expected a text"),
        ({"max_length": 0}, "max_length is 0, expected a number of tokens"),
        ({"max_length": True}, "max_length is True, expected a number of tokens"),
        ("mean", "embedding: got 'mean', expected fields"),
    ],
)
def test_settings_that_cannot_be(given, said):
    with pytest.raises(ValueError, match=said):
        EmbeddingSettings.over({}, given)
