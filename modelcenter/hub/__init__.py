"""Models by name: finding, downloading, loading, converting, saving and publishing checkpoints.

`resolve` finds the files of a name, `load` and `save` are the doors to models, `tokenizer` to tokenizers. `files` holds
the formats on the disk, `remote` the Hugging Face Hub, `conversion` what turns one format into the other, and `info`
what is known of a model that is not loaded.
"""
