"""The mapping of folders to packages, which pyproject.toml cannot express. Imports no torch and needs no compiler.

`scripts/` and `model_configs/` are at the top of a checkout, where people look for them, but inside the package
`modelcenter` in an install, where they cannot collide with other packages. Likewise `csrc/` is inside `engine`;
`python -m engine.ops --build` compiles it.
"""

from pathlib import Path

from setuptools import find_packages, setup

csrc = ["engine.csrc", *(f"engine.csrc.{name}" for name in ("core", "cpu", "cuda"))]
families = sorted(path.name for path in Path("model_configs").iterdir() if path.is_dir())

setup(
    packages=[
        *find_packages(include=["engine", "engine.*", "modelcenter", "modelcenter.*"]),
        "modelcenter.scripts",
        "modelcenter.scripts.samples",
        "modelcenter.model_configs",
        *(f"modelcenter.model_configs.{family}" for family in families),
        *csrc,
    ],
    include_package_data=False,  # package_data lists what is shipped, not MANIFEST.in
    package_dir={
        "modelcenter.scripts": "scripts",
        "modelcenter.model_configs": "model_configs",
        "engine.csrc": "csrc",
    },
    package_data={
        **{name: ["*.h", "*.cpp", "*.cu"] for name in csrc},
        "modelcenter.scripts": ["recipes/*.yaml"],
        "modelcenter.scripts.samples": ["*.jsonl", "*.md"],
        **{f"modelcenter.model_configs.{family}": ["*.json"] for family in families},
    },
)
