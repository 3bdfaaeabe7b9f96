"""Supporting code for every script: command line, loading, trace, report, check, plots."""
