#!/usr/bin/env python
"""The same as `modelcenter convert`."""

import sys
from pathlib import Path

if __package__ in (None, ""):  # run from a checkout: the packages lie beside this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from modelcenter.cli import main

if __name__ == "__main__":
    main(["convert", *sys.argv[1:]])
