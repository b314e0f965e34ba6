"""Models that infer and learn: one worker over backends that run packed micro-batches."""
