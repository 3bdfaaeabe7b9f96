"""
The built-in model: weights, tokenizer, prompts, and the corpus that it was trained on: the
documentation of Python's standard library, under the licence of the Python Software Foundation.
"""
