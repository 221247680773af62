"""Conversion between Hugging Face's form and the distributed one, tensor by tensor and without building a model.

run.py                       convert and export, from the source to the target's final name
checkpoint.py                the source, and what its tensors mean
plan.py, fill.py, blocks.py  the files of the target, who fills them, and the elements in order
workers.py, progress.py      processes that share the work; how far it is
metadata.py                  what is written beside the tensors
"""

from modelcenter.hub.conversion.run import Conversion, convert, export
from modelcenter.hub.files.names import CONVERSION_FILE

__all__ = ["CONVERSION_FILE", "Conversion", "convert", "export"]
