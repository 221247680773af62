"""Parity tests for an architecture, ours or a user's own: subclass `ArchitectureTests` in a test file.

    class TestBert(ArchitectureTests):
        hf_config = {"model_type": "bert", "vocab_size": 131, ...}

Every test compares with an independent truth: transformers' model of the same class with every parameter randomised
(its own initialisation leaves biases 0 and norms 1, which hides mistakes). Use sizes that are all different, and an
exaggerated norm eps, so that a swapped dimension or a dropped field shows. Run with pytest.

    architecture.py      ArchitectureTests: the tests
    reference.py         transformers' model as the truth, and what must equal it
    ranks.py             the same rows on two ranks
    mutations.py         spoilt models, which the tests must notice
    parity.py            random parameters, forward and backward, comparison of tensors
    largest_tensor.py    the largest tensor that a computation makes
"""

from modelcenter.testing.architecture import LEVELS, ArchitectureTests
from modelcenter.testing.mutations import MUTATIONS
from modelcenter.testing.parity import assert_same, randomize_, run_backward
from modelcenter.testing.ranks import two_ranks
from modelcenter.testing.reference import CHOICES

__all__ = [
    "CHOICES",
    "LEVELS",
    "MUTATIONS",
    "ArchitectureTests",
    "assert_same",
    "randomize_",
    "run_backward",
    "two_ranks",
]
