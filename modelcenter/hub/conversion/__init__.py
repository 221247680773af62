"""Conversion between Hugging Face's form and the distributed one, tensor by tensor and without building a model."""

from modelcenter.hub.conversion.run import Conversion, convert, export
from modelcenter.hub.files.names import CONVERSION_FILE

__all__ = ["CONVERSION_FILE", "Conversion", "convert", "export"]
