"""What `sglang-triattn doctor` looks at, one file for each part of an installation; each yields rows."""
