"""What tests of sharded models have in common: one, its input, and what an error says."""

import traceback

import engine_toys as toys

import engine

IDS = toys.microbatch(0)[0]


def said(call, *args):
    """The message of the error that `call` raises, with what was added to it."""
    try:
        call(*args)
    except (ValueError, RuntimeError) as error:
        return "".join(traceback.format_exception_only(error))
    return "no error"


def sharded(level=3, model=None, **kwargs):
    engine.init_distributed(zero_level=level)
    return engine.shard(model or toys.build(), **kwargs)
