"""How a model is laid out over ranks."""
