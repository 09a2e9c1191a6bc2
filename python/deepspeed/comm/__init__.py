"""deepspeed.comm: torch.distributed's calls, with DeepSpeed's extra keywords and its log of them."""
from deepspeed._names import attribute_table
from deepspeed.comm import comm as _comm
from deepspeed.comm.comm import *  # noqa: F403

__getattr__, __dir__ = attribute_table(__name__, {}, modules=("comm",))
__all__ = _comm.__all__
