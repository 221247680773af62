"""Replacements for gloo's collectives, for models whose shards are on CPUs.

``collectives`` is what FSDP is given. Its messages go through ``shared_memory`` between ranks of one machine (without
gloo), and through ``point_to_point`` between machines. ``block_sparse`` and ``sharded_embedding`` avoid sending rows of
embedding tables that no batch reads.
"""
