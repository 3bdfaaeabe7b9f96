"""A GPU, calculated: how long a pass takes, a whole run, and what a load needs."""
