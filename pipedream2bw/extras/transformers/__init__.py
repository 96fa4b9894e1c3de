"""For users of Hugging Face's transformers: :class:`PipelineTrainer`."""

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"PipelineTrainer: {error}: it needs transformers and accelerate; install them with "
        "pip install pipedream2bw[transformers]"
    ) from error

from .trainer import PipelineTrainer

__all__ = ["PipelineTrainer"]
