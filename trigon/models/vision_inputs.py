"""The inputs of a vision tower that follow from the sizes of its images, computed on the host.

Left to itself, a tower of transformers computes them on its device, and reads back from it how many
windows there are and how long: several times in each pass, the host would wait for the GPU. The
functions of transformers (5.16 to 5.19) that it calls are called here on the CPU, and their results
passed to the tower, which then computes none of them. Does not depend on packed rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trigon.models.attention import tower_kernel
from trigon.models.dtypes import compute_dtype
from trigon.models.kernels import supports
from trigon.models.transfer import to_device


def tower_inputs(tower: Any, grid_thw: Tensor) -> dict[str, Any]:
    """Return the keyword arguments of a tower that takes patches.

    Args: grid_thw: [images and videos, 3] on the CPU, (time, height, width) in patches.
    """
    from transformers import vision_utils

    merge: int = tower.spatial_merge_size
    positions = vision_utils.get_vision_position_ids(grid_thw, merge)
    starts = vision_utils.get_vision_cu_seqlens(grid_thw)
    inputs = {"position_ids": positions, "cu_seqlens": starts}
    longest = {"max_seqlen": _longest(starts)}
    if hasattr(tower, "fullatt_block_indexes"):  # Qwen2.5-VL: most layers attend within windows
        window_index, window_starts = vision_utils.get_vision_window_index(
            grid_thw, spatial_merge_size=merge, window_size=tower.window_size, patch_size=tower.patch_size
        )
        inputs |= {"window_index": window_index, "cu_window_seqlens": window_starts}
        longest["max_window_seqlen"] = _longest(window_starts)
    if hasattr(tower, "num_grid_per_side"):  # Qwen3-VL: a table of positions is interpolated
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid_thw,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        inputs |= {"interp_indices": indices, "interp_weights": weights}
    device: torch.device = tower.device
    # sdpa splits its inputs by the lengths of the windows, and so reads them in each layer.
    read_by_host = ("cu_seqlens", "cu_window_seqlens") if _attends_by_sdpa(tower) else ()
    return longest | {
        name: tensor if name in read_by_host else to_device(tensor, device) for name, tensor in inputs.items()
    }


def _attends_by_sdpa(tower: Any) -> bool:
    kernel = tower_kernel(tower.config)
    dtype, head_dim = compute_dtype(tower.device, tower.dtype), tower.blocks[0].attn.head_dim
    return kernel == "sdpa" or not supports(kernel, dtype, head_dim, None)


def _longest(starts: Tensor) -> int:
    return int(starts.diff().max())
