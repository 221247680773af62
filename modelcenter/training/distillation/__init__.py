"""Training a model to predict as a larger one does (knowledge distillation; Hinton et al. 2015, arXiv:1503.02531).

teacher.py runs the larger model; classes.py finds its classes; comparisons.py says, for each kind of head, how far two
outputs are apart; loss.py makes of that, and of the labels, the loss of a run and the metrics of its evaluations.
setup/teacher.py reads the flags.
"""
