"""One short file for each question that comes after the ladder. Each stands on the ladder alone."""
