"""ColossalAI's fused Adams, by torch's fused kernels. Their weight decay is 0 by default, torch's AdamW has 0.01."""

from typing import Any

import torch


class HybridAdam(torch.optim.Adam):
    """Adam for parameters on any device; the same as `torch.optim.AdamW`, or `Adam`, with ColossalAI's defaults.

    Args:
        model_params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: must be True.
        betas: decay of the running averages of gradients and their squares.
        eps: added to the root of the average of squares.
        weight_decay: decoupled from the gradient with `adamw_mode`, otherwise added to it.
        adamw_mode: see above.
        nvme_offload_fraction, nvme_offload_dir: must be left out: states are not kept on disks.
        others: further settings of the groups.

    Raises:
        ValueError: an argument has a value that is not available.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        **others: Any,
    ) -> None:
        name = type(self).__name__
        if not bias_correction:
            raise ValueError(f"{name}(bias_correction=False) is not available: leave it out")
        if nvme_offload_fraction or nvme_offload_dir:
            raise ValueError(
                f"{name}: states are not kept on disks: leave nvme_offload_fraction and nvme_offload_dir out, and give "
                "the plugin cpu_offload=True"
            )
        super().__init__(
            model_params, lr, betas, eps, weight_decay, decoupled_weight_decay=adamw_mode, **others
        )


class CPUAdam(HybridAdam):
    """The same: Echelon keeps states on the CPU by `cpu_offload=True` of the plugin."""


class FusedAdam(HybridAdam):
    """The same, with the order of arguments that ColossalAI's FusedAdam has; `amsgrad` must be False."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise ValueError("FusedAdam(amsgrad=True) is not available: leave it out")
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, adamw_mode)
