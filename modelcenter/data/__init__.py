"""Data: sources, columns, labels, tokenisation and its cache, length-aware sampling, packed batches. Imports nothing
heavy by itself."""
