"""What every command line is made of: words and flags, their types and YAML files, and how a mistake is reported.

arguments.py prepares words for argparse, flags.py turns a dataclass into a command line, errors.py ends a program with
one line. The verbs themselves are in modelcenter.cli. Imports no torch.
"""
