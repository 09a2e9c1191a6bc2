"""What both sides of the encoding know: the dtypes, and the classes that are written by name."""
import argparse
import collections
import pathlib
import types

import torch

# Dtypes that safetensors lacks, or has only in some of its releases, and the one they are viewed as.
VIEWED_AS = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16,
              torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64,
              torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8, torch.float8_e4m3fnuz: torch.uint8,
              torch.float8_e5m2fnuz: torch.uint8}
PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
          torch.bool)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*PLAIN, *VIEWED_AS)}
NAMESPACES = {"argparse": argparse.Namespace, "types": types.SimpleNamespace}
PATHS = {cls.__name__: cls for cls in (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)}
FACTORIES = {cls.__name__: cls for cls in (int, float, bool, str, bytes, list, tuple, dict, set, frozenset, complex,
                                            collections.OrderedDict, collections.Counter, collections.deque)}
