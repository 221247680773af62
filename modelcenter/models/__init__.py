"""One readable file per architecture: config, backbone and heads."""
