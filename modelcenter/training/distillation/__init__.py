"""Knowledge distillation (Hinton et al. 2015, arXiv:1503.02531): training a model to match a larger one's predictions.

teacher.py runs the larger model; classes.py matches its classes; comparisons.py measures, for each kind of head, the
distance between two outputs; loss.py combines the distance and the labels' loss into the loss of a run, and computes
the metrics of its evaluations. setup/teacher.py reads the flags.
"""
