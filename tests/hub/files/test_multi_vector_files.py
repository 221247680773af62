"""The files of models with one vector per token: of sentence-transformers, PyLate and Stanford's ColBERT."""

import json
import string

import pytest

from modelcenter.hub.files.embedding_files import beside, read_embedding_files
from modelcenter.hub.files.multi_vector_files import (
    makes_token_vectors,
    marking_prefixes,
    projection_steps,
    read_multi_vector_files,
    write_multi_vector_files,
)
from modelcenter.multi_vector_settings import MultiVectorSettings

HOME = "sentence_transformers."
KINDS = {
    "Transformer": "base.modules.transformer.Transformer",
    "Dense": "base.modules.dense.Dense",
    "MultiVectorMask": "multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
    "Normalize": "base.modules.normalize.Normalize",
    "HierarchicalTokenPooling": "multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling",
    "Pooling": "sentence_transformer.modules.pooling.Pooling",
}


def modules(*kinds):
    paths = ["" if i == 0 else f"{i}_{kind}" for i, kind in enumerate(kinds)]
    return [{"idx": i, "name": str(i), "path": paths[i], "type": HOME + KINDS[kind]} for i, kind in enumerate(kinds)]


def dense(inputs, width, **more):
    kind = "torch.nn.modules.linear.Identity"
    return {"in_features": inputs, "out_features": width, "bias": False, "activation_function": kind, **more}


TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
# As MultiVectorEncoder 6.2 writes them.
NATIVE = {
    "modules.json": modules("Transformer", "Dense", "MultiVectorMask", "Normalize"),
    "config_sentence_transformers.json": {
        "model_type": "MultiVectorEncoder",
        "prompts": {"query": "[Q] ", "document": "[D] "},
        "default_prompt_name": None,
        "similarity_fn_name": "meanmaxsim",
    },
    "sentence_bert_config.json": {
        "transformer_task": "feature-extraction",
        "module_output_name": "token_embeddings",
        "query_length": 40,
        "document_length": 30,
        "query_expansion": {"strategy": "min", "attend": True, "token": "[SEP]", "length": 12},
    },
    "1_Dense/config.json": dense(24, 20, **TOKENS),
    "2_MultiVectorMask/config.json": {
        "skiplist_words": [",", "."],
        "skiplist_tasks": ["query", "document"],
        "keep_only_token_ids": None,
    },
    "3_Normalize/config.json": TOKENS,
}
# As PyLate 1 writes GTE-ModernColBERT.
PYLATE = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ],
    "config_sentence_transformers.json": {
        "prompts": {},
        "similarity_fn_name": "cosine",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 32,
        "document_length": 300,
        "attend_to_expansion_tokens": False,
        "skiplist_words": ["!", "?"],
    },
    "sentence_bert_config.json": {"max_seq_length": 299, "do_lower_case": False},
    "1_Dense/config.json": dense(24, 20),
}
STANFORD = {
    "config.json": {"architectures": ["HF_ColBERT"]},
    "artifact.metadata": {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_maxlen": 16,
        "doc_maxlen": 220,
        "dim": 20,
        "attend_to_mask_tokens": False,
        "mask_punctuation": True,
    },
}


def write(folder, files):
    for name, value in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(json.dumps(value))
    return beside(folder)


def changed(files, name, **values):
    return {**files, name: {**files[name], **values}}


def test_what_multi_vector_encoder_writes_is_read(tmp_path):
    find = write(tmp_path, NATIVE)
    assert makes_token_vectors(find) and read_embedding_files(find) == {} and marking_prefixes(find) == []
    assert MultiVectorSettings.of(read_multi_vector_files(find)) == MultiVectorSettings(
        dense=({"width": 20, "activation": "identity", "bias": False},),
        similarity="meanmaxsim",
        query_prompt="[Q] ",
        document_prompt="[D] ",
        query_length=40,
        document_length=30,
        expansion_length=12,
        expansion_truncates=False,
        expansion_attended=True,
        expansion_token="[SEP]",
        skipped=(",", "."),
        skipped_in=("query", "document"),
    )
    (step,) = projection_steps(find)
    assert (step.folder, step.inputs, step.number) == ("1_Dense", 24, 1)


def test_what_pylate_writes_is_read_with_what_its_classes_do(tmp_path):
    find = write(tmp_path, PYLATE)
    found = MultiVectorSettings.of(read_multi_vector_files(find))
    assert makes_token_vectors(find) and read_embedding_files(find) == {}
    assert (found.query_prompt, found.document_prompt, found.similarity) == ("[Q] ", "[D] ", "maxsim")
    assert (found.expansion_length, found.expansion_attended, found.expansion_truncates) == (32, False, True)
    assert found.normalize and found.skipped == ("!", "?") and found.skipped_in == ("document",)
    assert marking_prefixes(find) == ["[Q] ", "[D] "]
    assert found.document_length == 300 and found.query_length is None


@pytest.mark.parametrize(
    "values, expected",
    [
        ({"do_query_expansion": False}, {"expansion_length": None, "query_length": 32}),
        ({"attend_to_expansion_tokens": True}, {"expansion_length": 32, "expansion_attended": True}),
        ({"query_length": None}, {"expansion_length": 32}),
        ({"document_length": None}, {"document_length": 299}),
        ({"do_query_expansion": False, "query_length": None}, {"query_length": 299}),
        ({"skiplist_words": None}, {"skipped": tuple(string.punctuation)}),
        ({"prompts": {"query": "[Q] ask: "}}, {"query_prompt": "[Q] ask: ", "document_prompt": "[D] "}),
        ({"model_type": "ColBERT"}, {"normalize": True}),
        ({"query_expansion": {"strategy": "fixed", "length": 9}}, {"expansion_length": 9}),
    ],
)
def test_forms_of_pylate(values, expected, tmp_path):
    find = write(tmp_path, changed(PYLATE, "config_sentence_transformers.json", **values))
    found = MultiVectorSettings.of(read_multi_vector_files(find))
    assert {name: getattr(found, name) for name in expected} == expected


def test_what_stanford_writes_is_read(tmp_path):
    find = write(tmp_path, STANFORD)
    found = MultiVectorSettings.of(read_multi_vector_files(find))
    assert makes_token_vectors(find) and projection_steps(find) == []
    assert (found.query_prompt, found.document_prompt) == ("[unused0] ", "[unused1] ") == tuple(marking_prefixes(find))
    assert (found.expansion_length, found.document_length, found.expansion_attended) == (16, 220, False)
    assert [layer.width for layer in found.dense] == [20] and found.skipped == tuple(string.punctuation)


def test_stanford_without_its_metadata_has_the_usual_values(tmp_path):
    find = write(tmp_path, {"config.json": STANFORD["config.json"]})
    found = MultiVectorSettings.of(read_multi_vector_files(find))
    assert (found.query_prompt, found.expansion_length, found.document_length) == ("[unused0] ", 32, None)
    assert MultiVectorSettings.of(read_multi_vector_files(write(tmp_path, {
        "artifact.metadata": {"mask_punctuation": False, "attend_to_mask_tokens": True}
    }))).skipped == ()  # fmt: skip
    assert read_multi_vector_files(beside(tmp_path))["expansion_attended"] is True


@pytest.mark.parametrize("normalize", [True, False])
def test_what_is_written_is_read(normalize, tmp_path):
    settings = MultiVectorSettings(
        dense=[{"width": 8, "activation": "gelu", "bias": True, "residual": True}, {"width": 6}],
        normalize=normalize,
        query_prompt="q: ",
        document_prompt="",
        document_length=77,
        expansion_length=9,
        expansion_attended=normalize,
        expansion_truncates=not normalize,
        skipped=["a", "b"],
    )
    write_multi_vector_files(tmp_path, settings, 24)
    find = beside(tmp_path)
    assert MultiVectorSettings.of(read_multi_vector_files(find)) == settings
    assert [step.inputs for step in projection_steps(find)] == [24, 8] and marking_prefixes(find) == []
    assert MultiVectorSettings.of(settings.to_dict()) == settings


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {**NATIVE, "modules.json": modules("Transformer", "Dense", "HierarchicalTokenPooling", "Normalize")},
            "any number of Dense, .*; HierarchicalTokenPooling in 2_HierarchicalTokenPooling is none of them",
        ),
        ({**NATIVE, "modules.json": modules("Transformer", "Pooling")}, "Pooling in 1_Pooling is none of them"),
        ({**NATIVE, "modules.json": modules("Transformer", "Normalize", "Dense")}, "supported are Transformer"),
        (
            {**NATIVE, "modules.json": modules("Transformer", "Dense", "Normalize")},
            "lists no MultiVectorMask, without which the tokens that queries are expanded by do not count",
        ),
        (
            changed(NATIVE, "2_MultiVectorMask/config.json", keep_only_token_ids=[7]),
            "keep_only_token_ids chooses tokens of images",
        ),
        (
            changed(NATIVE, "2_MultiVectorMask/config.json", skiplist_words="."),
            "skiplist_words is '.', expected a list",
        ),
        (changed(NATIVE, "1_Dense/config.json", module_input_name="sentence_embedding"), "those of the tokens"),
        (changed(NATIVE, "3_Normalize/config.json", module_output_name="other"), "module_output_name is 'other'"),
        (changed(NATIVE, "sentence_bert_config.json", transformer_task="retrieval"), "transformer_task is 'retrieval'"),
        (changed(NATIVE, "sentence_bert_config.json", module_output_name="x"), "module_output_name is 'x'"),
        (changed(NATIVE, "sentence_bert_config.json", query_expansion={"strategy": "max"}), "query_expansion is"),
        (changed(NATIVE, "sentence_bert_config.json", query_expansion={"strategy": "min"}), "has the length None"),
        (changed(NATIVE, "config_sentence_transformers.json", prompts=["a"]), r"prompts is \['a'\]"),
    ],
)
def test_what_is_not_supported_is_named(files, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_multi_vector_files(write(tmp_path, files))


@pytest.mark.parametrize(
    "values, message",
    [
        ({"similarity": "cosine"}, "similarity is 'cosine', expected maxsim or meanmaxsim"),
        ({"normalize": 1}, "normalize is 1, expected true or false"),
        ({"query_prompt": 3}, "query_prompt is 3, expected a text"),
        ({"document_length": 0}, "document_length is 0, expected a number of tokens above 0"),
        ({"skipped": "."}, "skipped is '.', expected a list of texts"),
        ({"skipped_in": ["passage"]}, "skipped_in has 'passage', expected query or document"),
        ({"query_length": 8, "expansion_length": 9}, "query_length is 8, but queries are expanded to 9 tokens"),
        ({"dense": "128"}, "dense is '128', expected a list of layers"),
        ({"widht": 8}, "unknown field 'widht'.* Known: dense"),
    ],
)
def test_settings_say_what_is_wrong(values, message):
    with pytest.raises(ValueError, match=message):
        MultiVectorSettings.of(values)


def test_stored_layers_are_not_changed():
    stored = {"dense": [{"width": 20, "activation": "identity", "bias": False}]}
    assert MultiVectorSettings.over(stored, {"similarity": "meanmaxsim"}).dense[0].width == 20
    with pytest.raises(ValueError, match="dense: got 8:tanh, but the model has 20:identity, with weights"):
        MultiVectorSettings.over(stored, {"dense": [{"width": 8}]})
    assert MultiVectorSettings.over({}, {"dense": [{"width": 8}]}).dense[0].width == 8
