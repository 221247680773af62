"""Changes to the default initial values (Model.init_spec) that several architectures share."""

from typing import Any

InitSpec = dict[str, tuple[Any, ...]]  # see Model.init_spec


def scaled_residuals(spec: InitSpec, num_layers: int) -> InitSpec:
    """GPT-2's initialisation: the std of weights whose outputs are added to the residual stream is divided by the
    square root of the number of these additions."""
    small = 1.0 / (2 * num_layers) ** 0.5
    for name, (kind, *values) in spec.items():
        if name.endswith(("attn.out.weight", "cross.out.weight", "mlp.down.weight")):
            spec[name] = (kind, values[0] * small)
    return spec
