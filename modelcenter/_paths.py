"""Where the shipped data lives: inside the wheel under `modelcenter/`, beside the package in a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _shipped(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def model_configs_dir() -> Path:
    """The folder of model presets, `<family>/<name>.json`."""
    return _shipped("model_configs")


def scripts_dir() -> Path:
    """The folder of scripts, recipes and sample data."""
    return _shipped("scripts")
