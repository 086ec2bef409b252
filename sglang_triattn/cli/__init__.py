"""The `sglang-triattn` command: `main`, and one file per subcommand."""
