"""The files of a checkpoint: their names and formats, reading and writing tensors, and replacing a directory safely.

weight_files.py, weight_index.py     opening the weights of a directory; which files they are
reader.py, raw_io.py                 tensors read by boxes, whatever the format
safetensors.py, sharded_writer.py    the only writer of the project; each rank's part of its files
torch_pickle.py, torch_archive.py    .bin and .pt files, read without running what is in them
dcp.py                               distributed checkpoints
atomic_directory.py, locks.py        a directory that is whole or absent; keeping other processes out
occupied.py, links.py, git_lfs.py, adapter_files.py
                                     what may lie in a place instead of a model
names.py, json_files.py              names of files; JSON
"""
