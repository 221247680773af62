"""Replacements of gloo's collectives for models whose shards are on CPUs.

``collectives`` is what FSDP is given. ``shared_memory`` moves its messages between ranks of one machine (without gloo),
``point_to_point`` between machines. ``block_sparse`` and ``sharded_embedding`` spare the way to those rows of embedding
tables that no batch reads.
"""
