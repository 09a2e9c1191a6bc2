"""`deepspeed.init_inference`: a Hugging Face module whose forward and generate() run on the inference engine."""
from unshard.inference.injected.settings import InferenceSettings, default_inference_config, merged
from unshard.inference.injected.wrapper import InferenceEngine

__all__ = ["InferenceEngine", "InferenceSettings", "default_inference_config", "init_inference"]


def init_inference(model, config=None, **keywords):
    """An InferenceEngine around `model`, a plain nn.Module. config: a dict or the path of a JSON file; keywords: the same, and may say
    again what config says. With replace_with_kernel_inject=True a Hugging Face decoder of a known family is computed by the inference
    engine, on tensor_parallel's tp_size ranks; otherwise the module itself runs, in `dtype`.

    Raises ValueError (a wrong or contradicting key), NotImplementedError (a key that asks for what isn't built), ModelError."""
    return InferenceEngine(model, InferenceSettings.of(merged(config, keywords)))
