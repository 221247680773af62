"""BMTrain's words on this engine: parameters, modules, blocks, files and the read-only settings."""
