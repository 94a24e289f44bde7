"""The `hwgrpo` command: one file per subcommand."""
