"""The fine-tuned tasks, by their names for --tasks."""

from scripts.bench.lib.finetuning.tasks.base import Task
from scripts.bench.lib.finetuning.tasks.classification import Classification
from scripts.bench.lib.finetuning.tasks.dpo import DPO
from scripts.bench.lib.finetuning.tasks.embedding import Embedding
from scripts.bench.lib.finetuning.tasks.lm import LanguageModelling
from scripts.bench.lib.finetuning.tasks.mlm import MaskedLM
from scripts.bench.lib.finetuning.tasks.multi_vector import MultiVector
from scripts.bench.lib.finetuning.tasks.multiple_choice import MultipleChoice
from scripts.bench.lib.finetuning.tasks.qa import QuestionAnswering
from scripts.bench.lib.finetuning.tasks.seq2seq import Seq2Seq
from scripts.bench.lib.finetuning.tasks.sparse_embedding import SparseEmbedding
from scripts.bench.lib.finetuning.tasks.token_classification import TokenClassification

TASKS: dict[str, Task] = {
    "classification": Classification(),
    "mlm": MaskedLM(),
    "lm": LanguageModelling(),
    "seq2seq": Seq2Seq(),
    "token_classification": TokenClassification(),
    "qa": QuestionAnswering(),
    "multiple_choice": MultipleChoice(),
    "dpo": DPO(),
    "embedding": Embedding(),
    "sparse_embedding": SparseEmbedding(),
    "multi_vector": MultiVector(),
}
