"""Conversion between Hugging Face's format and the distributed one, tensor by tensor and without building a model.

run.py                       convert and export, from the source to the final name of the target
checkpoint.py                opening the source, and matching its tensors with the architecture
plan.py, fill.py, blocks.py  planning the target's files, dividing the work, and reading elements in order
workers.py, progress.py      processes that share the work; reporting progress
metadata.py                  the target's files other than weights
"""

from modelcenter.hub.conversion.run import Conversion, convert, export
from modelcenter.hub.files.names import CONVERSION_FILE

__all__ = ["CONVERSION_FILE", "Conversion", "convert", "export"]
