"""Models on Megatron-Core: tensor, pipeline, context and data parallel behind the same Backend."""
