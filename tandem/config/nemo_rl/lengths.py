"""The room of prompt and response. NeMo-RL lets a response take what its prompt leaves; ours has a room of its own."""

from __future__ import annotations

from tandem.config.nemo_rl.source import Source

PROMPT_SHARE = 4  # where NeMo-RL sets no bound between the two: one part in four is the prompt's


def response_room(source: Source) -> int:
    """`max_new_tokens` of ours, so that a prompt of the length that NeMo-RL allows has its room too."""
    total = source.get("policy.max_total_sequence_length", 0)
    new = source.get("policy.generation.max_new_tokens", total)
    prompt = source.get("data.max_input_seq_length", total)
    if not all(isinstance(length, int) for length in (total, new, prompt)):
        return 0
    if new < total:
        return new
    return total - prompt if 0 < prompt < total else total - total // PROMPT_SHARE
