"""CRC-32C of a tensor's bytes: the engine's, which uses the CPU's instruction; else the same in torch, slowly.

In torch, lanes of bytes are summed side by side, then joined in pairs: a CRC without its inversions is linear, so that zeros in front
change nothing and appending n bytes multiplies by a fixed 32x32 bit matrix.
"""
import math

import torch

_LANE_BYTES = 512
_CHUNK_BYTES = 64 << 20


def _crc_table():
    table = torch.arange(256, dtype=torch.int64)
    for _ in range(8):
        table = torch.where(table & 1 == 1, (table >> 1) ^ 0x82F63B78, table >> 1)
    return table


def _times(matrix, crcs):
    """The matrix (images of the 32 bits) applied to each crc."""
    out = torch.zeros_like(crcs)
    for bit in range(32):
        out ^= torch.where((crcs >> bit) & 1 == 1, matrix[bit], 0)
    return out


def _zeros_matrix(count, table):
    """What appending `count` zero bytes does to a CRC."""
    power = torch.ones((), dtype=torch.int64) << torch.arange(32)              # one bit each
    result, step = power.clone(), table[power & 255] ^ (power >> 8)
    while count:
        if count & 1:
            result = _times(step, result)
        step, count = _times(step, step), count >> 1
    return result


def _raw_crc(data, table):
    lanes = 1 << max(0, math.ceil(data.numel() / _LANE_BYTES) - 1).bit_length()
    padded = torch.zeros(lanes * _LANE_BYTES, dtype=torch.uint8)
    padded[padded.numel() - data.numel():] = data
    crcs = torch.zeros(lanes, dtype=torch.int64)
    for column in padded.view(lanes, _LANE_BYTES).t().contiguous():
        crcs = table[(crcs ^ column) & 255] ^ (crcs >> 8)
    step = _zeros_matrix(_LANE_BYTES, table)
    while crcs.numel() > 1:
        crcs = _times(step, crcs[::2]) ^ crcs[1::2]
        step = _times(step, step)
    return crcs


def crc32c_in_torch(tensor):
    data, table = tensor.contiguous().reshape(-1).view(torch.uint8), _crc_table()
    crc = torch.full((1,), 0xFFFFFFFF)
    for chunk in data.split(_CHUNK_BYTES) if data.numel() else []:
        crc = _times(_zeros_matrix(chunk.numel(), table), crc) ^ _raw_crc(chunk, table)
    return int(crc) ^ 0xFFFFFFFF


def crc32c(tensor):
    from unshard.core import _core
    return getattr(_core, "crc32c", crc32c_in_torch)(tensor)
