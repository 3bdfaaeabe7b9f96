"""The built-in model: weights, tokenizer, prompts, and the corpus that it was trained on."""
