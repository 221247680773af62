"""Compare a model with another implementation of it: loss, logits, gradients, and the first layer that differs.

rows.py                   random or given rows of a task, as a padded or a packed batch
gradients.py              gradients of our models and parameters of transformers' under the names of the checkpoint
models.py                 run two models on one batch and compare what they produce
transformers_models.py    transformers' class and model for one of ours
checkpoints.py            compare two checkpoints, or one here with its export in transformers
command.py                `modelcenter compare`
"""

from modelcenter.compare.checkpoints import compare_checkpoints
from modelcenter.compare.command import main
from modelcenter.compare.gradients import hub_gradients, layout_of, parameters_by_file_name
from modelcenter.compare.models import Comparison, compare_models, difference, output_mask
from modelcenter.compare.rows import IGNORE, TOKEN_TASKS, Row, decoder_rows, make_rows, pack_rows, pad_rows, rows_for
from modelcenter.compare.transformers_models import hub_class, load_transformers

__all__ = [
    "IGNORE",
    "TOKEN_TASKS",
    "Comparison",
    "Row",
    "compare_checkpoints",
    "compare_models",
    "decoder_rows",
    "difference",
    "hub_class",
    "hub_gradients",
    "layout_of",
    "load_transformers",
    "main",
    "make_rows",
    "output_mask",
    "pack_rows",
    "pad_rows",
    "parameters_by_file_name",
    "rows_for",
]
