"""The parity harness: modelcenter.testing, which is public, with this project's ranks."""

from modelcenter.testing import ArchitectureTests, assert_same, randomize_, run_backward

__all__ = ["ArchitectureTests", "assert_same", "randomize_", "run_backward"]
