"""The files of a checkpoint: their names and formats, reading and writing tensors, and replacing a directory safely.

weight_files.py, weight_index.py     opening the weights of a directory; finding the files that hold them
reader.py, raw_io.py                 reading boxes of tensors, in any format
safetensors.py, sharded_writer.py    the only writer of the project; each rank's part of its files
torch_pickle.py, torch_archive.py    reading .bin and .pt files without running code from them
dcp.py                               distributed checkpoints
atomic_directory.py, locks.py        replacing a directory atomically; keeping other processes out
occupied.py, links.py, git_lfs.py, adapter_files.py
                                     what may be found where a model is expected
names.py, json_files.py              names of files; JSON
"""
