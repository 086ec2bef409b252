"""What a compaction round moves, and how long it takes."""
