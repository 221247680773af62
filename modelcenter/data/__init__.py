"""Data: sources, columns, labels, tokenisation and its cache, token files, sampling, mixtures, streams,
packed batches. Imports nothing heavy by itself."""
