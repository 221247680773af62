"""`modelcenter info`: what is known of a model without loading it, and what it takes. Imports no torch."""

from modelcenter.hub.info.render import as_json, render
from modelcenter.hub.info.report import model_info

__all__ = ["as_json", "model_info", "render"]
