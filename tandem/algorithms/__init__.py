"""The maths of post-training: pure torch functions, tensors and numbers in, tensors out."""
