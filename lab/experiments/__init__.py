"""Commands that measure and compare the stages, and the results and pictures that they produced."""
