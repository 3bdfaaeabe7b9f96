"""No tests here: pages/ and site/ hold copies of the repository's files."""
collect_ignore_glob = ["pages/*", "site/*"]
