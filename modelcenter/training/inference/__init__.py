"""Using a trained model: the verbs predict, evaluate, generate and mine, and text generation."""
