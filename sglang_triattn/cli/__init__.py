"""The `sglang-triattn` command: `main`, and one file for each subcommand."""
