"""The files in which sentence-transformers describes how a model computes embeddings. Imports no torch.

`modules.json` lists the steps: a transformer, a pooling, and optionally dense layers and a normalisation, each with its
own folder. The forms of all versions from 2 on are read; the older form is written, because all of them read it.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelcenter.embedding_settings import FIRST_DENSE, SIMILARITIES, DenseSettings, EmbeddingSettings, poolings_of
from modelcenter.hub.files.json_files import read_json, read_json_objects, write_json
from modelcenter.hub.files.names import WEIGHT_FILES
from modelcenter.registry import nearest
from modelcenter.sparse_settings import SparseEmbeddingSettings

MODULES_FILE = "modules.json"
SETTINGS_FILE = "config_sentence_transformers.json"
TRANSFORMER_FILE = "sentence_bert_config.json"
_STEP_FOLDER = re.compile(r"\d+_\w+")
_STEP_FILE = re.compile(rf"{_STEP_FOLDER.pattern}/config\.json")  # of a step with a folder
CROSS_ENCODER = "CrossEncoder"  # the type of a model that scores pairs of texts, see cross_encoder_files
COLBERT = "ColBERT"  # PyLate's name of a model with a vector for each token
MULTI_VECTOR = ("MultiVectorEncoder", COLBERT)  # see multi_vector_files
SPARSE_ENCODER = "SparseEncoder"  # the type of a model with weights of the vocabulary, see sparse_encoder_files
_SPARSE_STEPS = {"MLMTransformer", "SpladePooling", "SparseAutoEncoder", "SparseStaticEmbedding", "IDF"}
STANFORD_FILE = "artifact.metadata"  # of Stanford's ColBERT, see multi_vector_files

# their names -> ours
_POOLINGS = {
    "mean": "mean", "cls": "cls", "lasttoken": "last", "max": "max", "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
}  # fmt: skip
# The same as switches. Those that are on are concatenated in this order.
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Classes of torch.nn, which the files name with their module.
_ACTIVATIONS = {
    "Tanh": "tanh", "Identity": "identity", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid",
    "LeakyReLU": "leaky_relu", "ELU": "elu",
}  # fmt: skip
_QUERY_PROMPTS, _DOCUMENT_PROMPTS = ("query", "s2p_query"), ("document", "passage", "corpus")
_VECTOR = "sentence_embedding"  # the feature that steps after the pooling read and write
TOKEN_VECTORS = "token_embeddings"  # the feature of steps without a pooling

DENSE_WEIGHTS = WEIGHT_FILES[:2]  # each layer has one of them
POOLING_FOLDER = "1_Pooling"
USUAL_FILES = (MODULES_FILE, SETTINGS_FILE, TRANSFORMER_FILE, f"{POOLING_FOLDER}/config.json")

FindFile = Callable[[str], Path | None]


@dataclass(frozen=True)
class DenseStep:
    """A dense layer as the files describe it.

    Attributes:
        folder: its folder in the model's directory. config: its config.json. inputs: size of its input vectors.
        settings: the rest of the config. number: of the step.
    """

    folder: str
    config: Path
    inputs: int
    settings: DenseSettings
    number: int


def dense_folder(number: int | str) -> str:
    """The folder of a dense layer in our files, by its number among the steps."""
    return f"{number}_Dense"


def is_embedding_file(name: str) -> bool:
    """Whether a file is one of these, except weights. name: within the model's directory."""
    own = (MODULES_FILE, SETTINGS_FILE, TRANSFORMER_FILE, STANFORD_FILE)
    return name in own or _STEP_FILE.fullmatch(name) is not None


def dense_weight_files(names: Collection[str]) -> list[str]:
    """The files of a repository with the weights of steps after the transformer, each in one format only."""
    folders = sorted({name.partition("/")[0] for name in names if _STEP_FILE.fullmatch(name) and name[0] != "0"})
    choices = [[f"{folder}/{name}" for name in DENSE_WEIGHTS] for folder in folders]
    found = [next((name for name in names_of_one if name in names), None) for names_of_one in choices]
    return [name for name in found if name is not None]


def makes_embeddings(find: FindFile) -> bool:
    """Whether the files describe embeddings.

    Args:
        find: as in read_embedding_files.
    """
    return _modules(find) is not None


def stored_kind(find: FindFile) -> str | None:
    """The class of sentence-transformers or PyLate that the files name for a model; None: they name none, as before
    version 5.

    Args:
        find: as in read_embedding_files.
    """
    settings = find(SETTINGS_FILE)
    values = {} if settings is None else read_json(settings)
    kind = values.get("model_type", COLBERT if "query_prefix" in values else None)  # which PyLate did not always write
    return None if kind is None else str(kind)


def is_sparse_encoder(find: FindFile) -> bool:
    """Whether the files say that a model is a SparseEncoder of sentence-transformers, also of a kind that is not
    supported.

    Args:
        find: as of read_embedding_files.
    """
    modules = find(MODULES_FILE)
    if modules is None:
        return False
    return stored_kind(find) == SPARSE_ENCODER or not _SPARSE_STEPS.isdisjoint(step_kinds(modules))


def step_kinds(modules: Path) -> list[str]:
    """The names of the classes of the steps in modules.json, without their modules."""
    return [str(step.get("type", "")).rpartition(".")[2] for step in read_json_objects(modules)]


def step_folders(modules: Path) -> list[str]:
    """The folders of the steps in modules.json. Raises ValueError: one is not a folder beside it."""
    listed, kinds = read_json_objects(modules), step_kinds(modules)
    folders = [str(step.get("path") or f"{i}_{kind}") for i, (step, kind) in enumerate(zip(listed, kinds, strict=True))]
    for folder in folders[1:]:
        if not _STEP_FOLDER.fullmatch(folder):
            raise ValueError(f"{modules}: path is {folder!r}, expected a folder next to it such as {POOLING_FOLDER}")
    return folders


def beside(directory: Path) -> FindFile:
    """A function that finds the files in a model's directory."""
    return lambda name: found if (found := directory / name).is_file() else None


# -- reading ---------------------------------------------------------------------------------------------------------


def read_embedding_files(find: FindFile) -> dict[str, Any]:
    """The fields of EmbeddingSettings in the files of a model.

    Args:
        find: name of a file -> its path, or None if it does not exist.

    Raises:
        ValueError: they describe steps that are not supported.
    """
    if (modules := _modules(find)) is None:
        return {}
    steps = _steps(modules)
    found: dict[str, Any] = {"normalize": steps[-1][0] == "Normalize"}
    if (pooling := find(f"{steps[1][1]}/config.json")) is not None:
        found |= _pooling_of(pooling)
    if dense := dense_steps(find):
        found["dense"] = [step.settings for step in dense]
    found |= read_text_settings(find)
    return {name: value for name, value in found.items() if value is not None}


def read_text_settings(find: FindFile) -> dict[str, Any]:
    """Those fields of the settings that say how texts are read and embeddings are compared; None: they do not say it.

    Args, Raises: as read_embedding_files.
    """
    found: dict[str, Any] = {}
    if (transformer := find(TRANSFORMER_FILE)) is not None:
        found["max_length"] = read_json(transformer).get("max_seq_length")
    if (settings := find(SETTINGS_FILE)) is not None:
        values = read_json(settings)
        prompts = values.get("prompts") or {}
        if not isinstance(prompts, dict):
            raise ValueError(f"{settings}: prompts is {prompts!r:.60}, expected an object with a text for each name")
        for role, names in (("query_prompt", _QUERY_PROMPTS), ("document_prompt", _DOCUMENT_PROMPTS)):
            found[role] = next((prompts[name] for name in names if prompts.get(name)), "")
        if (similarity := values.get("similarity_fn_name")) is not None:
            if similarity not in SIMILARITIES:
                expected = " or ".join(SIMILARITIES)
                raise ValueError(f"{settings}: similarity_fn_name is {similarity!r}, expected {expected}")
            found["similarity"] = similarity
    return found


def dense_steps(find: FindFile) -> list[DenseStep]:
    """The dense layers that the files of a model describe, in order. Raises ValueError as read_embedding_files, or if
    two of them do not fit together."""
    modules = _modules(find)
    if modules is None:
        return []
    folders = [folder for kind, folder in _steps(modules) if kind == "Dense"]
    return read_dense_steps(find, folders, modules, FIRST_DENSE, _VECTOR)


def read_dense_steps(find: FindFile, folders: Sequence[str], modules: Path, first: int, vector: str) -> list[DenseStep]:
    """The dense layers in some folders, one after another.

    Args:
        modules: the file that lists them. first: the number of the first. vector: what they are to read and write.

    Raises:
        ValueError: a config.json is missing or not understood, or two layers do not fit together.
    """
    steps: list[DenseStep] = []
    for number, folder in enumerate(folders, first):
        steps.append(_dense_of(find, folder, modules, number, vector))
        if len(steps) > 1 and steps[-1].inputs != (width := steps[-2].settings.width):
            raise ValueError(
                f"{steps[-1].config}: in_features is {steps[-1].inputs}, but {steps[-2].folder} before it "
                f"returns vectors of size {width}"
            )
    return steps


def check_dense_inputs(steps: Sequence[DenseStep], model: Any) -> None:
    """Raise ValueError if the input of the first dense layer differs in size from the output of the model's pooling."""
    if steps and steps[0].inputs != model.pooled_width:
        raise ValueError(
            f"{steps[0].config}: in_features is {steps[0].inputs}, but the pooling {model.pooling!r} of this model "
            f"returns vectors of size {model.pooled_width}"
        )


def _modules(find: FindFile) -> Path | None:
    """The modules.json of an embedding model; None if there is none, or it describes another type of model."""
    modules = find(MODULES_FILE)
    if modules is None or stored_kind(find) in (CROSS_ENCODER, *MULTI_VECTOR) or is_sparse_encoder(find):
        return None
    return modules


def _steps(modules: Path) -> list[tuple[str, str]]:
    """(type, folder) of each step. Raises ValueError if one is not supported, or not in this position."""
    kinds, folders = step_kinds(modules), step_folders(modules)
    expected = ["Transformer", "Pooling", *["Dense"] * kinds.count("Dense"), *["Normalize"] * ("Normalize" in kinds)]
    if kinds != expected:
        wrong = next((i for i, kind in enumerate(kinds) if expected[i : i + 1] != [kind]), None)
        at = "" if wrong is None else f"; {kinds[wrong]} in {folders[wrong]} is not one of them, or not in this order"
        raise ValueError(
            f"{modules}: the steps are {', '.join(kinds)}; supported are Transformer, Pooling, any number of Dense, "
            f"and then optionally Normalize{at}"
        )
    return list(zip(kinds, folders, strict=True))


def _pooling_of(path: Path) -> dict[str, Any]:
    """The config.json of a pooling, under our names. Raises ValueError if the pooling is not supported."""
    values = read_json(path)
    modes = values.get("pooling_mode")
    if modes is None:
        modes = [mode for name, mode in _SWITCHES.items() if values.get(name)] or ["mean"]
    modes = modes if isinstance(modes, list) else [modes]
    if not modes or len({*map(str, modes)}) < len(modes) or not all(str(mode) in _POOLINGS for mode in modes):
        raise ValueError(
            f"{path}: the pooling is {' and '.join(map(str, modes))}; supported are {', '.join(_POOLINGS)}, each once"
        )
    whole = values.get("include_prompt", True)
    if not isinstance(whole, bool):
        raise ValueError(f"{path}: include_prompt is {whole!r}, expected true or false")
    return {"pooling": "+".join(_POOLINGS[mode] for mode in modes)} | ({} if whole else {"include_prompt": False})


def _dense_of(find: FindFile, folder: str, modules: Path, number: int, vector: str) -> DenseStep:
    """The dense layer in a folder. Raises ValueError if its config.json is missing or not understood."""
    path = find(f"{folder}/config.json")
    if path is None:
        raise ValueError(f"{modules} lists the step {folder}, but {folder}/config.json is missing")
    values = read_json(path)
    sizes: dict[str, Any] = {}
    for name in ("in_features", "out_features"):
        size = sizes[name] = values.get(name)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{path}: {name} is {size!r}, expected a whole number above 0")
    switches: dict[str, bool] = {}
    for name, usual in (("bias", True), ("use_residual", False)):
        switches[name] = values.get(name, usual)
        if not isinstance(switches[name], bool):
            raise ValueError(f"{path}: {name} is {switches[name]!r}, expected true or false")
    for name in ("module_input_name", "module_output_name"):
        if (value := values.get(name)) not in (None, vector):
            which = "the pooled vector" if vector == _VECTOR else "those of the tokens"
            raise ValueError(f"{path}: {name} is {value!r}, supported is {vector!r}, {which}")
    named = str(values.get("activation_function", "torch.nn.Tanh"))
    package, _, kind = named.rpartition(".")
    if not package.startswith("torch.nn") or kind not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(
            f"{path}: activation_function is {named!r}, supported are torch.nn's {known}.{nearest(kind, _ACTIVATIONS)}"
        )
    settings = DenseSettings(
        width=sizes["out_features"],
        activation=_ACTIVATIONS[kind],
        bias=switches["bias"],
        residual=switches["use_residual"],
    )
    return DenseStep(folder, path, sizes["in_features"], settings, number)


# -- writing ---------------------------------------------------------------------------------------------------------


def write_embedding_files(directory: Path, config: EmbeddingSettings, pooling: str, width: int) -> None:
    """Write the files for a model, except weights.

    Args:
        pooling: of the model. width: of its hidden states.
    """
    kinds = ["Transformer", "Pooling", *["Dense"] * len(config.dense), *(["Normalize"] if config.normalizes else [])]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
    steps = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    write_json(directory / MODULES_FILE, steps)
    for path in paths[1:]:
        (directory / path).mkdir(exist_ok=True)
    modes = poolings_of(pooling)
    fields = {"word_embedding_dimension": width, **_mode_fields(modes), "include_prompt": config.include_prompt}
    write_json(directory / POOLING_FOLDER / "config.json", fields)
    width *= len(modes)
    for number, layer in enumerate(config.dense, FIRST_DENSE):
        write_json(directory / dense_folder(number) / "config.json", dense_fields(layer, width))
        width = layer.width
    write_text_settings(directory, config, "SentenceTransformer")


def write_text_settings(directory: Path, config: EmbeddingSettings | SparseEmbeddingSettings, kind: str) -> None:
    """Write what read_text_settings reads. kind: the class of sentence-transformers that loads the model."""
    write_json(directory / TRANSFORMER_FILE, {"max_seq_length": config.max_length, "do_lower_case": False})
    prompts = {"query": config.query_prompt, "document": config.document_prompt}
    settings = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": config.similarity}
    write_json(directory / SETTINGS_FILE, {"model_type": kind, **settings})


def _mode_fields(poolings: Sequence[str]) -> dict[str, Any]:
    """Poolings as fields of a config.json: as switches or, if switches would change their order, by their names."""
    theirs = [name for pooling in poolings for name, ours in _POOLINGS.items() if ours == pooling]
    if theirs != [mode for mode in _SWITCHES.values() if mode in theirs]:
        return {"pooling_mode": theirs}
    return {name: mode in theirs for name, mode in _SWITCHES.items()}


def dense_fields(layer: DenseSettings, inputs: int) -> dict[str, Any]:
    """A dense layer as the fields of a config.json."""
    kind = next(name for name, ours in _ACTIVATIONS.items() if ours == layer.activation)
    home = "linear" if kind == "Identity" else "activation"
    return {
        "in_features": inputs,
        "out_features": layer.width,
        "bias": layer.bias,
        "activation_function": f"torch.nn.modules.{home}.{kind}",
        **({"use_residual": True} if layer.residual else {}),  # unknown to versions before 5.7
    }


def use_own_folders(directory: Path) -> None:
    """Rename the folders of dense layers, in the files of a directory, to those that hold their weights."""
    steps = read_json_objects(directory / MODULES_FILE)
    moved = {}
    for number, step in enumerate(steps):
        path, own = step.get("path"), dense_folder(number)
        if str(step.get("type")).endswith(".Dense") and isinstance(path, str) and path != own:
            moved[own] = read_json(directory / path / "config.json")
            (directory / path / "config.json").unlink()
            if not any((directory / path).iterdir()):
                (directory / path).rmdir()
            step["path"] = own
    for folder, values in moved.items():
        (directory / folder).mkdir(exist_ok=True)
        write_json(directory / folder / "config.json", values)
    if moved:
        write_json(directory / MODULES_FILE, steps)
