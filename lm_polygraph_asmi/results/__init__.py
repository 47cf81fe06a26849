"""What stands on disk and how it is read: statistics by name, result cache, manifest, runs,
settings."""
