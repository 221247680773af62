"""Data: from files and data sets to the batches of models. Imports nothing heavy by itself.

sources, streams    from data arguments to tables, or to streams of rows; the formats are in readers/
table               rows in columns, with the origin of each row
schemas/            the meaning of columns for a task: their names and roles, labels, choices, conversations
tokenization/       rows to token ids; cache keeps the result on disk
token_files, blocks tokenised documents on disk, and the rows built from them
structured          CPM-Bee's rows
pretraining/        texts to token files, and the objectives: masking, span corruption, next tokens
sampling, streaming the rows of each global batch
batching/           mixtures, packing by best fit, collation, prefetching
examples            the interface to the training loop
"""
