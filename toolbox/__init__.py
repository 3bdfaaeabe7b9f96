"""What every script needs and none teaches: command line, loading, trace, report, check, plots."""
