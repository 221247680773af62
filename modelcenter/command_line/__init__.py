"""What every command line is made of, and how it reports a mistake. Imports no torch. The verbs are in cli.py.

flags.py turns a dataclass into a command line and a YAML file (yaml_file.py), with other spellings of its flags
(spellings.py) and checked values (values.py). arguments.py prepares the words for argparse; verbs without a dataclass
use its parser. errors.py ends a program with one line.
"""
