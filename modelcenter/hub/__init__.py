"""Models by name: finding, downloading, loading, converting, saving and publishing checkpoints.

load.py, save.py                     the doors to models
resolve.py, run_folder.py            the files of a name; what to read of a training run
architecture.py, weights.py          behind load: a model without memory, and where its weights come from
legacy.py, dtypes.py                 ModelCenter's files in Hugging Face's form; the dtype of the parameters
tokenizer.py, tokenization_cpm.py    the door to tokenizers, and those of CPM
sidecar.py, card.py                  what lies beside the weights; model cards
commands.py, flags.py, verify.py     the verbs convert, verify and export; flags of the others; comparing checkpoints
access_tokens.py                     what must not be shown
files/                               the formats on the disk
remote/                              the Hugging Face Hub
conversion/                          from one format to the other
info/                                what is known of a model that is not loaded
"""
