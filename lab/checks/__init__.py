"""Is it right? The check, its ties, the X-ray, known bugs, and a loud toy."""
