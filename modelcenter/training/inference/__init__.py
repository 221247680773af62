"""A trained model at work: the verbs predict, evaluate and generate, and the texts that models write."""
