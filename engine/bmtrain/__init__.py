"""BMTrain's API on this engine: parameters, modules, blocks, files and the read-only settings."""
