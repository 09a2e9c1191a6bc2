"""Record what GGUF's reference decoder (Python package `gguf`) makes of random blocks, for gguf_blocks_test.cc.

Run: python record_gguf_blocks.py > gguf_blocks_recorded.inc
A row is 512 values. Its bytes come from a seeded generator that the test has too, but for the fp16 scales, which are set to ordinary sizes.
"""

import gguf
import numpy as np

ROW = 512
# Bytes of a block that are fp16 numbers.
SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def random_bytes(count: int) -> np.ndarray:
    state, result = 12345, np.zeros(count, np.uint8)
    for i in range(count):
        state = (state * 1664525 + 1013904223) % 2**32
        result[i] = state >> 24
    return result


def main() -> None:
    print("// Made by record_gguf_blocks.py: type, weighted sum, then every 32nd value and the last of a row of 512.")
    for name, places in SCALES.items():
        kind = gguf.GGMLQuantizationType[name]
        values, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random_bytes(ROW // values * size).reshape(-1, size)
        for b, block in enumerate(blocks):
            for n, place in enumerate(places):
                block[place : place + 2] = np.array([(0.01 + 0.003 * b) * (-1) ** (b + n)], np.float16).view(np.uint8)
        row = gguf.quants.dequantize(blocks.reshape(-1), kind).astype(np.float32)
        weighted = float((row.astype(np.float64) * np.arange(1, ROW + 1)).sum())
        some = ", ".join(f"{float(v):.9e}F" for v in [*row[::32], row[-1]])
        print(f"{{FileType::{name.lower()}, {weighted:.17g}, {{{some}}}}},")


main()
