"""Models by name: finding, downloading, loading, converting, saving and publishing checkpoints.

load.py, save.py                     the entry points for models
resolve.py, run_folder.py            finding the files of a name; what to read from a training run
architecture.py, weights.py          parts of loading: a model on meta, and the source of its weights
legacy.py, dtypes.py                 ModelCenter's files in Hugging Face's form; the dtype of the parameters
tokenizer.py, tokenization_cpm.py    the entry point for tokenizers, and those of CPM
sidecar.py, card.py                  the other files of a checkpoint; model cards
commands.py, flags.py, verify.py     the verbs convert, verify and export; flags of the others; comparing checkpoints
access_tokens.py                     masking access tokens
files/                               the formats on disk
remote/                              the Hugging Face Hub
conversion/                          from one format to the other
info/                                describing a model without loading it
"""
