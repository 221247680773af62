"""Weight conversion as data: an architecture's rules compile to pieces that load, export and prove themselves.

The files of architectures (bert.py, gpt2.py, llama.py, ...) are tables: each defines an `ARCH`. The machinery:

rules.py         the vocabulary of the tables: `Rename`, `Split`, `Tied`, ..., `Part`, `Task`, `ArchMap`
config_map.py    mapping the fields of config.json to ours; rope.py: those of rotary embeddings
pieces.py        strided bijections between a region of a tensor in the file and a region of one of ours
layout.py        compiling the rules of an architecture to pieces for the parameters of one model
match.py         matching the tensors of a file with a layout: found, repeated, of another head, unknown
contents.py      the layout of a checkpoint with all its heads
stream.py        filling slices of a model from a file, and tensors of a file from a model, by the pieces
legacy/          ModelCenter's, CPM-Live's and Megatron's checkpoints in Hugging Face's form

Terms:

hub, native      the two sides: Hugging Face's tensors, and the parameters of our models
key              the name of a hub tensor without the prefix of the body ("bert.")
rule             a line of a table: the hub tensors that hold certain native ones, by names with `{i}` and `*`
piece            a region of one hub tensor and the region of one native tensor that holds the same elements
part             hub tensors that are present or absent together, such as a pooler or a head; the rest is the body
task             a class of transformers: the body with some parts
layout           the rules compiled for one model: names, shapes and pieces of all its tensors
box              [low, high) for each dimension of a tensor
"""
