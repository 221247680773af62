"""Weight conversion as data: an architecture's rules compile to pieces that load, export and prove themselves.

The files of architectures (bert.py, gpt2.py, llama.py, ...) are tables: each holds an `ARCH`. The machinery:

rules.py         what the tables are written in: `Rename`, `Split`, `Tied`, ..., `Part`, `Task`, `ArchMap`
config_map.py    the fields of config.json and ours; rope.py: those of rotary embeddings
pieces.py        strided bijections between a region of a tensor in the file and a region of one of ours
layout.py        the rules of an architecture compiled to pieces for the parameters of one model
match.py         the tensors of a file against a layout: found, repeated, of another head, unknown
contents.py      the layout of a checkpoint with all the heads that it holds
stream.py        filling slices of a model from a file, and tensors of a file from a model, along the pieces
legacy/          ModelCenter's, CPM-Live's and Megatron's checkpoints in Hugging Face's form

Terms:

hub, native      the two sides: Hugging Face's tensors, and the parameters of our models
key              the name of a hub tensor without the prefix of the body ("bert.")
rule             a line of a table: which hub tensors hold which native ones, in names with `{i}` and `*`
piece            a region of one hub tensor and the region of one native tensor that holds the same elements
part             hub tensors that are present or absent together, such as a pooler or a head; the rest is the body
task             a class of transformers: the body with some parts
layout           the rules compiled for one model: names, shapes and pieces of everything that it has
box              [low, high) for each dimension of a tensor
"""
