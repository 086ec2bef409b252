"""From flags to processes: what is checked, refused and confirmed before a server serves."""
