"""What does it look like? Report, plots, what each token sees, progress."""
