"""Sharding and splitting a model over ranks.

::

    shard, checks               ``engine.shard``, and the checks that it makes
    over_ranks                  what it does on several ranks; imported only then, as FSDP and DTensor take a second
    units                       which modules are gathered together, and which parameters belong to them
    mesh                        the device mesh, with a dimension for each kind of parallelism
    fsdp                        everything that uses FSDP2's private names
    forward_hooks, unused       gathered parameters that FSDP would keep; parameters that a backward leaves unused
    scalars, fp32_accumulation  parameters without dimensions; gradients of 16-bit parameters
    tensor, tensor_layers       tensor parallelism: plans, and the layers that compute with a part
    context, functional, rng    context and sequence parallelism; collectives and random numbers for activations
    inputs                      a check that ranks which share a batch were given the same one
    pipeline/                   pipeline parallelism
    gloo/                       replacements for gloo's collectives on CPUs
"""
