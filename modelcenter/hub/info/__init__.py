"""`modelcenter info`: describe a model and the memory it needs, without loading it. Imports no torch."""

from modelcenter.hub.info.render import as_json, render
from modelcenter.hub.info.report import model_info

__all__ = ["as_json", "model_info", "render"]
