"""Files of runs, and how to read them: statistics, result cache, manifest, runs, groups of runs."""
