#!/usr/bin/env python
"""The same as `modelcenter mine`."""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run by its path: the folder with the packages is one of those around it
    sys.path[0] = str(next(f for f in Path(__file__).resolve().parents if (f / "modelcenter").is_dir()))

from modelcenter.cli import main

if __name__ == "__main__":
    main(["mine", *sys.argv[1:]])
