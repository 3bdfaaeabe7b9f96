"""What every stage needs and none teaches: weights, tokenizer, workloads, the check, trace, report, command line."""
