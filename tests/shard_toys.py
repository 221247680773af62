"""Shared by tests of sharded models: a model, its input, and the message of an error."""

import traceback

import engine_toys as toys

import engine

IDS = toys.microbatch(0)[0]


def said(call, *args):
    """The message of the error that `call` raises, including its notes."""
    try:
        call(*args)
    except (ValueError, RuntimeError) as error:
        return "".join(traceback.format_exception_only(error))
    return "no error"


def sharded(level=3, model=None, **kwargs):
    engine.init_distributed(zero_level=level)
    return engine.shard(model or toys.build(), **kwargs)
