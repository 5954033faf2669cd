"""Multiple-choice questions for fine-tuning: files, split, prompts, batches, scores. Needs no jax."""
