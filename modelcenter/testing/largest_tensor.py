"""Find the largest tensor that a computation makes."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """While it is active, notes the most elements of a tensor that an operator makes; views do not count.

    Attributes:
        elements: of the largest tensor so far. operator: the name of what made it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.operator = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not func.is_view and tensor.numel() > self.elements:
                self.elements, self.operator = tensor.numel(), str(func)
        return out
