"""The flags of runs and verbs: each dataclass defines a command line, the keys of a YAML file and the record in
config.yaml.

common.py has the flags of every task, teacher.py those of distillation, inference.py those of the verbs that use a
trained model; each task has its own file. Imports no torch.
"""

from modelcenter.training.config.classification import ClassificationConfig
from modelcenter.training.config.common import TrainConfig
from modelcenter.training.config.dpo import DPOConfig
from modelcenter.training.config.embedding import EmbeddingConfig
from modelcenter.training.config.inference import EvaluateConfig, GenerateConfig, PredictConfig
from modelcenter.training.config.lm import LMConfig
from modelcenter.training.config.mine import MineConfig
from modelcenter.training.config.multi_vector import MultiVectorConfig
from modelcenter.training.config.multiple_choice import MultipleChoiceConfig
from modelcenter.training.config.pretrain import MLMConfig, PretrainConfig, PretrainLMConfig, SpanCorruptionConfig
from modelcenter.training.config.qa import QAConfig
from modelcenter.training.config.replaced_tokens import ReplacedTokensConfig
from modelcenter.training.config.reranking import RerankingConfig
from modelcenter.training.config.seq2seq import Seq2SeqConfig
from modelcenter.training.config.sparse_embedding import SparseEmbeddingConfig
from modelcenter.training.config.teacher import TaughtConfig
from modelcenter.training.config.token_classification import TokenClassificationConfig

__all__ = [
    "ClassificationConfig",
    "DPOConfig",
    "EmbeddingConfig",
    "EvaluateConfig",
    "GenerateConfig",
    "LMConfig",
    "MLMConfig",
    "MineConfig",
    "MultiVectorConfig",
    "MultipleChoiceConfig",
    "PredictConfig",
    "PretrainConfig",
    "PretrainLMConfig",
    "QAConfig",
    "ReplacedTokensConfig",
    "RerankingConfig",
    "Seq2SeqConfig",
    "SpanCorruptionConfig",
    "SparseEmbeddingConfig",
    "TaughtConfig",
    "TokenClassificationConfig",
    "TrainConfig",
]
