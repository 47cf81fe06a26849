"""What surrounds a run of polygraph_eval: its rows, its checks, its record, its shards."""
