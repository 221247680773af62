"""BMTrain's API on this engine: parameters, modules, blocks, files and the read-only settings.

::

    parameter, model     DistributedParameter, DistributedModule; init_parameters, BMTrainModelWrapper
    block, pipeline      Block and TransformerBlockList; PipelineTransformerBlockList
    linear, parallel     the linear layer, whole and split by tensor parallelism
    store                save and load of a model in one file
    settings             config, wait_loader

BMTrain's other modules have the same names in ``engine``: distributed, nn, inspect, debug, utils, lr_scheduler.
"""
