"""The files of a checkpoint: their names and formats, reading and writing tensors, and replacing a directory safely."""
