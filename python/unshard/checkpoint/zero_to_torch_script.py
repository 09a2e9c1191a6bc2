#!/usr/bin/env python
"""Makes one state dict, in a dtype of your choice, of the checkpoint folder that this file lies in. zero_to_fp32.py must lie beside it.

    python zero_to_torch.py . out --dtype bf16          the newest checkpoint's weights as out/pytorch_model.bin
"""
import sys

if __package__:
    from unshard.checkpoint import zero_to_fp32_script as zero_to_fp32
else:
    import zero_to_fp32


def main(argv=None):
    return zero_to_fp32.main(argv, asks_dtype=True)


if __name__ == "__main__":
    sys.exit(main())
