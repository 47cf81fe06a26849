"""What stands on disk and how it is read: statistics by name, journal, manifest, runs, cells."""
