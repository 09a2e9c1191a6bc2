"""deepspeed.monitor: scalars to TensorBoard, Weights & Biases and CSV files."""
from deepspeed._names import attribute_table

__getattr__, __dir__ = attribute_table(__name__, {}, modules=("config", "csv_monitor", "monitor", "tensorboard", "wandb"))
