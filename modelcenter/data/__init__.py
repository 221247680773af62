"""Data: from files and data sets to the batches that models take. Imports nothing heavy by itself.

sources, streams    data arguments to tables or to rows one after the other; the formats are in readers/
table               rows in columns, with the place each came from
schemas/            what columns mean to a task: their names and roles, labels, choices, conversations
tokenization/       rows to token ids; cache keeps the result on disk
token_files, blocks tokenised documents on disk, and the rows made of them
structured          CPM-Bee's rows
pretraining/        texts to token files, and the objectives: masking, span corruption, next tokens
sampling, streaming which rows make up each global batch
batching/           mixtures, packing by best fit, collation, prefetching
examples            the interface of all this to the training loop
"""
