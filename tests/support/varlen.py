"""Varlen attention in plain torch, with the signatures of the kernels.

It runs on any device with any dtype. The kernels do not run on a CPU; these functions replace them
in tests of the code around them.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from trigon.models import kernels


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_keys: int,
    *,
    scale: float,
    left: int,
    right: int,
) -> Tensor:
    """Return the attention output of each sequence in a batch of concatenated sequences.

    Query i of a sequence with Q queries and K keys is at position i + K - Q, and attends to the
    keys from `left` before to `right` after that position; -1 is no bound.

    Args: query: [sum of Q, H, D]; key, value: [sum of K, key heads, D]; query_starts, key_starts:
    int32
        offsets of the sequences. Returns: [sum of Q, H, D].
    """
    assert query_starts.dtype == key_starts.dtype == torch.int32
    assert query_starts[-1] == len(query)
    assert key_starts[-1] == len(key) == len(value)
    assert longest_query == int(query_starts.diff().max())
    assert longest_keys == int(key_starts.diff().max())
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    outputs = []
    for q, k, v in zip(
        *(
            states.split(starts.diff().tolist())
            for states, starts in ((query, query_starts), (key, key_starts), (value, key_starts))
        ),
        strict=True,
    ):
        k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], 1) for states in (k, v))
        ahead = torch.arange(len(k)) - (torch.arange(len(q))[:, None] + len(k) - len(q))
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if left >= 0:
            hidden |= ahead < -left
        if right >= 0:
            hidden |= ahead > right
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


def torch_2_13(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    assert enable_gqa or query.shape[1] == key.shape[1]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    left, right = window_size
    return attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, left=left, right=right)


def torch_2_11(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    seqused_k=None,
):
    return torch_2_13(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size, enable_gqa=False
    )


def flash_attn_2(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    left, right = window_size
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    right = 0 if causal else right
    return attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale=scale, left=left, right=right)


TORCH_VERSIONS = {"2.11": torch_2_11, "2.13": torch_2_13}


def stand_in(monkeypatch: pytest.MonkeyPatch, function=torch_2_13) -> None:
    """Replace torch's varlen_attn by a function, and allow it for every dtype."""
    monkeypatch.setattr(varlen, "varlen_attn", function)
    monkeypatch.setattr(kernels, "FLASH_DTYPES", (torch.float16, torch.bfloat16, torch.float32, torch.float64))


def stand_in_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a flash-attn module with flash_attn_2.

    transformers looks for it as well, so models have to be loaded first.
    """
    stand_in(monkeypatch)
    flash_attn = ModuleType("flash_attn")
    flash_attn.flash_attn_varlen_func = flash_attn_2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
