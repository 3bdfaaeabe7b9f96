"""Records a run slot by slot, and makes of it one HTML page in which a reader steps through it."""
