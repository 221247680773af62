"""ModelCenter: load pretrained language models by name, fine-tune them anywhere, export them to the Hugging Face Hub.

    import modelcenter as mc

    model = mc.from_pretrained("bert-base-uncased", task="masked-lm")
    model.save_pretrained("my-bert")

Public names are imported on first use (PEP 562): `import modelcenter` does not import torch, reads no network and
starts no process group. Where to look:

auto.py, registry.py, config.py    from_pretrained and the like; architectures and names; a model's fields
models/, layers/                   one file per architecture; the layers they share
convert/, hub/                     conversion rules; downloading, loading, saving
data/, training/, generation/      rows and batches; the training loop and its tasks; text generation
adapters/                          LoRA, prompt tuning, freezing
compare/, testing/                 comparison with transformers; the parity tests
cli.py, command_line/              the verbs; flags and their errors (preprocess.py is a verb of its own)
"""

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelcenter._version import __version__
from modelcenter.registry import ARCHITECTURES

_PUBLIC = {
    "modelcenter.auto": (
        "from_pretrained",
        "from_config",
        "register",
        "AutoModel",
        "AutoModelForPreTraining",
        "AutoModelForSeq2SeqLM",
        "AutoModelForMaskedLM",
        "AutoModelForCausalLM",
        "AutoModelForSequenceClassification",
        "AutoModelForTokenClassification",
        "AutoModelForQuestionAnswering",
        "AutoModelForMultipleChoice",
        "AutoModelForNextSentencePrediction",
        "AutoModelForTextEncoding",
        "AutoTokenizer",
    ),
    "modelcenter.registry": ("list_models", "ModelInfo"),
    "modelcenter.config": ("ModelConfig",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
# Classes of the architectures: Bert, GPT2, ...
_HOME |= {name: module for module, name in (str(spec.model).split(":") for spec in ARCHITECTURES.values())}
_SUBMODULES = ("adapters", "training", "data", "hub", "convert", "layers", "models", "compare", "testing")

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from modelcenter.auto import *  # noqa: F403
    from modelcenter.models.albert import Albert as Albert
    from modelcenter.models.bart import Bart as Bart
    from modelcenter.models.bert import Bert as Bert
    from modelcenter.models.bloom import Bloom as Bloom
    from modelcenter.models.composed import Composed as Composed
    from modelcenter.models.cpm1 import CPM1 as CPM1
    from modelcenter.models.cpm2 import CPM2 as CPM2
    from modelcenter.models.cpm3 import CPM3 as CPM3
    from modelcenter.models.cpmant import CPMAnt as CPMAnt
    from modelcenter.models.cpmbee import CPMBee as CPMBee
    from modelcenter.models.deberta import Deberta as Deberta
    from modelcenter.models.deberta_v2 import DebertaV2 as DebertaV2
    from modelcenter.models.distilbert import DistilBert as DistilBert
    from modelcenter.models.electra import Electra as Electra
    from modelcenter.models.ernie import Ernie as Ernie
    from modelcenter.models.esm import Esm as Esm
    from modelcenter.models.eurobert import EuroBert as EuroBert
    from modelcenter.models.gemma import Gemma as Gemma
    from modelcenter.models.gemma import Gemma3 as Gemma3
    from modelcenter.models.gemma2 import Gemma2 as Gemma2
    from modelcenter.models.gpt2 import GPT2 as GPT2
    from modelcenter.models.gpt_neox import GPTNeoX as GPTNeoX
    from modelcenter.models.gptj import GPTJ as GPTJ
    from modelcenter.models.granite import Granite as Granite
    from modelcenter.models.granite import GraniteMoe as GraniteMoe
    from modelcenter.models.gte import Gte as Gte
    from modelcenter.models.led import Led as Led
    from modelcenter.models.llama import Llama as Llama
    from modelcenter.models.longformer import Longformer as Longformer
    from modelcenter.models.m2m_100 import M2M100 as M2M100
    from modelcenter.models.marian import Marian as Marian
    from modelcenter.models.mbart import MBart as MBart
    from modelcenter.models.minicpm import MiniCPM as MiniCPM
    from modelcenter.models.minicpm3 import MiniCPM3 as MiniCPM3
    from modelcenter.models.mistral import Mistral as Mistral
    from modelcenter.models.mixtral import Mixtral as Mixtral
    from modelcenter.models.modernbert import ModernBert as ModernBert
    from modelcenter.models.modernbert_decoder import ModernBertDecoder as ModernBertDecoder
    from modelcenter.models.mpnet import MPNet as MPNet
    from modelcenter.models.nomic_bert import NomicBert as NomicBert
    from modelcenter.models.nomic_bert_moe import NomicBertMoe as NomicBertMoe
    from modelcenter.models.olmo2 import Olmo2 as Olmo2
    from modelcenter.models.olmoe import Olmoe as Olmoe
    from modelcenter.models.opt import OPT as OPT
    from modelcenter.models.pegasus import Pegasus as Pegasus
    from modelcenter.models.phi3 import Phi3 as Phi3
    from modelcenter.models.qwen import Qwen2 as Qwen2
    from modelcenter.models.qwen import Qwen3 as Qwen3
    from modelcenter.models.qwen_moe import Qwen2Moe as Qwen2Moe
    from modelcenter.models.qwen_moe import Qwen3Moe as Qwen3Moe
    from modelcenter.models.roberta import Camembert as Camembert
    from modelcenter.models.roberta import Data2VecText as Data2VecText
    from modelcenter.models.roberta import Roberta as Roberta
    from modelcenter.models.roberta import XLMRoberta as XLMRoberta
    from modelcenter.models.smollm3 import SmolLM3 as SmolLM3
    from modelcenter.models.t5 import MT5 as MT5
    from modelcenter.models.t5 import T5 as T5
    from modelcenter.models.t5 import UMT5 as UMT5
    from modelcenter.models.t5gemma import T5Gemma as T5Gemma
    from modelcenter.registry import ModelInfo as ModelInfo
    from modelcenter.registry import list_models as list_models


def _check_engine() -> None:
    """Raise ImportError if another top-level module `engine` shadows ours: it would fail later, far from the cause."""
    ours = Path(__file__).resolve().parent.parent / "engine" / "__init__.py"
    spec = importlib.util.find_spec("engine")
    found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if found != ours:
        where = found or (list(spec.submodule_search_locations or []) if spec is not None else "nothing")
        raise ImportError(
            f"modelcenter needs its own package `engine` at {ours}, but `import engine` finds {where}. "
            "Rename that module or folder, or start Python from another folder."
        )


_check_engine()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"modelcenter.{name}")
    else:
        raise AttributeError(f"module 'modelcenter' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
