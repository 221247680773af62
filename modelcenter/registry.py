"""The tables of architectures, tasks and named models. Imports no torch.

An architecture is looked up by Hugging Face's `model_type` (and by `architectures` where two networks share one), never
by the display name of a checkpoint.
"""

import difflib
import functools
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelcenter._paths import model_configs_dir

if TYPE_CHECKING:
    from modelcenter.models.base import Model

TASKS = (
    "base",
    "embedding",
    "multi-vector",
    "sparse-embedding",
    "masked-lm",
    "causal-lm",
    "seq2seq-lm",
    "sequence-classification",
    "token-classification",
    "question-answering",
    "multiple-choice",
    "pretraining",
    "next-sentence-prediction",
    "double-heads",
    "text-encoding",
)


def load_object(path: str) -> Any:
    """Import `package.module:attribute` (or a whole module, without the colon)."""
    module, _, attribute = path.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


@dataclass(frozen=True)
class ArchSpec:
    """One architecture, named by dotted strings so that listing it imports nothing.

    model, config: "module:Class". rules: "module:ATTRIBUTE" of its ArchMap in `convert`. Each may also be the object.
    """

    model_type: str
    model: Any
    config: Any
    rules: Any
    architectures: tuple[str, ...] = ()

    def model_class(self) -> "type[Model]":
        return load_object(self.model) if isinstance(self.model, str) else self.model

    def config_class(self) -> type:
        return load_object(self.config) if isinstance(self.config, str) else self.config

    def arch_map(self) -> Any:
        return load_object(self.rules) if isinstance(self.rules, str) else self.rules


@dataclass(frozen=True)
class ModelInfo:
    """A model that can be loaded by name. `parameters`: of the bare model, or of the encoder if the files hold only
    that; `confirmed`: they were compared with published ones."""

    name: str
    family: str
    parameters: int | None
    hub: str | None
    confirmed: bool


def _ours(
    model_type: str, model: str, file: str | None = None, rules: str | None = None, architectures: tuple[str, ...] = ()
) -> ArchSpec:
    """An architecture of this package: models/<file>.py, convert/<file>.py:ARCH; file: `model_type` by default."""
    file = file or model_type
    home = f"modelcenter.models.{file}:{model}"
    return ArchSpec(model_type, home, f"{home}Config", f"modelcenter.convert.{rules or f'{file}:ARCH'}", architectures)


_T5_TASKS = (
    "Model EncoderModel ForConditionalGeneration ForSequenceClassification ForTokenClassification ForQuestionAnswering"
)


ARCHITECTURES: dict[str, ArchSpec] = {
    spec.model_type: spec
    for spec in (
        _ours("albert", "Albert"),
        _ours("bert", "Bert"),
        _ours("cpmant", "CPMAnt"),
        _ours("cpm1", "CPM1"),
        # Its files have T5's form; only the class names in `architectures` tell it apart.
        _ours("cpm2", "CPM2", architectures=tuple(f"CPM2{end}" for end in _T5_TASKS.split())),
        _ours("cpm3", "CPM3"),
        _ours("cpmbee", "CPMBee"),
        _ours("deberta", "Deberta"),
        _ours("deberta-v2", "DebertaV2", "deberta_v2"),
        _ours("distilbert", "DistilBert"),
        _ours("electra", "Electra"),
        _ours("ernie", "Ernie"),
        _ours("eurobert", "EuroBert"),
        _ours("esm", "Esm"),
        _ours("gpt2", "GPT2"),
        _ours("gte", "Gte"),
        _ours("roberta", "Roberta"),
        _ours("longformer", "Longformer"),
        _ours("modernbert", "ModernBert"),
        _ours("modernbert-decoder", "ModernBertDecoder", "modernbert_decoder"),
        _ours("mpnet", "MPNet"),
        _ours("nomic_bert", "NomicBert"),
        _ours("nomic_bert_moe", "NomicBertMoe"),  # whose files say nomic_bert: see _NETWORKS
        _ours("xlm-roberta", "XLMRoberta", "roberta", "roberta:XLM_ROBERTA"),
        _ours("camembert", "Camembert", "roberta", "roberta:CAMEMBERT"),
        _ours("data2vec-text", "Data2VecText", "roberta", "roberta:DATA2VEC_TEXT"),
        _ours("llama", "Llama"),
        _ours("qwen2", "Qwen2", "qwen", "llama:QWEN2"),
        _ours("qwen3", "Qwen3", "qwen", "llama:QWEN3"),
        _ours("qwen2_moe", "Qwen2Moe", "qwen_moe", "mixture:QWEN2_MOE"),
        _ours("qwen3_moe", "Qwen3Moe", "qwen_moe", "mixture:QWEN3_MOE"),
        _ours("mistral", "Mistral", rules="llama:MISTRAL"),
        _ours("mixtral", "Mixtral", rules="mixture:MIXTRAL"),
        _ours("minicpm", "MiniCPM"),
        _ours("minicpm3", "MiniCPM3", rules="minicpm:MINICPM3"),
        _ours("gemma", "Gemma"),
        _ours("gemma2", "Gemma2"),
        _ours("gemma3_text", "Gemma3", "gemma", "gemma:GEMMA3"),
        _ours("bloom", "Bloom"),
        _ours("gpt_neox", "GPTNeoX"),
        _ours("granite", "Granite"),
        _ours("granitemoe", "GraniteMoe", "granite", "mixture:GRANITEMOE"),
        _ours("gptj", "GPTJ"),
        _ours("olmo2", "Olmo2"),
        _ours("olmoe", "Olmoe", rules="mixture:OLMOE"),
        _ours("smollm3", "SmolLM3"),
        _ours("opt", "OPT"),
        _ours("phi3", "Phi3"),
        _ours("t5", "T5"),
        _ours("mt5", "MT5", "t5", "t5:MT5"),
        _ours("encoder-decoder", "Composed", "composed"),
        _ours("umt5", "UMT5", "t5", "t5:UMT5"),
        _ours("bart", "Bart"),
        _ours("led", "Led"),
        _ours("mbart", "MBart"),
        _ours("m2m_100", "M2M100"),
        _ours("marian", "Marian"),
        _ours("pegasus", "Pegasus"),
        _ours("t5gemma", "T5Gemma"),
    )
}


# Unsupported model types with a name close to a supported one -> what the user can do instead.
REFUSED = {
    "gemma3": "it reads images and texts. Its half for texts is supported: with transformers, "
    "Gemma3ForConditionalGeneration.from_pretrained(...).model.language_model.save_pretrained(directory) makes it a "
    "checkpoint of its own; load that with task=, of a language model 'causal-lm'",
}


# Other spellings of a model_type found in files.
_SPELLINGS = {
    "encoder_decoder": "encoder-decoder",  # of transformers 3
    "new": "gte",  # of Alibaba's code
}
# Where files of two families say the same: (that model_type, a field, its value in files of the second) -> the second.
_NETWORKS = {("nomic_bert", "activation_function", "gelu"): "nomic_bert_moe"}


def nearest(name: str, names: Iterable[str], count: int = 3) -> str:
    """A sentence that suggests the names closest to a mistyped one; empty if none is close."""
    return _did_you_mean(difflib.get_close_matches(name.lower(), list(dict.fromkeys(names)), n=count, cutoff=0.55))


def nearest_preset(name: str) -> str:
    """A sentence that suggests presets for a mistyped or shortened name of a model; empty if none is close.

    Presets that begin with the name come first ("bert-base"). A name that is close to no whole one, because most are
    longer than a family's, is compared with their first words ("brt").
    """
    shortest_first = sorted(preset_names(), key=len)
    begun = [preset for preset in shortest_first if preset.startswith(name.lower() + "-")]
    close = difflib.get_close_matches(name.lower(), shortest_first, n=3, cutoff=0.55)
    if not begun and not close:
        first_words: dict[str, str] = {}
        for preset in shortest_first:
            first_words.setdefault(preset.partition("-")[0], preset)
        close = [first_words[word] for word in difflib.get_close_matches(name.lower(), first_words, n=3, cutoff=0.75)]
    return _did_you_mean(list(dict.fromkeys([*begun, *close]))[:3])


def _did_you_mean(names: Sequence[str]) -> str:
    return f" Did you mean {' or '.join(map(repr, names))}?" if names else ""


def get(model_type: str, architectures: Iterable[str] | None = None) -> ArchSpec:
    """The architecture of a Hugging Face `model_type`.

    Raises:
        ValueError: it is not supported; the message lists those that are.
    """
    named = () if architectures is None else architectures
    if isinstance(named, str) or not (isinstance(named, Iterable) and all(isinstance(name, str) for name in named)):
        raise ValueError(f"architectures: got {architectures!r}, expected a list of class names")
    if not isinstance(model_type, str):
        raise ValueError(f"model_type: got {model_type!r}, expected a name such as 'bert'")
    for spec in ARCHITECTURES.values():
        if spec.architectures and set(named) & set(spec.architectures):
            return spec
    if model_type in REFUSED:
        raise ValueError(f"model_type {model_type!r} is not supported: {REFUSED[model_type]}")
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type {model_type!r} is not supported.{nearest(str(model_type), ARCHITECTURES)} Supported: "
            f"{', '.join(sorted(ARCHITECTURES))}. modelcenter.register adds your own."
        )
    return ARCHITECTURES[model_type]


def model_type_of(config: Mapping[str, Any]) -> Any:
    """The `model_type` of a config.json, told apart where files of two families say the same; if it has none, that of a
    class named in its `architectures`, or None."""
    kind = _stated_model_type(config)
    for (stated, field, value), ours in _NETWORKS.items():
        if kind == stated and config.get(field) == value:
            return ours
    return kind


def _stated_model_type(config: Mapping[str, Any]) -> Any:
    named, kind = config.get("architectures"), config.get("model_type")
    if kind is not None or not isinstance(named, list):
        return _SPELLINGS.get(kind, kind) if isinstance(kind, str) else kind
    for spec in ARCHITECTURES.values():
        # Skip architectures that share a model_type: `get` tells them apart by their classes.
        if not spec.architectures and spec.arch_map().declared_task(named) is not None:
            return spec.model_type
    return None


def register(model_type: str, *, config: Any, model: Any, rules: Any) -> ArchSpec:
    """Add an architecture from outside this package.

    Args:
        model_type: the `model_type` of its config.json.
        config: a ModelConfig subclass. model: a models.base.Model subclass. rules: a convert.rules.ArchMap.
            Each may also be a "module:attribute" string, imported when first needed.

    Raises:
        ValueError: another architecture has this name.
    """
    known = ARCHITECTURES.get(model_type)
    spec = ArchSpec(model_type, model, config, rules)
    if known is not None and known != spec:
        raise ValueError(f"model_type {model_type!r} is already registered for {known.model}; choose another name")
    ARCHITECTURES[model_type] = spec
    return spec


@functools.cache
def _preset_files() -> dict[str, Any]:
    root = model_configs_dir()
    files = {}
    for path in sorted(root.glob("*/*.json")):
        name = f"tiny/{path.stem}" if path.parent.name == "tiny" else path.stem
        files[name] = path
    return files


def shipped_file(name: str) -> Path:
    """The path of a file in model_configs, such as "cpm/modeling_cpm.py"."""
    return model_configs_dir() / name


def preset_names() -> list[str]:
    """The names of all presets; `tiny/<architecture>` are test-sized."""
    return list(_preset_files())


def preset(name: str) -> dict[str, Any]:
    """The JSON of a preset: {hub, revision, parameters, confirmed, config}.

    Args:
        name: its name, or the Hub id that it stands for, with or without the owner ("gpt2").

    Raises:
        KeyError: there is no such preset.
    """
    files = _preset_files()
    if name in files:
        return json.loads(files[name].read_text(encoding="utf-8"))
    for path in files.values():
        entry = json.loads(path.read_text(encoding="utf-8"))
        hub = entry.get("hub") or ""
        if name and name in (hub, hub.rpartition("/")[2]):
            return entry
    raise KeyError(name)


def own_preset(name: str) -> dict[str, Any] | None:
    """The preset of one of our names, not of a Hub id with its owner; None: there is none."""
    try:
        entry = preset(name)
    except KeyError:
        return None
    return None if entry.get("hub") == name else entry


def list_models(tiny: bool = False) -> list[ModelInfo]:
    """The models that `from_pretrained` loads by name, sorted by family and size. `tiny` adds the test-sized ones."""
    infos = []
    for name, path in _preset_files().items():
        if name.startswith("tiny/") and not tiny:
            continue
        entry = json.loads(path.read_text(encoding="utf-8"))
        config = entry["config"]
        infos.append(
            ModelInfo(
                name,
                get(config["model_type"], config.get("architectures")).model_type,
                entry.get("parameters"),
                entry.get("hub"),
                bool(entry.get("confirmed")),
            )
        )
    return sorted(infos, key=lambda info: (info.family, info.parameters or 0, info.name))
