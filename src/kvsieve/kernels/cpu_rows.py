"""What keys and values say without queries, on CPUs: redundancy and output norms."""

from __future__ import annotations

import torch

from kvsieve.kernels.cpu_scores import KEY_TILE_BYTES, TILE_BYTES

MAX_KEY_ROWS = 256
"""Keys whose similarities with all others are held at once, at most."""


def key_redundancy(key: torch.Tensor, *, threshold: float = 0.5) -> torch.Tensor:
    """See `call.key_redundancy`."""
    num_kv_heads, num_tokens, head_size = key.shape
    total = torch.zeros((num_kv_heads, num_tokens), dtype=torch.float32, device=key.device)
    # The similarities, and a product of them with the column numbers.
    rows = max(1, min(MAX_KEY_ROWS, num_tokens, TILE_BYTES // (2 * 4 * max(1, num_tokens))))
    step = max(1, KEY_TILE_BYTES // (4 * head_size))
    tile = torch.empty((2, rows, num_tokens), dtype=torch.float32, device=key.device)
    column = torch.arange(num_tokens, device=key.device)
    for kv_head in range(num_kv_heads):
        for first in range(0, num_tokens, rows):
            mine = column[first : first + rows]
            similarity, newest = tile[:, : mine.shape[0]]
            unit = _unit(key[kv_head, mine[0] : mine[-1] + 1])
            for start in range(0, num_tokens, step):
                columns = slice(start, start + step)
                torch.mm(unit, _unit(key[kv_head, columns]).t(), out=similarity[:, columns])
            row = torch.arange(mine.shape[0], device=key.device)
            similarity[row, mine] = 0.0
            # Column numbers count from 1, so 0 stands for "no neighbour is that similar".
            torch.gt(similarity, threshold, out=newest)
            newest.mul_(column + 1)
            last = newest.amax(dim=-1).long() - 1
            has_one = last >= 0
            similarity[row[has_one], last[has_one]] = 0.0
            total[kv_head] += similarity.sum(dim=0)
    return torch.softmax(total.div_(max(1, num_tokens)), dim=-1)


def output_norms(value: torch.Tensor, output_weight: torch.Tensor) -> torch.Tensor:
    """See `call.output_norms`."""
    num_kv_heads, num_tokens, _ = value.shape
    num_heads, _, hidden = output_weight.shape
    group = num_heads // num_kv_heads
    norms = torch.zeros((num_kv_heads, num_tokens), dtype=torch.float32, device=value.device)
    rows = max(1, min(num_tokens, TILE_BYTES // (4 * hidden)))
    tile = torch.empty((rows, hidden), dtype=torch.float32, device=value.device)
    for head in range(num_heads):
        weight = output_weight[head].float()
        for first in range(0, num_tokens, rows):
            taken = value[head // group, first : first + rows].float()
            projected = torch.mm(taken, weight, out=tile[: taken.shape[0]])
            total = norms[head // group, first : first + rows]
            total += torch.linalg.vector_norm(projected, ord=1, dim=-1)
    return norms.div_(group)


def redundancy_scratch_bytes(num_tokens: int, head_size: int) -> int:
    """Bytes that `key_redundancy` holds beyond its inputs and its result, at most.

    A constant of about 7 MiB and 40 bytes a token, unless two rows of similarities are
    larger than a tile.
    """
    tile = max(TILE_BYTES, 2 * 4 * num_tokens)
    unit = 3 * MAX_KEY_ROWS * head_size * 4 + 5 * MAX_KEY_ROWS * 8
    return tile + 3 * KEY_TILE_BYTES + unit + 40 * num_tokens


def norms_scratch_bytes(head_size: int, hidden: int) -> int:
    """Bytes that `output_norms` holds beyond its inputs and its result, at most.

    A constant of about 5 MiB and two heads' output weights and blocks of values in float32:
    the next is converted before the last is dropped.
    """
    rows = max(1, TILE_BYTES // (4 * hidden))
    copies = 2 * 4 * head_size * (hidden + rows)
    return max(TILE_BYTES, 4 * hidden) + copies + 2 * 4 * rows


def _unit(rows: torch.Tensor) -> torch.Tensor:
    """The rows at length one, in float32; a row of zeros stays zero."""
    return torch.nn.functional.normalize(rows.float(), dim=-1)
