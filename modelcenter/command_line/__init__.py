"""The machinery of command lines, and of reporting mistakes in them. Imports no torch. The verbs are in cli.py.

flags.py turns a dataclass into a command line and the keys of a YAML file (yaml_file.py), with other spellings of its
flags (spellings.py) and checked values (values.py). arguments.py prepares the words for argparse; verbs without a
dataclass use its parser. errors.py ends a program with a one-line error.
"""
