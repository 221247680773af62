"""How a model is laid out over ranks.

::

    shard, checks               ``engine.shard``, and what it refuses
    over_ranks                  what it does on several ranks: imported there only, as FSDP and DTensor take a second
    units                       which modules are gathered together, and which parameters are theirs
    mesh                        the device mesh, whose dimensions are the kinds of parallelism
    fsdp                        FSDP2's private names, used nowhere else
    forward_hooks, unused       gathered parameters that FSDP would keep; parameters that a backward leaves unused
    scalars, fp32_accumulation  single numbers as parameters; gradients of 16-bit parameters
    tensor, tensor_layers       tensor parallelism: plans, and the layers that compute with a part
    context, functional, rng    context and sequence parallelism; collectives and random numbers of activations
    inputs                      a check that ranks which share a batch were given the same one
    pipeline/                   pipeline parallelism
    gloo/                       collectives that replace gloo's on CPUs
"""
