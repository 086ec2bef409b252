"""What servers do with the freed memory, and what their users feel."""
