"""What any file may need: bad values, flags, tokenizers, weights, the trace."""
