"""What this package adds to a run of polygraph_eval: rows, checks, manifest, merging of shards."""
