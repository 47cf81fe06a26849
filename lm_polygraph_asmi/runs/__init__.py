"""Around a run of polygraph_eval: rows, checks, manifest and merging of shards."""
