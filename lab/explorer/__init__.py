"""Records a run slot by slot; one HTML page steps through it, and computes runs of one's own."""
