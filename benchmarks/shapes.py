"""The shapes of models that benchmarks make with random weights."""

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

QWEN = {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
SHAPES: dict[str, PreTrainedConfig] = {
    "smollm2-135m": LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        tie_word_embeddings=True,
    ),
    "qwen2-0.5b": Qwen2Config(
        hidden_size=896, num_hidden_layers=24, num_attention_heads=14, intermediate_size=4864, **QWEN
    ),
    "qwen2-1.5b": Qwen2Config(
        hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, intermediate_size=8960, **QWEN
    ),
    "qwen2-7b": Qwen2Config(
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18944,
        vocab_size=152064,
        tie_word_embeddings=False,
    ),
    "tiny": Qwen2Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=512,
        tie_word_embeddings=True,
    ),
}
