"""Positions that start after that of the padding, as in fairseq: used by RoBERTa and its variants, MPNet, ESM-1b,
M2M100 and NLLB.
"""

import torch
import torch.nn.functional as F

from modelcenter.models.inputs import Batch


def with_positions_after_padding(batch: Batch, pad: int, prefix: str = "") -> Batch:
    """Add the position_ids of `{prefix}input_ids` or `{prefix}inputs_embeds` to a batch, unless it has some.

    In each sequence, tokens have the positions pad + 1, pad + 2, ...; padding between them is not counted and has the
    position `pad`. Embeddings do not show padding, so every column is counted. In generation all tokens of the past
    are counted.
    """
    if batch.get("position_ids") is not None:
        return batch
    ids, embeds = batch.get(f"{prefix}input_ids"), batch.get(f"{prefix}inputs_embeds")
    past = batch.get("past_key_values")
    if past is not None and past.lengths:
        given = ids if ids is not None else embeds
        assert given is not None
        before = torch.tensor(past.lengths, device=given.device)[:, None]
        return {**batch, "position_ids": pad + 1 + before + torch.arange(given.shape[1], device=given.device)}
    mask, ends = batch.get(f"{prefix}attention_mask"), batch.get(f"{prefix}cu_seqlens")
    if ids is not None and ids.dim() == 2:
        real = ids != pad
        if mask is not None and mask.shape == ids.shape and ends is None:  # packed, it is of what is attended to
            real = real & mask.bool()
    elif ids is None and embeds is not None and embeds.dim() == 3:
        real = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
    else:
        return batch  # `pack` raises the error
    count = real.cumsum(1)
    if ends is not None and ends.numel() > 1:
        before = F.pad(count[0], (1, 0))[ends[:-1].long().clamp(0, count.shape[1])]
        token = torch.arange(count.shape[1], device=ends.device)
        count = count - before[torch.bucketize(token, ends[1:], right=True).clamp(max=ends.numel() - 2)]
    return {**batch, "position_ids": count * real + pad}
