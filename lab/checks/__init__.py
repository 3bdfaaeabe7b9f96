"""Is it right? The check, its ties, the X-ray, the judge, known bugs, and a loud toy."""
