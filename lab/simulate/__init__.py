"""A GPU, calculated: how long a pass takes, and a whole run."""
