"""The files of sentence-transformers: every form that its versions wrote, what is not supported, and what we write."""

import json

import pytest

from modelcenter.embedding_settings import DENSE_ACTIVATIONS, POOLINGS, DenseSettings, EmbeddingSettings
from modelcenter.hub.files.embedding_files import (
    beside,
    dense_steps,
    dense_weight_files,
    is_embedding_file,
    read_embedding_files,
    use_own_folders,
    write_embedding_files,
)
from modelcenter.layers.heads import DENSE_ACTIVATIONS as FUNCTIONS

OLD, NEW = "sentence_transformers.models.", "sentence_transformers.sentence_transformer.modules."


def modules(*kinds, home=OLD):
    """kinds: of steps, perhaps with the module that the class is in ("dense.Dense")."""
    paths = ["" if i == 0 else f"{i}_{kind.rpartition('.')[2]}" for i, kind in enumerate(kinds)]
    return [{"idx": i, "name": str(i), "path": paths[i], "type": home + kind} for i, kind in enumerate(kinds)]


def dense(inputs, width, kind="torch.nn.modules.activation.Tanh", **more):
    return {"in_features": inputs, "out_features": width, "bias": True, "activation_function": kind, **more}


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
LAYERS = {
    "modules": modules("transformer.Transformer", "pooling.Pooling", "dense.Dense", "dense.Dense", home=NEW),
    "2_Dense__config": dense(24, 64, module_input_name="sentence_embedding", module_output_name="sentence_embedding"),
    "3_Dense__config": dense(64, 24, "torch.nn.modules.linear.Identity", bias=False, use_residual=True),
}


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


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode": ["mean", "cls"]}, "mean+cls"),
        ({"pooling_mode": ["max"]}, "max"),
        # Switches are joined in the order in which all versions join them, whatever theirs in the file is.
        (
            {"pooling_mode_lasttoken": True, "pooling_mode_weightedmean_tokens": True, "pooling_mode_mean_tokens": True}
            | {"pooling_mode_mean_sqrt_len_tokens": True, "pooling_mode_max_tokens": True}
            | {"pooling_mode_cls_token": True},
            "cls+max+mean+mean_sqrt_len+weighted_mean+last",
        ),
    ],
)
def test_several_poolings_are_joined(tmp_path, pooling, expected):
    assert (
        read_embedding_files(write(tmp_path / "last", **{**LAST, "1_Pooling__config": pooling}))["pooling"] == expected
    )


def test_dense_layers_are_read(tmp_path):
    find = write(tmp_path / "last", **{**LAST, **LAYERS})
    expected = (
        DenseSettings(width=64, activation="tanh"),
        DenseSettings(width=24, activation="identity", bias=False, residual=True),
    )
    assert EmbeddingSettings.of(read_embedding_files(find)).dense == expected
    assert [(step.folder, step.inputs) for step in dense_steps(find)] == [("2_Dense", 24), ("3_Dense", 64)]
    # Of the oldest, which says no activation and no bias.
    find = write(tmp_path / "last", **{"2_Dense__config": {"in_features": 24, "out_features": 64}})
    assert dense_steps(find)[0].settings == expected[0]


# How models of the Hub are made, in the files of version 2 with which they came.
PUBLISHED = {
    "LaBSE": ("pooling_mode_cls_token", "cls", dense(768, 768), {"width": 768}),
    "distiluse-base-multilingual-cased-v2": ("pooling_mode_mean_tokens", "mean", dense(768, 512), {"width": 512}),
    "sentence-t5-base": (
        "pooling_mode_mean_tokens",
        "mean",
        dense(768, 768, "torch.nn.modules.linear.Identity") | {"bias": False},
        {"width": 768, "activation": "identity", "bias": False},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_of_the_hub(tmp_path, name):
    switch, pooling, layer, expected = PUBLISHED[name]
    files = {
        "modules": modules("Transformer", "Pooling", "Dense", "Normalize"),
        "1_Pooling__config": FIRST["1_Pooling__config"] | {"pooling_mode_mean_tokens": False, switch: True},
        "2_Dense__config": layer,
    }
    settings = EmbeddingSettings.of(read_embedding_files(write(tmp_path / "first", **{**FIRST, **files})))
    assert (settings.pooling, settings.normalizes, settings.max_length) == (pooling, True, 256)
    assert settings.dense == (DenseSettings(**expected),)


@pytest.fixture(autouse=True)
def _folders(tmp_path):
    for name in ("first", "last", "none"):
        (tmp_path / name).mkdir()


def layers(**changes):
    """Two dense layers, the first with other values in its config."""
    return {**LAYERS, "2_Dense__config": {**LAYERS["2_Dense__config"], **changes}}


MISTAKES = {
    "steps": (
        {"modules": modules("Transformer", "Pooling", "LSTM")},
        "modules.json: the steps are .*LSTM; supported are Transformer, Pooling, .*; LSTM in 2_LSTM is not one of them",
    ),
    "a step before": (
        {"modules": modules("WordEmbeddings", "WeightedLayerPooling", "Pooling")},
        "WordEmbeddings in 0_WordEmbeddings is not one of them",
    ),
    "no transformer": ({"modules": modules("static_embedding.StaticEmbedding")}, "StaticEmbedding in 0_StaticEmbedd"),
    "order": (
        {"modules": modules("Transformer", "Pooling", "Normalize", "Dense")},
        "Normalize in 2_Normalize is not one of them, or not in this order",
    ),
    "no steps": ({"modules": []}, "the steps are ; supported"),
    "no list": ({"modules": {"0": 1}}, "expected a list of objects"),
    "folder": (
        {"modules": [*modules("Transformer"), {"path": "../1_Pooling", "type": "Pooling"}]},
        r"modules.json: path is '../1_Pooling', expected a folder next to it",
    ),
    "pooling": (
        {"1_Pooling__config": {"pooling_mode": "median"}},
        "the pooling is median; supported are mean, cls, lasttoken, max",
    ),
    "poolings": ({"1_Pooling__config": {"pooling_mode": ["cls", "cls"]}}, "the pooling is cls and cls; .*each once"),
    "number": ({"1_Pooling__config": {"pooling_mode": 3}}, "the pooling is 3; supported"),
    "prompts": ({"config_sentence_transformers": {"prompts": ["q"]}}, r"prompts is \['q'\], expected an object"),
    "prompt": ({"1_Pooling__config": {"pooling_mode": "mean", "include_prompt": 2}}, "include_prompt is 2, expected"),
    "similarity": ({"config_sentence_transformers": {"similarity_fn_name": "manhattan"}}, "similarity_fn_name is 'man"),
    "no config": ({"modules": modules("Transformer", "Pooling", "Dense")}, "2_Dense/config.json is missing"),
    "no width": (layers(out_features=None), "2_Dense/config.json: out_features is None, expected a whole number"),
    "no inputs": (layers(in_features=0), "2_Dense/config.json: in_features is 0, expected a whole number"),
    "widths": (
        layers(out_features=63),
        "3_Dense/config.json: in_features is 64, but 2_Dense before it returns vectors of size 63",
    ),
    "bias": (layers(bias="yes"), "2_Dense/config.json: bias is 'yes', expected true or false"),
    "activation": (
        layers(activation_function="torch.nn.modules.activation.GLU"),
        "2_Dense/config.json: activation_function is 'torch.nn.modules.activation.GLU', supported are torch.nn's Tanh",
    ),
    "foreign activation": (layers(activation_function="mine.Tanh"), "activation_function is 'mine.Tanh', supported"),
    "name": (
        layers(module_input_name="token_embeddings"),
        "module_input_name is 'token_embeddings', supported is 'sentence_embedding'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_not_supported_is_named(tmp_path, mistake):
    changes, said = MISTAKES[mistake]
    with pytest.raises(ValueError, match=said):
        read_embedding_files(write(tmp_path / "last", **{**LAST, **changes}))


@pytest.mark.parametrize("pooling", POOLINGS)
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
        {
            "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken",
            "max": "pooling_mode_max_tokens", "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
            "weighted_mean": "pooling_mode_weightedmean_tokens",
        }[pooling]
    ]  # fmt: skip
    steps = json.loads((tmp_path / "none" / "modules.json").read_text())
    assert all((tmp_path / "none" / step["path"]).is_dir() for step in steps)
    assert [step["type"].rpartition(".")[2] for step in steps][2:] == ["Normalize"] * (similarity == "cosine")


@pytest.mark.parametrize("pooling", ["cls+max", "mean+cls"])  # the second in an order that switches do not have
def test_dense_layers_that_are_written_are_read(tmp_path, pooling):
    dense = [
        {"width": 10 + number, "activation": name, "bias": number % 2 == 0}
        for number, name in enumerate(DENSE_ACTIVATIONS)
    ]
    dense += [{"width": 7, "residual": True}]
    settings = EmbeddingSettings(pooling=pooling, dense=dense, include_prompt=False, normalize=True)
    write_embedding_files(tmp_path / "none", settings, pooling, 24)
    find = beside(tmp_path / "none")
    assert EmbeddingSettings.of(read_embedding_files(find)) == settings
    assert [step.inputs for step in dense_steps(find)] == [48, *(layer["width"] for layer in dense[:-1])]
    written = json.loads((tmp_path / "none" / "1_Pooling" / "config.json").read_text())
    assert ("pooling_mode" in written) == (pooling == "mean+cls") and written["word_embedding_dimension"] == 24
    paths = [step["path"] for step in json.loads((tmp_path / "none" / "modules.json").read_text())]
    assert paths == ["", "1_Pooling", *(f"{i}_Dense" for i in range(2, 11)), "11_Normalize"]
    # What versions before 5.7 do not know is there where it says something only.
    configs = [json.loads((tmp_path / "none" / f"{i}_Dense" / "config.json").read_text()) for i in range(2, 11)]
    assert ["use_residual" in config for config in configs] == [False] * 8 + [True]
    assert configs[0]["activation_function"] == "torch.nn.modules.activation.Tanh"
    assert configs[1]["activation_function"] == "torch.nn.modules.linear.Identity"


def test_activations_are_those_of_the_layers():
    import torch

    x = torch.linspace(-3, 3, 13)
    assert set(FUNCTIONS) == set(DENSE_ACTIVATIONS)
    names = {"tanh": "Tanh", "identity": "Identity", "relu": "ReLU", "gelu": "GELU", "silu": "SiLU"}
    names |= {"sigmoid": "Sigmoid", "leaky_relu": "LeakyReLU", "elu": "ELU"}
    for name, function in FUNCTIONS.items():
        assert torch.equal(function(x), getattr(torch.nn, names[name])()(x)), name


def test_folders_become_our_own(tmp_path):
    """Dense layers in folders of other numbers, also where these are the numbers of others."""
    files = {**LAST, **LAYERS, "modules": modules("Transformer", "Pooling", "Dense", "Dense")}
    files["modules"][2]["path"], files["modules"][3]["path"] = "3_Dense", "7_Mine"
    files["3_Dense__config"], files["7_Mine__config"] = files.pop("2_Dense__config"), files.pop("3_Dense__config")
    find = write(tmp_path / "last", **files)
    before = read_embedding_files(find)
    use_own_folders(tmp_path / "last")
    assert read_embedding_files(find) == before
    assert [step.folder for step in dense_steps(find)] == ["2_Dense", "3_Dense"]
    use_own_folders(tmp_path / "last")
    assert read_embedding_files(find) == before


def test_names_of_the_files():
    names = ("modules.json", "1_Pooling/config.json", "2_Normalize/config.json", "config_sentence_transformers.json")
    assert all(map(is_embedding_file, names))
    assert not any(map(is_embedding_file, ("config.json", "onnx/config.json", "1_Pooling/model.safetensors")))
    held = {f"{i}_Dense/{name}" for i in (2, 3) for name in ("config.json", "pytorch_model.bin")}
    held |= {"2_Dense/model.safetensors", "1_Pooling/config.json", "onnx/model.safetensors", "pytorch_model.bin"}
    assert dense_weight_files(held) == ["2_Dense/model.safetensors", "3_Dense/pytorch_model.bin"]


def test_what_a_caller_gives_goes_before_what_is_stored():
    stored = {"pooling": "cls", "normalize": True, "query_prompt": "q: "}
    found = EmbeddingSettings.over(stored, {"normalize": False})
    assert (found.pooling, found.normalizes, found.query_prompt) == ("cls", False, "q: ")
    whole = EmbeddingSettings(similarity="dot", normalize=True)  # which says all, what it leaves alone too
    assert EmbeddingSettings.over(stored, whole) == whole and whole.normalizes


def test_dense_layers_with_weights_stay():
    stored = {"dense": [{"width": 8}]}
    assert EmbeddingSettings.over(stored, {"pooling": "cls"}).dense == (DenseSettings(width=8),)
    assert EmbeddingSettings.over(stored, {"dense": ["8:tanh"]}).dense == (DenseSettings(width=8),)
    for given, shown in ((["9"], "9:tanh"), ([], "none")):
        with pytest.raises(
            ValueError, match=f"dense: got {shown}, but the model has 8:tanh, with weights; leave it out"
        ):
            EmbeddingSettings.over(stored, {"dense": given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"poolin": "mean"}, "unknown field 'poolin'. Did you mean 'pooling'"),
        ({"pooling": "sum"}, "pooling is 'sum', expected one of mean, cls, last"),
        ({"pooling": "cls+sum"}, r"pooling is 'cls\+sum', expected one of mean, cls, last"),
        ({"pooling": "cls+cls"}, r"pooling is 'cls\+cls', expected one of"),
        ({"pooling": 3}, "pooling is 3, expected one of"),
        ({"similarity": None}, "similarity is None"),
        ({"normalize": 1.5}, "normalize is 1.5, expected true or false"),
        ({"include_prompt": None}, "include_prompt is None, expected true or false"),
        ({"query_prompt": 3}, "query_prompt is 3, expected a text"),
        ({"max_length": 0}, "max_length is 0, expected a number of tokens"),
        ({"max_length": True}, "max_length is True, expected a number of tokens"),
        ("mean", "embedding: got 'mean', expected fields"),
        ({"dense": "256"}, "dense is '256', expected a list of layers"),
        ({"dense": 256}, "dense is 256, expected a list of layers"),
        ({"dense": [256]}, "dense: got 256, expected fields such as"),
        ({"dense": ["256tanh"]}, "dense: got '256tanh', expected WIDTH or WIDTH:ACTIVATION"),
        ({"dense": ["0"]}, "dense: width is 0, expected a whole number above 0"),
        ({"dense": ["8:tahn"]}, "dense: activation is 'tahn', expected one of tanh, .* Did you mean 'tanh'"),
        ({"dense": [{"activation": "tanh"}]}, "dense: got .*, expected its width, too"),
        ({"dense": [{"width": 8, "biass": True}]}, "dense: unknown field 'biass'. Did you mean 'bias'"),
        ({"dense": [{"width": 8, "bias": 1}]}, "dense: bias is 1, expected true or false"),
    ],
)
def test_settings_that_cannot_be(given, said):
    with pytest.raises(ValueError, match=said):
        EmbeddingSettings.over({}, given)
