"""Token files from lists."""

import numpy as np

from modelcenter.data.token_files import TokenFile, TokenWriter, open_tokens


def write_tokens(path, documents, vocab_size=65536, **options) -> TokenFile:
    with TokenWriter(path, vocab_size, **options) as writer:
        for document in documents:
            writer.add(np.array(document, np.int64), np.array([len(document)]))
    return open_tokens(path)
