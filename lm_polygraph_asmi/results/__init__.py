"""Files of runs: names of statistics, result cache, manifest, runs, groups of runs, scales."""
